r"""Remove secrets from texts before they leave: messages, dumps, tracebacks, logs, pages.

Secrets are known values (of variables, settings and flags that contain keys) and strings that look
like keys (`secret_patterns`). Both are searched in the text with escapes decoded, so that `\u002d`,
`%2D` or `&#45;` hides nothing. Redact values, then serialise: see `run_folder.lines.to_json`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from ppo_cli.secret_patterns import KEY_PATTERNS, MIN_SECRET, is_mixed

HIDDEN = "***"
_SECRET_NAMES = re.compile(
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD"
    r"|PASSPHRASE)(?:_BEDROCK)?$"
)
_SECRET_KEYS = re.compile(r"(?i)(?:api[_-]?key|token|secret|password)$")
# Settings such as `eos_token` are ordinary text, which must not vanish from responses.
_KEYS_TO_HIDE = re.compile(
    r"(?i)(?:api[_-]?key|(?:^|api|auth|access|bearer|hub|hf)[_-]?token|secret|password)$"
)
# Keys from variables with other names, from settings and from flags.
_hidden_secrets: set[str] = set()

_ESCAPE = re.compile(
    r"""\\(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<c>[nrtbf"'/\\]))"""
    r"|%(?P<p>[0-9a-fA-F]{2})|&(?:\#(?P<d>[0-9]{1,6})|\#[xX](?P<h>[0-9a-fA-F]{1,5})|(?P<e>amp|quot|apos|lt|gt));"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_LEVELS = 4  # the text, JSON, JSON in JSON, JSON in JSON in JSON
# Escapes that may hide a character of a key.
_HIDES = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|/)|%[0-9a-fA-F]{2}|&(?:\#|amp;|quot;|apos;|lt;|gt;)"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_NAMED = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f",
    "amp": "&", "quot": '"', "apos": "'", "lt": "<", "gt": ">",
}  # fmt: skip


# In a configured address these parts count as secrets, even if they do not look like one.
_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_URL_LOGIN = re.compile(r"(?<=://)[^/?#]+(?=@)")
_URL_QUERY = re.compile(
    r"(?i)([?&](?:[\w.-]*(?:key|token|signature|credential)|sig|secret|password)=)([^&#]+)"
)


def hide_secret(secret: str) -> None:
    """Make every later `redact` of this process remove this value."""
    if len(secret) >= MIN_SECRET:
        _hidden_secrets.add(secret)


def hide_settings(value: Any) -> None:
    """Make `redact` remove the secrets of settings: under secret names, and in addresses."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str) and _KEYS_TO_HIDE.search(str(key)):
                hide_secret(inner)
            hide_settings(inner)
    elif isinstance(value, list | tuple):
        for item in value:
            hide_settings(item)
    elif isinstance(value, str) and _URL.fullmatch(value):
        for login in _URL_LOGIN.findall(value):
            hide_secret(login.partition(":")[2])
        for _, secret in _URL_QUERY.findall(value):
            hide_secret(secret)


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the secret values of variables, longest first.

    `AZURE_OPENAI_KEY` counts if its value looks generated; so does a password in an address.
    """
    # Variables by their names, and addresses with a password by their form.
    env = os.environ if environ is None else environ
    values = set[str]()
    for name, value in env.items():
        if _SECRET_NAMES.search(name) or (name.upper().endswith("_KEY") and is_mixed(value)):
            values.add(value.strip())
        elif "://" in value and "@" in value:
            values |= {login.partition(":")[2] for login in _URL_LOGIN.findall(value)}
    return tuple(sorted((v for v in values if len(v) >= MIN_SECRET), key=len, reverse=True))


class Redactor:
    """Finds and removes secrets; reads the variables once, for many texts."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        known = {*secret_values(environ), *_hidden_secrets}
        self._spellings = _list_spellings(tuple(sorted(known, key=len)))

    def finds(self, text: str) -> bool:
        """Whether a text has a secret."""
        return next(_find_at_all_levels(text, self._spellings), None) is not None

    def __call__(self, text: str) -> str:
        """Return the text with each secret replaced by `HIDDEN`; overlapping secrets become one."""
        pieces, done = list[str](), 0
        for start, end in sorted(_find_at_all_levels(text, self._spellings)):
            if start >= done:  # secrets that overlap are hidden as one
                pieces += [text[done:start], HIDDEN]
            done = max(done, end)
        return "".join(pieces) + text[done:]


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` with known secrets and strings shaped like keys replaced by ***."""
    return Redactor(environ)(text)


@lru_cache(maxsize=16)
def _list_spellings(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values as JSON, JSON in JSON, Python, shell, and base64 at its three alignments.

    `_decode` reads `%C3%A9` as two characters, so the bytes of a value are a spelling too.
    """
    if not values:
        return ()
    import base64
    import json
    import shlex

    spellings = list[str]()
    for value in values:
        content = value.encode("utf-8", "surrogatepass")
        escaped = json.dumps(value, ensure_ascii=False)[1:-1]
        spellings += (value, content.decode("latin-1"), escaped, json.dumps(escaped)[1:-1])
        spellings += (repr(value)[1:-1], shlex.quote(value).strip("'"))
        for before in range(3):
            encoded = base64.b64encode(b"\0" * before + content).decode()
            # A base64 character has six bits: keep those without bits of neighbours.
            core = encoded[-(-8 * before // 6) : 8 * (before + len(content)) // 6]
            spellings += (core, core.translate(str.maketrans("+/", "-_")))
    return tuple(dict.fromkeys(spellings))


def _find_at_all_levels(text: str, values: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each secret in the text, and in the text with escapes decoded."""
    levels = list[list[tuple[int, int]]]()
    while len(text) >= MIN_SECRET:
        for span in _find_secrets(text, values):
            start, end = span
            for jumps in reversed(levels):
                start, end = _origin(jumps, start), _origin(jumps, end)
            yield start, end
        # Decoded only if an escape could hide a character; most texts have none.
        if len(levels) + 1 == _LEVELS or not _HIDES.search(text):
            return
        text, jumps = _decode(text)
        levels.append(jumps)


def _find_secrets(text: str, values: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yield start and end of each secret in a text: `values`, and what looks like a known key."""
    for value in values:
        start = text.find(value)
        while start >= 0:
            yield start, start + len(value)
            start = text.find(value, start + len(value))
    # A cheap search for substrings first, because most texts contain none of them.
    small = text.lower()
    for marks, pattern, holds in KEY_PATTERNS:
        if any(map(small.__contains__, marks)):
            yield from (match.span(1) for match in pattern.finditer(text) if holds(match[1]))


def _decode(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the decoded text, and after each escape a position in it and its origin in `text`."""
    pieces, jumps, done, length = list[str](), [(0, 0)], 0, 0
    for escape in _ESCAPE.finditer(text):
        kind, digits = escape.lastgroup, escape[escape.lastgroup or 0]
        if kind is None:
            character = ""  # it has no width
        elif kind in "ce":
            character = _NAMED.get(digits, digits)
        else:
            character = chr(int(digits, 10 if kind == "d" else 16))
        pieces += [text[done : escape.start()], character]
        length += escape.start() - done + len(character)
        done = escape.end()
        jumps.append((length, done))
    return "".join(pieces) + text[done:], jumps


def _origin(jumps: list[tuple[int, int]], place: int) -> int:
    """Return the position in the original of a position in the decoded text."""
    from bisect import bisect_right

    decoded, origin = jumps[bisect_right(jumps, place, key=lambda jump: jump[0]) - 1]
    return origin + place - decoded


def redact_url(url: str) -> str:
    """Return a configured address without its user, password and keys, even short ones."""
    return redact(_URL_QUERY.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(HIDDEN, url)))


def mask_secrets(value: Any) -> Any:
    """Return settings with *** for values under a secret name (`api_key`, `token`).

    Other texts are redacted.
    """
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if _SECRET_KEYS.search(str(k)) and v is not None else mask_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(mask_secrets(item) for item in value)
    if isinstance(value, str):
        return redact_url(value) if _URL.fullmatch(value) else redact(value)
    return value
