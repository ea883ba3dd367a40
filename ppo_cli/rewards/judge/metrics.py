"""What the client did since it was last asked: counted, and taken, on its event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
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
    unread: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    concurrency: int = 0
    open_seconds: float = 0.0


class Tally:
    """The running `Counters`; `gauge` tells calls in flight and seconds closed."""

    def __init__(self, gauge: Callable[[], tuple[int, float]] = lambda: (0, 0.0)) -> None:
        self._gauge = gauge
        self._open_before = 0.0
        self._counts = Counters()

    def add(self, name: str) -> None:
        """Count one more of `name`, a whole-number field of `Counters`."""
        setattr(self._counts, name, getattr(self._counts, name) + 1)

    def add_unread(self, cause: str) -> None:
        """Count one reply that no score was read from."""
        self._counts.unread[cause] += 1

    def add_error(self, cause: str) -> None:
        """Count one failed call."""
        self._counts.errors[cause] += 1

    def add_latency(self, seconds: float) -> None:
        """Note how long a call took that a score was read from."""
        self._counts.latencies.append(seconds)

    def take(self) -> Counters:
        """Return the counts and start again from nothing."""
        taken, self._counts = self._counts, Counters()
        taken.concurrency, open_seconds = self._gauge()
        taken.open_seconds = open_seconds - self._open_before
        self._open_before = open_seconds
        return taken
