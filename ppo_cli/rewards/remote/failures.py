"""What an HTTP reply without an answer says, whoever sent it: its message, and how long to wait."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

LONGEST = 600  # characters of a provider's words that are shown
# Where the words stand, the most telling place first.
_PLACES = (
    "message", "msg", "detail", "details", "error_description", "error_message", "error",
    "errors", "description", "reason", "title",
)  # fmt: skip
_DEEPEST = 6
_MOST = 3
_PAGE = re.compile(r"(?i)<\s*(!doctype|html|head|title|body|center|div|h1|p)\b")
_SILENT = re.compile(r"(?is)<(script|style)\b.*?</\1\s*>|<!--.*?-->")
_TAG = re.compile(r"(?s)<[^>]*>")


def read_words(body: Any, depth: int = 0) -> str:
    """The words of a body (an object, a list, JSON, a page, plain text) in one line, or ''."""
    if depth > _DEEPEST:
        return ""
    if isinstance(body, str):
        return _of_text(body, depth)
    if isinstance(body, Mapping):
        return _of_object({str(key).lower(): value for key, value in body.items()}, depth)
    if isinstance(body, Sequence) and not isinstance(body, bytes):
        said = [read_words(item, depth + 1) for item in body[:_MOST]]
        return "; ".join(part for part in said if part)
    return ""


def is_page(text: Any) -> bool:
    """Whether a text is a page of HTML, which a proxy sent instead of the provider."""
    return isinstance(text, str) and bool(_PAGE.search(text))


def one_line(text: str) -> str:
    """The text with every run of blanks and line breaks as one blank."""
    return " ".join(text.split())


def _of_text(text: str, depth: int) -> str:
    if text.lstrip().startswith(("{", "[")):
        try:
            return read_words(json.loads(text), depth + 1) or one_line(text)
        except (ValueError, RecursionError):
            pass
    if is_page(text):
        text = html.unescape(_TAG.sub(" ", _SILENT.sub(" ", text)))
    return one_line(text)


def _of_object(body: Mapping[str, Any], depth: int) -> str:
    said = (read_words(body.get(place), depth + 1) for place in _PLACES)
    words = next((part for part in said if part), "")
    # A checker of requests tells the place, a router what the provider behind it said.
    loc, behind = body.get("loc"), body.get("metadata")
    if words and isinstance(loc, list | tuple):
        return f"{'.'.join(map(str, loc))}: {words}"
    inner = read_words(behind.get("raw"), depth + 1) if isinstance(behind, Mapping) else ""
    return f"{words}: {inner}" if words and inner else words or inner


def read_seconds(text: str) -> float | None:
    """Seconds in a header value: a number that is not negative, else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def read_retry_after(headers: Mapping[str, str], *, now: float | None = None) -> float | None:
    """Seconds that a reply asks to wait: retry-after-ms, or Retry-After as seconds or a date."""
    milliseconds = read_seconds(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000.0
    told = headers.get("retry-after", "")
    seconds = read_seconds(told)
    if seconds is not None or not told:
        return seconds
    try:
        moment = parsedate_to_datetime(told).timestamp()
    except (TypeError, ValueError):
        return None
    return max(0.0, moment - (time.time() if now is None else now))
