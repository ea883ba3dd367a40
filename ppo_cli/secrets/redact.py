r"""Remove secrets from texts before they leave: messages, dumps, tracebacks, logs, pages.

Secrets are known values (known.py) and strings that look like keys (patterns.py). Both are searched
in the text with escapes decoded, so that `\u002d`, `%2D` or `&#45;` hides nothing. Redact values,
then serialise: see `run_folder.lines.to_json`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ppo_cli.secrets.known import URL, URL_LOGIN, URL_QUERY, WITHHELD_NAMES, list_known
from ppo_cli.secrets.patterns import KEY_PATTERNS, MIN_SECRET

HIDDEN = "***"
_SECRET_KEYS = re.compile(r"(?i)(?:api[_-]?key|token|secret|password)$")
# Escapes that may hide a character of a key, characters without width included.
_HIDING = (
    r"\\u(?P<u>[0-9a-fA-F]{4})|\\x(?P<x>[0-9a-fA-F]{2})|%(?P<p>[0-9a-fA-F]{2})"
    r"|&\#(?P<d>[0-9]{1,6});|&\#[xX](?P<h>[0-9a-fA-F]{1,5});|&(?P<e>amp|quot|apos|lt|gt);"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_HIDES = re.compile(_HIDING + r"|\\/")
_ESCAPE = re.compile(_HIDING + r"""|\\(?P<c>[nrtbf"'/\\])""")
_LEVELS = 4  # the text, JSON, JSON in JSON, JSON in JSON in JSON
_NAMED = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f",
    "amp": "&", "quot": '"', "apos": "'", "lt": "<", "gt": ">",
}  # fmt: skip


class Redactor:
    """Finds and removes secrets; reads the variables once, for many texts."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._known = list_known(environ)

    def finds(self, text: str) -> bool:
        """Whether a text has a secret."""
        return next(_find_at_all_levels(text, self._known), None) is not None

    def __call__(self, text: str) -> str:
        """Return the text with each secret replaced by `HIDDEN`; overlapping secrets become one."""
        pieces, done = list[str](), 0
        for start, end in sorted(_find_at_all_levels(text, self._known)):
            if start >= done:  # secrets that overlap are hidden as one
                pieces += [text[done:start], HIDDEN]
            done = max(done, end)
        return "".join(pieces) + text[done:]


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` with known secrets and strings shaped like keys replaced by ***."""
    return Redactor(environ)(text)


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


def without_keys(environ: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """Return the variables for a process that runs what a model asks for.

    A variable whose name or value is that of a secret is left out, unless its name is in `passed`.
    """
    finds = Redactor(environ).finds
    return {
        name: value for name, value in environ.items()
        if name in passed or not (WITHHELD_NAMES.search(name) or finds(f"{name}={value}"))
    }  # fmt: skip


def redact_url(url: str) -> str:
    """Return a configured address without its user, password and keys, even short ones."""
    return redact(URL_QUERY.sub(rf"\1{HIDDEN}", URL_LOGIN.sub(HIDDEN, url)))


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
        return redact_url(value) if URL.fullmatch(value) else redact(value)
    return value
