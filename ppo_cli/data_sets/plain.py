"""Values of parquet and hub rows as plain JSON values, so that the rollout log can hold them."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from typing import Any


class NotText(ValueError):
    """A text that cannot be written as UTF-8, or bytes that are none."""


def as_plain(value: Any, *, strict: bool = False) -> Any:
    """Return a value with only dict, list, str, int, float, bool and None inside.

    With `strict`, half of a surrogate pair or bytes that are not UTF-8 raise NotText; otherwise
    such bytes become escapes.
    """
    if isinstance(value, str):
        return _checked(value) if strict else value
    if isinstance(value, Mapping):
        return {str(key): as_plain(inner, strict=strict) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(inner, strict=strict) for inner in value]
    if hasattr(value, "tolist"):  # numpy's, which need not be imported to read JSON
        return as_plain(value.tolist(), strict=strict)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            if strict:
                raise NotText(f"is not UTF-8 (byte 0x{value[error.start]:02x})") from None
            return value.decode("utf-8", errors="backslashreplace")
    return value


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise NotText(f"holds {half}, half of a surrogate pair, which is no character") from None
    return text
