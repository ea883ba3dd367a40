"""What judges, served reward models and pools of workers share.

One background event loop for the whole run, since an SDK's connections die with their loop; and
what an HTTP reply without an answer says, whoever sent it: its words, and how long to wait.
"""

from __future__ import annotations

import asyncio
import atexit
import html
import json
import math
import re
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 5.0


class LoopThread:
    """Runs coroutines on a daemon thread, which never keeps the process alive."""

    def __init__(self, name: str = "judge") -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future that comes back cancels it."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError(f"the event loop of {self._thread.name} is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine to its end from another thread; cancelled when the wait is given up."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("call() would wait for its own thread")
        future = self.submit(work)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread. Safe to call twice."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            self._thread.join(2 * _CANCEL_S)
            return
        atexit.unregister(self.close)
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(_CANCEL_S)
        except TimeoutError:
            ending.cancel()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CANCEL_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """Everything submitted before the close has become a task by now: calls are in order."""
        # A cancelled task may leave others behind, so look again until nothing is left.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


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
