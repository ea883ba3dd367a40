"""What secret keys look like: a pattern for each kind, and checks that spare ordinary text."""

from __future__ import annotations

import re
from collections.abc import Callable

MIN_SECRET = 8  # characters; a shorter value also occurs in ordinary words


def is_mixed(text: str) -> bool:
    """Whether a value has letters, digits and variety, as generated keys do and names do not."""
    letters = any(c.isalpha() for c in text)
    return letters and any(c.isdigit() for c in text) and len(set(text)) >= 8


def _is_generated_value(text: str) -> bool:
    """Whether a value is mixed and not words with a number such as `YOUR_SIGNATURE_HERE_1`."""
    parts = re.split("[-_]", text)
    only_words = all(re.fullmatch("[A-Za-z]*[0-9]{0,2}|[0-9]+", part) for part in parts)
    return is_mixed(text) and not (len(parts) > 1 and only_words)


def _is_generated(text: str) -> bool:
    """Whether a part between `-` and `_` looks generated; none does in `sk-translations-2024`."""
    parts = re.split("[-_]", text)
    return any(
        (len(part) >= 12 and is_mixed(part)) or (len(part) >= 16 and len(set(part)) >= 8)
        for part in parts
    )


def _is_varied(text: str) -> bool:
    """Whether a text has many different characters; `ghp_xxxxxxxx…` in a manual has not."""
    return len(set(text)) >= 8


def is_password(login: str) -> bool:
    """Whether the part after the colon is more than a word for a password, as manuals have it."""
    return not _PLACEHOLDER.fullmatch(login.partition(":")[2])


def _is_login(text: str) -> bool:
    """Whether base64 text is `user:password`, as basic authentication sends it."""
    import base64  # few commands need it

    try:
        user, _, password = base64.b64decode(text, validate=True).decode("ascii").partition(":")
    except ValueError:
        return False
    return (user + password).isprintable() and len(password) >= MIN_SECRET


def is_random(text: str) -> bool:
    """Whether a value looks random: letters and digits alternate as in no name, path or hash call.

    Stricter than `is_mixed`: what stands next to a secret name is often code.
    """
    parts = re.split(r"[-_./]", text)
    is_name = all(re.fullmatch("[A-Za-z]*[0-9]{0,4}|[0-9]+", part) for part in parts)
    if text[:1] in "/.~" or (is_name and len(parts) > 1):
        return False
    changes = len(re.findall(r"[A-Za-z](?=[0-9])|[0-9](?=[A-Za-z])", text))
    longest = max(map(len, parts))
    return longest >= 12 and (changes >= 4 or (len(text) >= 32 and _has_cases(text)))


def _is_random_path(text: str) -> bool:
    """Whether a part of an address is a key; a hash or the id of a commit has one case only."""
    return is_random(text) and _has_cases(text) and len(re.findall("[0-9]+", text)) > 1


def _has_cases(text: str) -> bool:
    return all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))


# Where a key may start. A letter may precede it only as the end of an escape of JSON in a text, of
# a terminal's colour, or of a quoted-printable `=`.
_START = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=[0-9\[]m)|(?<==3D))"
# White space within a key in PEM format, also escaped.
_GAP = r"(?:\s|\\+[nrt])"
_PLACEHOLDER = re.compile(
    r"(?i)(?:(?:your|my|db|the)[_-]?)?(?:pass(?:word|wd|phrase)?|pwd|secret|token|(?:api[_-]?)?key)"
)
# Names of a key in an address: `api_key`, `apiKey`, but not `donkey`.
_KEY_NAME = (
    r"(?:[\w.-]*[_.-]|\w*[a-z](?=[A-Z])|(?i:api|app|auth|access|client|user|session|private))?"
    r"(?i:key|token|sig|signature|credentials?|secret|password|passwd|auth)"
)
# The end of a name of a secret in code, commands and prose: `API_KEY`, `authToken`, not `monkey`.
SECRET_NAME = (
    r"(?:(?<![A-Za-z])(?i:api|app|auth|access|client|user|session|private)?"
    r"(?i:key|token|secret|credentials?|authorization|auth|cookie|pwd)"
    r"|(?<=[a-z])(?:Key|Token|Secret|Auth)|(?i:password|passwd|passphrase))"
)
# (lower-case substrings, one of which the text must contain; the pattern, whose group is the
# secret; a check of the secret). Models write the texts: each pattern takes linear time.
KeyPattern = tuple[tuple[str, ...], re.Pattern[str], Callable[[str], bool]]
KEY_PATTERNS: tuple[KeyPattern, ...] = (
    (
        ("://",),
        re.compile(
            r"""://([^\s/:?#'"\\<>(){}\[\]|,;*]*:(?![${<%*])[^\s/?#'"\\<>]+)@(?=[\w\[])""", re.A
        ),
        is_password,
    ),
    (("://",), re.compile(r"://([\w-]{20,})@(?=[\w\[])", re.A), is_mixed),
    (
        ("=",),
        re.compile(rf"[?&;#]{_KEY_NAME}=([\w.~+/=:%-]{{16,}})", re.A),
        _is_generated_value,
    ),
    (
        ("key", "token", "secret", "passw", "passphrase", "auth", "credential", "cookie", "pwd"),
        re.compile(
            SECRET_NAME + r"""[\s"'`\\:=,<>()\[\]]{1,12}"""
            r"""(?:(?i:is|value|bearer|token|api-?key|basic|[a-z]{1,20}(?==))[\s"'\\:=]{1,8}){0,2}"""
            r"""(?!3D)([\w.~+/=%-]{16,})""",  # 3D: of a quoted-printable `=`
            re.A,
        ),
        is_random,
    ),
    (
        ("://",),
        re.compile(r"://[\w.:@-]+(?:/[\w.~%-]{0,23})*/([\w-]{24,})(?![\w.~%-])", re.A),
        _is_random_path,
    ),
    (("wandb",), re.compile(r"wandb[^\n]{0,40}?\b([0-9a-f]{40})\b", re.A), is_mixed),
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
        is_mixed,
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
