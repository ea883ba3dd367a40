"""How many calls may be under way, and how fast new ones may follow.

Three brakes: a window of calls in flight that opens and closes with what the judge says, a pace
learned from its refusals, and the caps on requests and tokens a minute that the user set.
Pure bookkeeping on a clock; who waits, and for how long, is for `judge.breaker`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ppo_cli.config.reward_schema import ApiReward

Clock = Callable[[], float]

FIRST_WINDOW = 8
DOUBLING_S = 0.05
_CUT = 0.7
_CAP_CREDIT_S = 0.25
_PACE_CREDIT_S = 0.03
_LEARN_S = 1.0
_FIRST_LEARN_S = 0.25
_SHORT_PAUSE_S = 0.25


@dataclass(frozen=True)
class Limits:
    """What the user allows; seconds, calls and tokens. `deadline` is for one verdict."""

    concurrency: int = 32
    max_rpm: int | None = None
    max_tpm: int | None = None
    timeout: float = 60.0
    deadline: float = 180.0
    hedge_after: float | None = None
    outage_wait: float = 1800.0
    reasks: int = 2

    @classmethod
    def of(cls, api: ApiReward) -> Limits:
        """Read the limits from a judge's settings."""
        return cls(
            concurrency=api.concurrency, max_rpm=api.max_rpm, max_tpm=api.max_tpm,
            timeout=api.timeout, deadline=api.deadline or 3.0 * api.timeout,
            hedge_after=api.hedge_after, outage_wait=api.outage_wait,
        )  # fmt: skip


class Spacing:
    """Spreads cost evenly over time: `rate` units a second, and hardly any burst.

    Whoever comes late may catch up `credit_s` seconds, or the rate would never be reached.
    """

    def __init__(
        self, rate: float, clock: Clock = time.monotonic, credit_s: float = _CAP_CREDIT_S
    ) -> None:
        self.rate = rate
        self._credit_s = credit_s
        self._clock = clock
        self._next = clock()

    def wait(self) -> float:
        """Seconds until something may be taken."""
        return max(0.0, self._next - self._clock())

    def slack(self) -> float:
        """Seconds since something might have been taken."""
        return max(0.0, self._clock() - self._next)

    def take(self, cost: float = 1.0) -> None:
        """Take `cost` units now, whatever was left."""
        start = max(self._next, self._clock() - self._credit_s)
        self._next = start + cost / self.rate

    def correct(self, cost: float) -> None:
        """Add to what was taken, or give back (a negative cost)."""
        self._next += cost / self.rate


class Window:
    """Calls that may be in flight at once: additive increase, multiplicative decrease.

    As long as nothing pushed back the window doubles every twentieth of a second, up to the cap:
    "too many" is said at once, while a verdict may take seconds, so waiting a whole round trip
    for every doubling would only cost time.
    """

    def __init__(self, cap: int, clock: Clock = time.monotonic) -> None:
        self.cap = cap
        self._clock = clock
        self._trouble = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin afresh, as after an outage; the ramp starts with the next call sent."""
        self._size = float(min(FIRST_WINDOW, self.cap))
        self._ramp_from: float | None = None
        self._ramping = self._size < self.cap
        self._cut_at = -math.inf
        self._trouble = 0.0

    @property
    def ramping(self) -> bool:
        """Whether the window still opens by itself as time goes by."""
        return self._ramping

    def size(self) -> int:
        """How many calls may be in flight now."""
        if self._ramping and self._ramp_from is not None:
            doublings = min(60.0, (self._clock() - self._ramp_from) / DOUBLING_S)
            self._size = min(float(self.cap), FIRST_WINDOW * 2.0**doublings)
            self._ramping = self._size < self.cap
        return max(1, int(self._size))

    def sent(self) -> None:
        """Note that a call leaves."""
        if self._ramp_from is None:
            self._ramp_from = self._clock()

    def succeeded(self, *, full: bool) -> None:
        """Widen by one call a round, if the window was `full`: else more room proves nothing."""
        self._trouble += (0.0 - self._trouble) / self.size()
        if full and not self._ramping:
            self._size = min(float(self.cap), self._size + 1.0 / self._size)

    def too_many(self, sent_at: float) -> None:
        """Narrow on a plain "too many", once for all calls that left before the last cut."""
        self.size()
        self._ramping = False
        if sent_at >= self._cut_at:
            self._size = max(1.0, self._size * _CUT)
            self._cut_at = self._clock()

    def overloaded(self, sent_at: float) -> None:
        """Narrow on a timeout or a 503 when most calls end so; a few of them are accidents."""
        self._trouble += (1.0 - self._trouble) / max(4, self.size())
        if self._trouble > 0.5:
            self.too_many(sent_at)


class LearnedPace:
    """Calls a second that the judge takes, learned from the calls that it turned away.

    Between two refusals a second or more apart the judge's own budget was used up at both ends,
    so what it accepted in between is at most what it allows: a lower bound. The pace that was
    refused is an upper one. The next pace lies between them, and creeps up while nobody objects.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._spacing: Spacing | None = None
        self._since: float | None = None
        self._accepted = 0
        self._rejected = 0
        self._longest_pause = 0.0
        self._lessons = 0
        self._last_share = 1.0
        self._useless = 0
        self._deaf_until = -math.inf
        self._pushed_at = -math.inf
        self._grown_at = -math.inf

    @property
    def rate(self) -> float | None:
        """Calls a second at the moment; None: as many as there are."""
        return self._spacing.rate if self._spacing else None

    @property
    def deaf(self) -> bool:
        """Whether slowing down was found to change nothing, so that refusals are noise."""
        return self._clock() < self._deaf_until

    def wait(self) -> float:
        """Seconds until the next call may leave."""
        return self._spacing.wait() if self._spacing else 0.0

    def sent(self) -> None:
        """Note that a call leaves."""
        self._accepted += 1
        if self._since is None:
            self._since = self._clock()
        if self._spacing:
            self._grow(self._spacing)
            self._spacing.take()

    def idle(self) -> None:
        """Note that nothing is under way: what the judge saved up meanwhile is unknown."""
        self._since = None
        self._accepted = self._rejected = 0

    def _grow(self, spacing: Spacing) -> None:
        """Quickly while little is known, then ever faster the longer nobody objected."""
        now = self._clock()
        step, self._grown_at = min(1.0, now - self._grown_at), now
        if spacing.slack() > _PACE_CREDIT_S:
            return  # something else holds calls back, so nothing is learned about the pace
        # Overshooting is cheap where refusals come with short pauses.
        gain = 0.02 if self._short_pauses else 0.001
        a_second = 0.5 if self._lessons < 2 else min(0.5, gain * (now - self._pushed_at))
        spacing.rate *= 1.0 + a_second * step

    def refused(self, sent_at: float, pause: float = 0.0) -> None:
        """Learn from a call that was refused, and asked to wait for `pause` seconds."""
        now = self._clock()
        self._longest_pause = max(self._longest_pause, pause)
        if self._since is not None and sent_at < self._since:
            self._pushed_at = now  # it tells of the time before the last lesson
            return
        self._accepted, self._rejected = max(0, self._accepted - 1), self._rejected + 1
        since = self._since if self._since is not None else now
        learn_s = _LEARN_S / 2.0 if self._lessons < 2 else _LEARN_S
        if self.deaf or (self._spacing and now - since < learn_s):
            self._pushed_at = now
            return
        if self._spacing is None:
            first = self._accepted / max(now - since, _FIRST_LEARN_S)
            self._spacing = Spacing(max(1.0, first), self._clock, _PACE_CREDIT_S)
        else:
            self._learn(self._spacing, now - since)
        self._since, self._accepted, self._rejected = now, 0, 0
        self._lessons += 1
        self._pushed_at = self._grown_at = now

    @property
    def _short_pauses(self) -> bool:
        return self._longest_pause <= _SHORT_PAUSE_S

    def _learn(self, spacing: Spacing, seconds: float) -> None:
        share = self._rejected / (self._accepted + self._rejected)
        # Refusals that stay as frequent however slowly we go have nothing to do with our speed.
        self._useless = self._useless + 1 if share > 0.25 and share > 0.8 * self._last_share else 0
        self._last_share = share
        if self._useless >= 3:
            self._spacing, self._lessons, self._useless = None, 0, 0
            self._deaf_until = self._clock() + 30.0
            return
        lower = max(self._accepted / seconds, 0.1)
        least = (0.4 if self._lessons < 3 else 0.85) * spacing.rate
        if share < 0.05:
            rate = 0.95 * spacing.rate  # hardly too fast
        elif self._short_pauses:
            # Too short for the judge to have saved up calls that were then lost: the bound is
            # the rate itself, give or take a call.
            rate = min(spacing.rate, 1.05 * lower)
        else:
            rate = min(math.sqrt(lower * max(spacing.rate, lower)), 2.0 * lower)
        # One lesson may be wrong, as when this process itself stood still for a moment.
        spacing.rate = max(rate, least)
        self._longest_pause /= 2.0
