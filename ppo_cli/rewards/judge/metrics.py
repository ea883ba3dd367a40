"""What the client did since it was last asked: counted on its thread, taken from another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Counters:
    """Counts since the last `take()`.

    `calls` are requests sent, `retried` those that repeat a failed one, and `verdicts` the scores
    that they brought; `cached` and `shared` are answers that needed no call of their own. `unread`
    counts replies that did not count, by cause, and `errors` failed calls, retried ones included;
    `latencies` are the seconds of the calls that a score was read from.
    """

    calls: int = 0
    retried: int = 0
    verdicts: int = 0
    cached: int = 0
    shared: int = 0
    refused: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    latencies: tuple[float, ...] = ()
    concurrency: int = 0
    open_seconds: float = 0.0


class Tally:
    """The running counts behind `Counters`; `gauge` tells calls in flight and seconds closed."""

    def __init__(self, gauge: Callable[[], tuple[int, float]] = lambda: (0, 0.0)) -> None:
        self._gauge = gauge
        self._open_before = 0.0
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._latencies: list[float] = []

    def add(self, name: str) -> None:
        """Count one more of `name`, a whole-number field of `Counters`."""
        with self._lock:
            self._counts[name] += 1

    def add_unread(self, cause: str) -> None:
        """Count one reply that no score was read from."""
        with self._lock:
            self._unread[cause] += 1

    def add_error(self, cause: str) -> None:
        """Count one failed call."""
        with self._lock:
            self._errors[cause] += 1

    def add_latency(self, seconds: float) -> None:
        """Note how long a call took that a score was read from."""
        with self._lock:
            self._latencies.append(seconds)

    def take(self) -> Counters:
        """Return the counts and start again from nothing."""
        with self._lock:
            concurrency, open_seconds = self._gauge()
            taken = Counters(
                **self._counts,
                unread=dict(self._unread),
                errors=dict(self._errors),
                latencies=tuple(self._latencies),
                concurrency=concurrency,
                open_seconds=open_seconds - self._open_before,
            )
            self._open_before = open_seconds
            self._clear()
        return taken
