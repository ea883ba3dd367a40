"""How calls to a remote service fail, and what the reply to a failed call says.

`RemoteError` is the one exception; `kind_of_status` sorts HTTP statuses for everybody. The rest
reads replies without an answer, whoever sent them: their message, and how long to wait.
"""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

from ppo_cli.secrets.redact import redact


class Failure(Enum):
    """The four ways in which a call fails."""

    FATAL = "fatal"  # by its words no later call will succeed: key, model, account, address
    RETRYABLE = "retryable"  # network, overload, limits: the same call may succeed later
    REFUSED = "refused"  # the service does not accept this text
    UNPARSED = "unparsed"  # it answered, but no score can be read


class RemoteError(Exception):
    """One failed call.

    `cause` is a short word for metrics and rollouts: `timeout`, `connection`, `http_429`,
    `bad_body`, `refusal` ... `retry_after` is the wait that the service asked for, in seconds.
    """

    def __init__(
        self,
        kind: Failure,
        cause: str,
        message: str,
        *,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.cause = cause
        self.status = status
        self.retry_after = retry_after

    @property
    def summary(self) -> str:
        """Cause and message, without secrets."""
        return f"{self.cause}: {redact(str(self))}"


# Too many calls; 529 is Anthropic's word for a server at capacity.
TOO_MANY = frozenset({429, 529})
OVERLOADED = frozenset({408, 503, 504})
# The server failed at this request, and says no more; proxies have other statuses for one that is
# down or starts.
SERVER_ERROR = 500
# Every other 4xx is fatal, every other 5xx is retryable.
_STATUSES = {
    **dict.fromkeys((400, 411, 413, 414, 422, 431), Failure.REFUSED),
    **dict.fromkeys((408, 409, 424, 425, 429), Failure.RETRYABLE),
    **dict.fromkeys((501, 505), Failure.FATAL),
}


def kind_of_status(status: int) -> Failure:
    """Return the kind of failure that an HTTP status other than 200 means."""
    return _STATUSES.get(status, Failure.RETRYABLE if status >= 500 else Failure.FATAL)


MESSAGE_LIMIT = 600  # characters of a service's message that are shown
# Keys that hold the message of an error object, the most specific one first.
_MESSAGE_KEYS = (
    "message", "msg", "detail", "details", "error_description", "error_message", "error",
    "errors", "description", "reason", "title",
)  # fmt: skip
_MAX_DEPTH = 6  # of nested objects: a gateway may wrap the reply of another one
_MAX_ITEMS = 3  # of a list of errors
_HTML = re.compile(r"(?i)<\s*(!doctype|html|head|title|body|center|div|h1|p)\b")
_INVISIBLE = re.compile(r"(?is)<(script|style)\b.*?</\1\s*>|<!--.*?-->")
_TAG = re.compile(r"(?s)<[^>]*>")


def read_message(body: Any, depth: int = 0) -> str:
    """Return the message in a body (object, list, JSON, HTML page, text) as one line, or ''."""
    if depth > _MAX_DEPTH:
        return ""
    if isinstance(body, str):
        return _find_text_message(body, depth)
    if isinstance(body, Mapping):
        return _find_object_message({str(key).lower(): value for key, value in body.items()}, depth)
    if isinstance(body, Sequence) and not isinstance(body, bytes):
        messages = [read_message(item, depth + 1) for item in body[:_MAX_ITEMS]]
        return "; ".join(message for message in messages if message)
    return ""


def is_html(text: Any) -> bool:
    """Whether a text is a page of HTML, sent by a proxy instead of the service."""
    return isinstance(text, str) and bool(_HTML.search(text))


def to_one_line(text: str) -> str:
    """Return the text with each run of white space as one blank."""
    return " ".join(text.split())


def _find_text_message(text: str, depth: int) -> str:
    """Return the message in a text, which may be JSON or HTML, on one line."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return read_message(json.loads(text), depth + 1) or to_one_line(text)
        except (ValueError, RecursionError):
            pass
    # Tags and scripts of an error page say nothing.
    if is_html(text):
        text = html.unescape(_TAG.sub(" ", _INVISIBLE.sub(" ", text)))
    return to_one_line(text)


def _find_object_message(body: Mapping[str, Any], depth: int) -> str:
    """Return the message in an error object, "" without one.

    It is the first of _MESSAGE_KEYS, after the field in FastAPI's `loc`, or followed by
    OpenRouter's `metadata.raw`. `depth` is the number of levels above this one.
    """
    messages = (read_message(body.get(key), depth + 1) for key in _MESSAGE_KEYS)
    message = next((text for text in messages if text), "")
    # FastAPI names the field in `loc`; OpenRouter quotes the provider behind it in `metadata.raw`.
    location, metadata = body.get("loc"), body.get("metadata")
    if message and isinstance(location, list | tuple):
        return f"{'.'.join(map(str, location))}: {message}"
    inner = read_message(metadata.get("raw"), depth + 1) if isinstance(metadata, Mapping) else ""
    return f"{message}: {inner}" if message and inner else message or inner


def parse_seconds(text: str) -> float | None:
    """Return the seconds in a header value, or None unless it is a finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the wait that a reply asks for: retry-after-ms, or Retry-After (seconds or date)."""
    # OpenAI and Azure send milliseconds in a separate header.
    milliseconds = parse_seconds(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000.0
    value = headers.get("retry-after", "")
    seconds = parse_seconds(value)
    if seconds is not None or not value:
        return seconds
    try:
        moment = parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError):
        return None
    return max(0.0, moment - time.time())
