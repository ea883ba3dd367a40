"""Which values are secrets: of variables, of settings and of flags that contain keys."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ppo_cli.secrets.patterns import MIN_SECRET, is_mixed, is_random

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

# A secret of a configured command, whatever it looks like: after an option or variable with a
# secret name, in a header, in JSON.
_NAME = (
    r"[\w.-]*(?:api[_-]?key|(?:access|private|secret|auth)[_-]?key|token|secret|password|passwd"
    r"|passphrase|credentials?|jwt|cookie|authorization|bearer|(?:github|gitlab|access)[_-]?pat)"
)
_OPTION = re.compile(
    rf"""(?i)(?:^|[\s"'])(?:--?(?:{_NAME}|pat|pass|pwd)[=\s]+"""
    rf"""|(?:{_NAME}|(?-i:[A-Z0-9_]+_(?:PAT|PASS|PWD))|pat)="""
    rf"""|(?:-H|--header)[=\s]*["']?(?:{_NAME}|[\w-]*auth)\s*:\s*(?:\w+\s+)?|{_NAME}["']\s*:\s*)"""
    r"""["']?(?:(?:Bearer|Basic|Token)\s+)?(?![-$])([^\s"']+)"""
)
# Any other value that looks random, after a blank, an option or a name; digests are none.
_VALUE = re.compile(r"""(?<!sha256)(?:[\s"'=:]|\s-\w)([^\s"'=:@,;{}]{12,})""")


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
            if key == "key_env":
                hide_secret(os.environ.get(str(inner), ""))
            hide_settings(inner)
    elif isinstance(value, list | tuple):
        for item in value:
            hide_settings(item)
    elif isinstance(value, str):
        for secret in _OPTION.findall(value):
            hide_secret(secret)
        for secret in filter(is_random, _VALUE.findall(value) if " " in value else ()):
            hide_secret(secret)
        for login in URL_LOGIN.findall(value) if URL.fullmatch(value) else ():
            name, _, password = login.partition(":")
            hide_secret(password or name)
        for _, secret in URL_QUERY.findall(value) if URL.fullmatch(value) else ():
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
            values |= {login.partition(":")[2] for login in URL_LOGIN.findall(value)}
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
        spellings += (repr(value)[1:-1], shlex.quote(value).strip("'"))
        for before in range(3):
            encoded = base64.b64encode(b"\0" * before + content).decode()
            # A base64 character has six bits: keep those without bits of neighbours.
            core = encoded[-(-8 * before // 6) : 8 * (before + len(content)) // 6]
            spellings += (core, core.translate(str.maketrans("+/", "-_")))
    return tuple(dict.fromkeys(spellings))
