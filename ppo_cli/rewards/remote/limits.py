"""How many calls may be in flight, and how fast new ones may follow.

`AdaptiveWindow` learns the first from the calls that a server refuses; `RateLimiter` keeps the caps
on requests and tokens per minute that the user set. Both only do arithmetic on a clock: `admission`
decides who waits, and for how long. docs/design/008-judge-limiter.md has the reasons and figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ppo_cli.config.schema.reward import ApiReward

Clock = Callable[[], float]

# A call that was held up may catch up this much of the rate, or the rate would never be reached.
CREDIT_S = 0.25
# The quota of a minute is spread over a little more than a minute: calls that catch up, or that
# were held up on the network and arrive together, must not exceed the server's own count.
MINUTE_S = 60.0 + CREDIT_S + 0.75

# Calls in flight at the start of a run, and after an outage.
FIRST_WINDOW = 8
# Seconds until the window grows by one call: at first, at the least, at the most.
FIRST_PAUSE_S, SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.002, 5.0
# A refusal multiplies the pause by the first, an answer by the second: they balance when about one
# call in seven is refused, which keeps a server busy and costs little.
PAUSE_GROWTH, PAUSE_DECAY = 1.3, 0.96
# After so many refusals in a row the quota is used up: the pause says nothing about that, so it
# stays as it is, and the next try waits for a tenth of the time since the first of the refusals.
LONG_ROW, WAIT_SHARE = 8, 0.1
# The longest pause while no call is in flight: then no answer can let the next call go earlier.
IDLE_PAUSE_S = 0.25
# When most calls time out, the window shrinks to this share and grows more slowly for a while.
OVERLOAD_SHRINK, OVERLOAD_PAUSE_S = 0.7, 1.0


@dataclass(frozen=True)
class Limits:
    """What the user allows, in calls, tokens and seconds. `deadline` is for one result."""

    concurrency: int = 32
    max_rpm: int | None = None
    max_tpm: int | None = None
    timeout: float = 60.0
    deadline: float = 180.0
    hedge_after: float | None = None
    outage_wait: float = 1800.0

    @classmethod
    def of(cls, api: ApiReward) -> Limits:
        """Read the limits from a judge's settings."""
        return cls(
            concurrency=api.concurrency, max_rpm=api.max_rpm, max_tpm=api.max_tpm,
            timeout=api.timeout, deadline=api.deadline,
            hedge_after=api.hedge_after, outage_wait=api.outage_wait,
        )  # fmt: skip


class RateLimiter:
    """Spreads units (calls or tokens) evenly over time, at `rate` units per second."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._next = clock()

    def wait(self) -> float:
        """Return the seconds until the next unit is available."""
        return max(0.0, self._next - self._clock())

    def consume(self, units: float = 1.0) -> None:
        """Use `units` now, whether or not they are available."""
        self._next = max(self._next, self._clock() - CREDIT_S) + units / self._rate

    def correct(self, units: float) -> None:
        """Add to the units used, or refund some (a negative number)."""
        self._next += units / self._rate


@dataclass(eq=False)
class QueueSlot:
    """The place of one call in the queue of `Admission`.

    `tokens` is what the call is expected to use of a token cap, `times_sent` counts its attempts.
    `refused` says that the server turned the last attempt away for its rate (429, 529). `probing`
    marks an attempt that tests whether a server that was down is back.
    """

    tokens: int = 0
    times_sent: int = 0
    sent_at: float = 0.0
    refused: bool = False
    probing: bool = False


class AdaptiveWindow:
    """How many calls may be in flight, learned from the calls that the server refuses.

    The window grows by one call after each pause (additive increase). When a call is refused, the
    calls that are still in flight are what the server accepts, so they become the window. The pause
    adapts too: each refusal makes it longer, each answer shorter (multiplicative).
    """

    def __init__(self, limit: int, clock: Clock = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._overload_share = 0.0  # moving average of the calls that timed out
        self._shrunk_at = -math.inf
        self.restart()

    def restart(self) -> None:
        """Start with a few calls, as at the start of a run or after an outage."""
        self.size = min(self._limit, FIRST_WINDOW)
        self._pause_s = FIRST_PAUSE_S
        self._pause_grown_at = -math.inf
        self._next_growth = -math.inf
        self._refused_in_a_row = 0
        self._row_began = self._clock()

    def wait(self, in_flight: int) -> float:
        """Return the seconds until a call may leave; infinite if only an answer can change that."""
        if in_flight < self.size:
            return 0.0
        if self.size >= self._limit:
            return math.inf
        return max(0.0, self._next_growth - self._clock())

    def sent(self, in_flight: int) -> None:
        """Record that a call is sent next to `in_flight` others; grow the window if it is full."""
        if in_flight < self.size or self.size >= self._limit:
            return
        self.size += 1
        pause = self._pause_s
        if self._refused_in_a_row:
            pause = max(pause, self._row_wait())
        self._next_growth = self._clock() + pause

    def answered(self) -> None:
        """Record an answered call: the window may grow sooner."""
        self._overload_share -= self._overload_share / max(4, self.size)
        self._pause_s = max(SHORTEST_PAUSE_S, PAUSE_DECAY * self._pause_s)
        if self._refused_in_a_row:
            self._refused_in_a_row = 0
            self._next_growth = min(self._next_growth, self._clock() + self._pause_s)

    def refused(self, sent_at: float, in_flight: int) -> None:
        """Record a call, sent at `sent_at`, that the server refused: the window shrinks.

        It shrinks to the `in_flight` calls, and grows again after a longer pause.
        """
        now = self._clock()
        if not self._refused_in_a_row:
            self._row_began = now
        self._refused_in_a_row += 1
        # Calls that left before the pause was made longer say nothing about the longer one.
        if sent_at >= self._pause_grown_at and self._refused_in_a_row <= LONG_ROW:
            self._pause_grown_at = now
            self._pause_s = min(LONGEST_PAUSE_S, PAUSE_GROWTH * self._pause_s)
        self.size = min(self.size, in_flight)
        if not in_flight:
            next_try = now + max(IDLE_PAUSE_S, self._row_wait())
            self._next_growth = min(self._next_growth, next_try)

    def overloaded(self, sent_at: float) -> None:
        """Record a timeout or a 503; shrink the window when most calls end so."""
        self._overload_share += (1.0 - self._overload_share) / max(4, self.size)
        # Once for all calls that left before the window last shrank.
        if self._overload_share > 0.5 and sent_at >= self._shrunk_at:
            self.size = max(1, int(self.size * OVERLOAD_SHRINK))
            self._pause_s = max(self._pause_s, OVERLOAD_PAUSE_S)
            self._shrunk_at = self._clock()
            self._next_growth = self._shrunk_at + self._pause_s

    def _row_wait(self) -> float:
        return WAIT_SHARE * (self._clock() - self._row_began)
