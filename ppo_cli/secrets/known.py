"""Which values are secrets: of variables, of settings and of flags that contain keys."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ppo_cli.secrets.patterns import MIN_SECRET, is_mixed, is_password, is_random

_SECRET_NAMES = re.compile(
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_KEY|SECRET_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD"
    r"|PASSPHRASE)(?:_BEDROCK)?$"
)
# Variables that a child of the run does not get: those above, and others that sound like keys.
WITHHELD_NAMES = re.compile(
    r"(?i)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|JWT|DSN|WEBHOOK)(?=_|$)"
    r"|(?:^|_)(?:AUTH|PAT|PASS|SIG|CREDS?)(?=_|$)|_PWD$"
)
# Settings such as `eos_token` are ordinary text, which must not vanish from responses.
_KEYS_TO_HIDE = re.compile(
    r"(?i)(?:api[_-]?key|(?:^|api|auth|access|bearer|hub|hf)[_-]?token|secret|password)$"
)
# Keys from variables with other names, from settings and from flags.
_hidden_secrets: set[str] = set()
# In a configured address these parts count as secrets, even if they do not look like one.
URL = re.compile(r"[A-Za-z][\w+.-]*://\S+")
URL_LOGIN = re.compile(r"(?<=://)[^/?#]+(?=@)")
URL_QUERY = re.compile(
    r"(?i)([?&](?:[\w.-]*(?:key|token|signature|credential)|sig|secret|password)=)([^&#]+)"
)

# Names of a secret, whose value may be any word; `-` and `.` of a name are read as `_`.
_EXACT_NAMES = re.compile(
    r"(?i)(?:^key|api_?key|(?:access|private|secret|auth)_?key|token|secret|password|passwd"
    r"|passphrase|signature|jwt|authorization|bearer|dsn|webhook(?:_url)?|^pass|^pwd"
    r"|(?:^|github_|gitlab_|access_)pat|(?-i:_PAT|_PASS|_PWD))$"
)
# Next to other names that sound like keys (AUTH_TYPE, COOKIE_DOMAIN, SORT_KEY) these are none: one
# or two words, a host, a number, a path, an address.
_PLAIN = re.compile(
    r"(?:[A-Za-z]+(?:[_-][A-Za-z]+)?|[\w-]+(?:\.[\w-]+)+)(?::\d+)?|\d+|[^\s=]*/[^\s=]*"
)
_SCHEME = re.compile(r"(?i)^(?:Bearer|Basic|Token)\s+")
# A name with a value, which is in quotes or all that follows: `--token=VALUE`, `X-Api-Key: VALUE`,
# `{"token": "VALUE"}`.
_ASSIGNMENT = re.compile(
    r"""([\w.-]+)["']?\s*[=:]\s*(?!//)(?:"([^"]+)"|'([^']+)'|(?=(.+)))""", re.DOTALL
)
_VARIABLE = re.compile(r"\$[A-Z][A-Z0-9_]*|\$\{[^}]*\}")
_DIGEST = re.compile(r"[0-9a-f]{12}|[0-9a-f]{40}|[0-9a-f]{64}")  # also the id of a commit


def hide_secret(secret: str) -> None:
    """Make every later `redact` of this process remove this value."""
    if len(secret) >= MIN_SECRET:
        _hidden_secrets.add(secret)


def hide_settings(value: Any, *, is_command: bool = False) -> None:
    """Make `redact` remove the secrets of settings: of secret names, addresses and commands."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str) and _KEYS_TO_HIDE.search(str(key)):
                hide_secret(inner)
            if key == "key_env":
                hide_secret(os.environ.get(str(inner), ""))
            hide_settings(inner, is_command=key == "mcp")
    elif isinstance(value, list | tuple):
        for item in value:
            hide_settings(item, is_command=is_command)
    elif isinstance(value, str) and is_command:
        hide_command(_split(value))
    elif isinstance(value, str) and URL.fullmatch(value):
        for secret in _list_logins(value):
            hide_secret(secret)
        for name, secret in URL_QUERY.findall(value):
            hide_named(name[1:-1], secret)


def _list_logins(address: str) -> Iterator[str]:
    """Yield the password of an address, or the random name of a login without a password."""
    for login in URL_LOGIN.findall(address):
        name, _, password = login.partition(":")
        if (password != name and is_password(login)) if password else is_random(name):
            yield password or name


def hide_command(arguments: Sequence[str]) -> None:
    """Make `redact` remove the secrets of a command.

    Those are values of secret names in options, variables, headers and JSON, and random values.
    """
    for option, argument in zip(("", *arguments), arguments, strict=False):
        if option.startswith("-") and not argument.startswith("-"):
            hide_named(option, argument)
        for match in _ASSIGNMENT.finditer(argument):
            # Of a line of a shell, its words are read below.
            if not (match[4] and re.search(r"\s", argument[: match.start()])):
                hide_named(match[1], match[2] or match[3] or match[4])
        for word in re.split(r"""[\s"']+""", argument):
            for url in URL.findall(word):
                hide_settings(url)
            for value in re.split("[=:@,;{}]", re.sub(r"^-\w", "", word)):
                if is_random(value) and not _DIGEST.fullmatch(value):
                    hide_secret(value)
        if (words := _split(argument)) != [argument]:
            hide_command(words)


def _split(command: str) -> list[str]:
    import shlex

    try:
        return shlex.split(command)
    except ValueError:  # a quote is not closed
        return re.split(r"""[\s"']+""", command)


def hide_named(name: str, value: str) -> None:
    """Make `redact` remove a value whose name is, or sounds like, that of a secret."""
    value, name = value.strip(), re.sub("[.-]", "_", name.lstrip("-"))
    content = _SCHEME.sub("", value)  # of a header
    if _VARIABLE.fullmatch(content):
        return
    secrets = {value, value.rstrip(";"), content}
    if name.lower().endswith("cookie"):
        parts = [part.strip() for part in value.split(";")]
        secrets |= {*parts, *(part.partition("=")[2] for part in parts)}
    is_exact = _EXACT_NAMES.search(name)
    # A `pat` in small letters may be a pattern.
    if is_exact or (WITHHELD_NAMES.search(name) and not name.endswith("_pat")):
        for secret in secrets:
            if is_exact or not _PLAIN.fullmatch(secret):
                hide_secret(secret)


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the secret values of variables, longest first.

    `AZURE_OPENAI_KEY` counts if its value looks generated; so does a password in an address.
    """
    return _find_secrets(tuple((os.environ if environ is None else environ).items()))


@lru_cache(maxsize=4)  # every text that is redacted asks
def _find_secrets(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    # Variables by their names, and addresses with a password by their form.
    values = set[str]()
    for name, value in variables:
        if _SECRET_NAMES.search(name) or (name.upper().endswith("_KEY") and is_mixed(value)):
            values.add(value.strip())
        elif "://" in value and "@" in value:
            values.update(_list_logins(value))
    return tuple(sorted((v for v in values if len(v) >= MIN_SECRET), key=len, reverse=True))


def list_known(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return all known secrets of this process, in every spelling in which a text may have them."""
    return _list_spellings(tuple(sorted({*secret_values(environ), *_hidden_secrets}, key=len)))


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
        spellings += (repr(value)[1:-1], shlex.quote(value).strip("'"), value.replace(" ", r"\ "))
        for before in range(3):
            encoded = base64.b64encode(b"\0" * before + content).decode()
            # A base64 character has six bits: keep those without bits of neighbours.
            core = encoded[-(-8 * before // 6) : 8 * (before + len(content)) // 6]
            spellings += (core, core.translate(str.maketrans("+/", "-_")))
    return tuple(dict.fromkeys(spellings))
