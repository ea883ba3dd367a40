"""Take secrets out of any text before it leaves: messages, dumps, kept tracebacks, logs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN = "***"
_SECRET_NAMES = re.compile(r"(_API_KEY|_TOKEN|_TOKEN_BEDROCK|_SECRET|_ACCESS_KEY|_PASSWORD)$")
# What a text must hold, in small letters, for a pattern to be tried; the pattern; what is put in.
_SHAPES = (
    (("://",), re.compile(r"(?<=://)[^/\s'\"?#]+(?=@)"), HIDDEN),
    (
        ("=",),
        re.compile(
            r"(?i)([?&](?:[\w.-]*(?:key|token|signature|credential)|sig|secret|password)=)"
            r"[^&#\s'\"]+"
        ),
        rf"\1{HIDDEN}",
    ),
    (("bearer",), re.compile(r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}"), rf"\1{HIDDEN}"),
    (
        ("sk-", "sk_", "hf-", "hf_", "aiza"),
        re.compile(r"\b(?:sk|hf)[-_][A-Za-z0-9_-]{12,}|\bAIza[\w-]{20,}"),
        HIDDEN,
    ),
)
_SECRET_KEYS = re.compile(r"(?i)(?:api[_-]?key|token|secret|password)$")
# A shorter value, as of a server of one's own that takes any key, stands in ordinary words too.
_SHORTEST = 6
# Keys that were read from variables of any other name.
_read_keys: set[str] = set()


def hide(secret: str) -> None:
    """Have every later `redact` of this process take this value out."""
    if len(secret) >= _SHORTEST:
        _read_keys.add(secret)


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the values of variables that hold secrets, longest first."""
    env = os.environ if environ is None else environ
    found = {v for k, v in env.items() if _SECRET_NAMES.search(k) and len(v) >= _SHORTEST}
    return tuple(sorted(found, key=len, reverse=True))


def redactor(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return `redact` for many texts: the variables are read once."""
    values = sorted({*secret_values(environ), *_read_keys}, key=len, reverse=True)

    def clean(text: str) -> str:
        for value in values:
            text = text.replace(value, HIDDEN)
        small = text.lower()
        for marks, pattern, instead in _SHAPES:
            if any(mark in small for mark in marks):
                text = pattern.sub(instead, text)
        return text

    return clean


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` with key values, passwords in URLs and bearer tokens replaced by ***."""
    return redactor(environ)(text)


def mask_secrets(value: Any) -> Any:
    """Return a value with what stands under a secret name (`api_key`, `token`) as ***.

    Texts within it are redacted.
    """
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if _SECRET_KEYS.search(str(k)) and v is not None else mask_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(mask_secrets(item) for item in value)
    return redact(value) if isinstance(value, str) else value
