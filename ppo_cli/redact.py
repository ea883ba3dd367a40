r"""Remove secrets from texts before they leave: messages, dumps, tracebacks, logs, pages.

Secrets are the known ones (values of variables, settings and flags that hold keys) and strings in
the shape of real keys. Both are searched in the text as a reader would decode it, so that `\u002d`,
`%2D` or `&#45;` hides nothing. Redact values, then serialise: see `run_folder.plain`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

HIDDEN = "***"
_SECRET_NAMES = re.compile(
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD"
    r"|PASSPHRASE)(?:_BEDROCK)?$"
)
_SECRET_KEYS = re.compile(r"(?i)(?:api[_-]?key|token|secret|password)$")
# Settings such as `eos_token` hold ordinary text, which must not vanish from responses.
_KEYS_TO_HIDE = re.compile(
    r"(?i)(?:api[_-]?key|(?:^|api|auth|access|bearer|hub|hf)[_-]?token|secret|password)$"
)
_SHORTEST = 8  # a shorter value also occurs in ordinary words
# Keys that were read from variables of any other name, from settings and from flags.
_read_keys: set[str] = set()

_ESCAPE = re.compile(
    r"""\\(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<c>[nrtbf"'/\\]))"""
    r"|%(?P<p>[0-9a-fA-F]{2})|&(?:\#(?P<d>[0-9]{1,6})|\#[xX](?P<h>[0-9a-fA-F]{1,5})|(?P<e>amp|quot|apos|lt|gt));"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_LEVELS = 4  # JSON in JSON in JSON, and the text as it is
# Escapes that may hide a character of a key, and what ASCII texts with one contain.
_MAY_HIDE = ("\\u", "\\x", "\\/", "%", "&")
_HIDES = re.compile(
    r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|/)|%[0-9a-fA-F]{2}|&(?:\#|amp;|quot;|apos;|lt;|gt;)"
    "|[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
_NAMED = {
    "n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f",
    "amp": "&", "quot": '"', "apos": "'", "lt": "<", "gt": ">",
}  # fmt: skip


def _is_mixed(text: str) -> bool:
    """Whether a value has letters, digits and variety, as generated keys do and names do not."""
    letters = any(c.isalpha() for c in text)
    return letters and any(c.isdigit() for c in text) and len(set(text)) >= 8


def _is_generated_value(text: str) -> bool:
    """Whether a value is mixed, and not words with a number: `YOUR_SIGNATURE_HERE_1`."""
    parts = re.split("[-_]", text)
    words = all(re.fullmatch("[A-Za-z]*[0-9]{0,2}|[0-9]+", part) for part in parts)
    return _is_mixed(text) and not (len(parts) > 1 and words)


def _is_generated(text: str) -> bool:
    """Whether a part between `-` and `_` looks generated: `sk-translations-2024` has none."""
    parts = re.split("[-_]", text)
    return any(
        (len(part) >= 12 and _is_mixed(part)) or (len(part) >= 16 and len(set(part)) >= 8)
        for part in parts
    )


def _is_varied(text: str) -> bool:
    return len(set(text)) >= 8  # `ghp_xxxxxxxx…` of a manual is not a key


def _is_password(login: str) -> bool:
    """Whether the part after the colon is not just a word for a password, as in manuals."""
    return not _PLACEHOLDER.fullmatch(login.partition(":")[2])


def _is_login(text: str) -> bool:
    """Whether base64 text is `user:password`, as basic authentication sends it."""
    import base64  # here, as in `_spellings`: most commands need neither

    try:
        user, _, password = base64.b64decode(text, validate=True).decode("ascii").partition(":")
    except ValueError:
        return False
    return (user + password).isprintable() and len(password) >= _SHORTEST


# Where a key may start: a letter comes before it at the end of an escape in JSON within a text, of
# a terminal's colour, and of a quoted-printable `=`.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=[0-9\[]m)|(?<==3D))"
_GAP = r"(?:\s|\\+[nrt])"
_PLACEHOLDER = re.compile(
    r"(?i)(?:(?:your|my|db|the)[_-]?)?(?:pass(?:word|wd|phrase)?|pwd|secret|token|(?:api[_-]?)?key)"
)
# The name of what holds a key in an address: `api_key`, `apiKey`, not `donkey`.
_KEY_NAME = (
    r"(?:[\w.-]*[_.-]|\w*[a-z](?=[A-Z])|(?i:api|app|auth|access|client|user|session|private))?"
    r"(?i:key|token|sig|signature|credentials?|secret|password|passwd|auth)"
)
# Texts are written by models: each pattern takes time in proportion to the length of any text.
# A mark in small letters that the text must contain, the pattern, whose group is the secret, and
# what else must hold for the secret.
_Shape = tuple[tuple[str, ...], re.Pattern[str], Callable[[str], bool]]
_SHAPES: tuple[_Shape, ...] = (
    (
        ("://",),
        re.compile(
            r"""://([^\s/:?#'"\\<>(){}\[\]|,;*]*:(?![${<%*])[^\s/?#'"\\<>]+)@(?=[\w\[])""", re.A
        ),
        _is_password,
    ),
    (("://",), re.compile(r"://([\w-]{20,})@(?=[\w\[])", re.A), _is_mixed),
    (
        ("=",),
        re.compile(rf"[?&;#]{_KEY_NAME}=([\w.~+/=:%-]{{16,}})", re.A),
        _is_generated_value,
    ),
    (
        ("bearer", "api-key"),
        re.compile(
            _START
            + r"""(?i:bearer[\s:]+|x-api-key(?:\\*["'])?\s*:\s*)(?:\\*["'])?([\w.~+/=-]{16,})""",
            re.A,
        ),
        _is_generated_value,
    ),
    (("basic",), re.compile(_START + r"(?i:basic)\s+([A-Za-z0-9+/]{12,}={0,2})", re.A), _is_login),
    (("sk-",), re.compile(_START + r"(sk-[\w-]{16,})", re.A), _is_generated),
    (
        (
            "hf_",
            "ghp_",
            "gho_",
            "ghu_",
            "ghs_",
            "ghr_",
            "github_pat_",
            "glpat-",
            "xox",
            "k_live_",
            "k_test_",
            "aiza",
            "ya29.",
            "akia",
            "asia",
            "gsk_",
            "nvapi-",
            "xai-",
            "pplx-",
            "npm_",
            "pypi-",
            "r8_",
            "sg.",
        ),
        re.compile(
            _START + r"(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}"
            r"|glpat-[\w-]{20,}|xox[abeprs]-(?=[\w-]{0,40}\d)[\w-]{16,}|[rs]k_(?:live|test)_\w{16,}"
            r"|AIza(?=[\w-]{0,40}\d)[\w-]{20,}|ya29\.[\w-]{30,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"
            r"|gsk_[A-Za-z0-9]{40,}|nvapi-[\w-]{40,}|xai-[A-Za-z0-9]{40,}|pplx-[A-Za-z0-9]{40,}"
            r"|npm_[A-Za-z0-9]{36,}|pypi-[\w-]{50,}|r8_[A-Za-z0-9]{37,}|SG\.[\w-]{20,}\.[\w-]{40,})",
            re.A,
        ),
        _is_varied,
    ),
    (
        ("secret",),
        re.compile(
            r"""(?i)secret[_-]?(?:access[_-]?)?key["'\s:=>\\]{1,8}([a-z0-9/+]{40})(?![a-z0-9/+=])""",
            re.A,
        ),
        _is_mixed,
    ),
    (
        ("eyj",),
        re.compile(_START + r"(eyJ[\w-]{6,1000}+\.eyJ[\w-]{6,}\.[\w-]{6,})", re.A),
        bool,
    ),
    (
        ("private key",),
        re.compile(
            r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY[A-Z ]{0,20}-----"
            rf"((?:\r?\n[\w-]+:[^\n]*)*{_GAP}*[a-zA-Z0-9+/=]{{16,}}(?:{_GAP}+[a-zA-Z0-9+/=]+)*)",
            re.A,
        ),
        bool,
    ),
)
# An address that somebody configured: whatever is in these places is a secret.
_URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
_URL_LOGIN = re.compile(r"(?<=://)[^/?#]+(?=@)")
_URL_QUERY = re.compile(
    r"(?i)([?&](?:[\w.-]*(?:key|token|signature|credential)|sig|secret|password)=)([^&#]+)"
)


def hide(secret: str) -> None:
    """Have every later `redact` of this process remove this value."""
    if len(secret) >= _SHORTEST:
        _read_keys.add(secret)


def hide_settings(value: Any) -> None:
    """Have `redact` remove the secrets of settings: below secret names, and within addresses."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str) and _KEYS_TO_HIDE.search(str(key)):
                hide(inner)
            hide_settings(inner)
    elif isinstance(value, list | tuple):
        for item in value:
            hide_settings(item)
    elif isinstance(value, str) and _URL.fullmatch(value):
        for login in _URL_LOGIN.findall(value):
            hide(login.partition(":")[2])
        for _, secret in _URL_QUERY.findall(value):
            hide(secret)


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the values of variables that hold secrets, longest first.

    `AZURE_OPENAI_KEY` counts where its value looks generated, and a password in an address.
    """
    env = os.environ if environ is None else environ
    values = set[str]()
    for name, value in env.items():
        if _SECRET_NAMES.search(name) or (name.upper().endswith("_KEY") and _is_mixed(value)):
            values.add(value.strip())
        elif "://" in value and "@" in value:
            values |= {login.partition(":")[2] for login in _URL_LOGIN.findall(value)}
    return tuple(sorted((v for v in values if len(v) >= _SHORTEST), key=len, reverse=True))


def redactor(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return `redact` for many texts: the variables are read once."""
    values = _spellings(tuple(sorted({*secret_values(environ), *_read_keys}, key=len)))

    def clean(text: str) -> str:
        if len(text) < _SHORTEST:
            return text
        pieces, done = list[str](), 0
        for start, end in sorted(_find_at_all_levels(text, values)):
            if start >= done:  # secrets that overlap are hidden as one
                pieces += [text[done:start], HIDDEN]
            done = max(done, end)
        return "".join(pieces) + text[done:]

    return clean


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` with known secrets and strings shaped like keys replaced by ***."""
    return redactor(environ)(text)


@lru_cache(maxsize=16)
def _spellings(values: tuple[str, ...]) -> tuple[str, ...]:
    """The values as JSON, JSON within JSON, in Python, a shell, and base64 at its three places.

    `_decode` reads `%C3%A9` as two characters, so that the bytes of a value are a spelling too.
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
            whole = base64.b64encode(b"\0" * before + content).decode()
            # Six bits a character: only those that no neighbour shares.
            core = whole[-(-8 * before // 6) : 8 * (before + len(content)) // 6]
            spellings += (core, core.translate(str.maketrans("+/", "-_")))
    return tuple(dict.fromkeys(spellings))


def _find_at_all_levels(text: str, values: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Start and end of each secret in the text as it is, and as it is with escapes decoded."""
    levels = list[list[tuple[int, int]]]()
    while True:
        for span in _find_secrets(text, values):
            start, end = span
            for jumps in reversed(levels):
                start, end = _origin(jumps, start), _origin(jumps, end)
            yield start, end
        may_hide = not text.isascii() or any(mark in text for mark in _MAY_HIDE)
        if not (may_hide and _HIDES.search(text)) or len(levels) + 1 == _LEVELS:
            return
        text, jumps = _decode(text)
        levels.append(jumps)


def _find_secrets(text: str, values: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    for value in values:
        start = text.find(value)
        while start >= 0:
            yield start, start + len(value)
            start = text.find(value, start + len(value))
    small = text.lower()
    for marks, pattern, holds in _SHAPES:
        if any(mark in small for mark in marks):
            yield from (found.span(1) for found in pattern.finditer(text) if holds(found[1]))


def _decode(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without escapes; after each of them a place in it and its origin in `text`."""
    pieces, jumps, done, length = list[str](), [(0, 0)], 0, 0
    for escape in _ESCAPE.finditer(text):
        kind, digits = escape.lastgroup, escape[escape.lastgroup or 0]
        if kind is None:
            character = ""  # of no width
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
    """Where a place of the decoded text is in the original."""
    from bisect import bisect_right

    decoded, origin = jumps[bisect_right(jumps, place, key=lambda jump: jump[0]) - 1]
    return origin + place - decoded


def redact_url(url: str) -> str:
    """Return a configured address without its user, password and keys, however short they are."""
    return redact(_URL_QUERY.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(HIDDEN, url)))


def mask_secrets(value: Any) -> Any:
    """Return settings with what is below a secret name (`api_key`, `token`) as ***.

    Texts within it are redacted.
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
