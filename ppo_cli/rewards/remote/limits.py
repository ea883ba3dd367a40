"""How many calls may be under way, and how fast new ones may follow.

`Capacity` learns both from the calls that a server refuses; `Spacing` keeps the caps on requests
and tokens a minute that the user set. Pure bookkeeping on a clock; who waits, and for how long, is
for `breaker`. docs/design/008-judge-limiter.md has the reasons and the figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ppo_cli.config.schema.reward import ApiReward

Clock = Callable[[], float]

# The first calls: so many at once, twice as many every DOUBLING_S until one is refused.
FIRST_WINDOW = 8
DOUBLING_S = 0.05
_CUT = 0.7  # of the window, when most calls time out
# The pace: this much above the rate of the calls let in, and one lesson takes at most this share.
_ABOVE = 1.03
_LEAST, _LEAST_OF_FEW = 0.5, 0.9  # when less than a tenth was refused
_LESSON_CALLS, _LESSON_S, _SHORTEST_S = 16, 0.5, 0.05
_NOISE_SHARE = 0.2  # refused at a pace that was let in before
# It grows by this share: a second, for each second since the last refusal; a call, after 16 calls.
_GAIN_S, _GAIN_CALLS, _FASTEST = 0.03, 0.02, 3.0
# Intervals of the pace until the call after a refused one, with others under way, and without.
_RAREST, _SOONEST = 8.0, 0.1
_LONG_QUIET_S = 2.0
# The seconds that a late call may catch up.
_CAP_CREDIT_S = 0.25
# What is allowed in a minute is spread over a little more, so that calls that catch up, or that are
# held up on their way and arrive together, are not too many at the server.
MINUTE_S = 60.0 + _CAP_CREDIT_S + 0.75
_CREDIT_S = 0.1


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
        self._next = max(self._next, self._clock() - self._credit_s) + cost / self.rate

    def correct(self, cost: float) -> None:
        """Add to what was taken, or give back (a negative cost)."""
        self._next += cost / self.rate

    def later(self, moment: float) -> None:
        """Let nothing be taken before then."""
        self._next = max(self._next, moment)

    def sooner(self, moment: float) -> None:
        """Let something be taken then at the latest."""
        self._next = min(self._next, moment)


@dataclass(eq=False)
class Ticket:
    """One verdict that waits for its call; `tokens` is what the call may use of a token cap.

    `number` counts the calls sent. `quiet_s` is how long the server had refused all calls when
    this one left, `paced` whether it left by the pace, and not for one that was answered.
    """

    tokens: int = 0
    sent: int = 0
    sent_at: float = 0.0
    number: int = 0
    quiet_s: float = 0.0
    paced: bool = False
    refused: bool = False
    probing: bool = False
    failed_probes: int = 0


class Capacity:
    """How fast calls may leave, and how many may be under way, learned from those refused.

    A pace a little above the rate of the calls let in keeps the server busy, whatever it counts.
    As long as calls that leave by the pace are refused, one more leaves for each that is answered.
    """

    def __init__(self, most: int, clock: Clock = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._number = 0
        self.restart()

    def restart(self) -> None:
        """Begin afresh, as after an outage: more and more calls, until one is refused."""
        now = self._clock()
        self.ramping = True
        self._ramp_from: float | None = None
        self._window = float(self.most)
        self._trouble, self._cut_at = 0.0, -math.inf
        self._pace = Spacing(1.0, self._clock, _CREDIT_S)
        self._start(self._number, now)
        self._rate_before, self._fair = 0.0, False  # the rate before a faster pace was tried
        self._last_refused, self._delay = self._number, 0.0
        self._row_from = now  # when the first of the last row of refused calls left
        self._refused_at = self._grown_at = now
        self._answered_at = -math.inf
        # A server that is full lets in one call for each that it has answered.
        self._full = self._freed = self._idle = False
        self._paced: Ticket | None = None  # the last call that left by the pace
        self._followed = 0  # calls that left for an answered one since a paced one was refused
        self._factor = 1.0

    def _start(self, number: int, at: float) -> None:
        """Count from this call on."""
        self._first, self._first_at, self._refused = number, at, 0

    @property
    def rate(self) -> float:
        """Calls a second at the moment."""
        return math.inf if self.ramping else self._pace.rate

    def size(self) -> int:
        """How many calls may be under way."""
        size = self._window
        if self.ramping:
            ramp_s = 0.0 if self._ramp_from is None else self._clock() - self._ramp_from
            size = min(size, FIRST_WINDOW * 2.0 ** min(60.0, ramp_s / DOUBLING_S))
        return max(1, int(size))

    def wait(self, under_way: int) -> float:
        """Seconds until the next call may leave; infinite when only an answer can change that."""
        if under_way >= self.size():
            return 0.02 if self.ramping and under_way < int(self._window) else math.inf
        return 0.0 if self.ramping or self._freed else self._pace.wait()

    def idle(self) -> None:
        """Note that nothing is under way, and nobody waits: the server may save up calls."""
        self._idle = True

    def sent(self, ticket: Ticket) -> None:
        """Note that a call leaves."""
        now = ticket.sent_at = self._clock()
        self._number += 1
        ticket.number, ticket.refused, ticket.paced = self._number, False, False
        row = self._number - self._last_refused
        ticket.quiet_s = now - max(self._row_from, self._answered_at) if row == 1 else 0.0
        if self._ramp_from is None or self._idle:
            self._ramp_from = now if self._ramp_from is None else self._ramp_from
            self._idle, self._refused_at, self._grown_at = False, now, now
            self._start(self._number - 1, now)
        if self.ramping:
            return
        ticket.paced, self._freed = not self._freed, False
        if not ticket.paced:
            self._followed += 1
        else:
            if self._paced and now - self._paced.sent_at > 2.0 * self._delay:
                self._full = self._paced.refused
            self._paced = ticket
        step, self._grown_at = min(1.0, now - self._grown_at), now
        if self._pace.slack() < _CREDIT_S:  # else something else holds calls back
            growth = _GAIN_S * (now - self._refused_at) * step
            if row > _LESSON_CALLS:
                growth = max(growth, _GAIN_CALLS * row / _LESSON_CALLS)
            self._pace.rate *= 1.0 + min(growth, _FASTEST * step)
        self._pace.take()
        if not ticket.paced:
            self._pace.sooner(now + _LESSON_CALLS / self._pace.rate)

    def answered(self, ticket: Ticket, *, waiting: bool) -> None:
        """Take a call that was answered; `waiting` says that others wait to leave."""
        self._trouble -= self._trouble / self.size()
        if waiting:
            self._window = min(float(self.most), self._window + 1.0 / self._window)
        self._answered_at = self._clock()
        if ticket.quiet_s > max(_LONG_QUIET_S, 4.0 / self._pace.rate):
            self.restart()  # a new minute, or the like
        self._freed = self._full

    def refused(self, ticket: Ticket) -> bool:
        """Take a call that was refused; whether none was let in before."""
        now = self._refused_at = self._clock()
        if ticket.number > self._last_refused + 1:
            self._row_from = ticket.sent_at
        self._last_refused = max(self._last_refused, ticket.number)
        self._refused += ticket.number > self._first
        none_yet = self.ramping and ticket.number <= self._first + self._refused
        ticket.refused = True
        self._delay = max(0.9 * self._delay, now - ticket.sent_at)
        self._learn(ticket)
        if not ticket.paced:
            self._factor, full = 0.5, False
        elif self._full and self._followed:  # others were let in meanwhile: it counts those at once
            self._factor, full = min(_RAREST, 2.0 * max(1.0, self._factor)), True
        else:
            self._factor, full = min(1.0, 2.0 * self._factor) if self._full else _SOONEST, True
        self._full, self._followed = full, 0
        dry = now - self._row_from
        again = now + max(min(dry / 3.0, 0.15 + dry / 12.0), self._factor / self._pace.rate)
        if ticket.number == self._number and self._factor <= 1.0:
            self._pace.sooner(again)
        self._pace.later(again)
        return none_yet

    def _learn(self, ticket: Ticket) -> None:
        """Set the pace by the calls let in between two that were refused.

        The server had nothing left at both ends, so it allows as many, give or take one.
        """
        calls, seconds = ticket.number - self._first, ticket.sent_at - self._first_at
        let_in = max(0, calls - self._refused)
        if self.ramping:
            self.ramping = False
            self._pace.rate = max(1.0, let_in / max(seconds, _SHORTEST_S))
        else:
            least_s = _SHORTEST_S if self._refused > _LESSON_CALLS / 2 else _LESSON_S
            if calls < _LESSON_CALLS or seconds < least_s:
                return
            rate, share = let_in / seconds, self._refused / calls
            # Refusals that stay frequent at a pace that was let in before may have nothing to do
            # with it: it is doubled, and again as long as more calls are let in for it.
            noise = share > _NOISE_SHARE and self._fair and not self._full
            if noise or (self._rate_before and rate > 1.3 * self._rate_before):
                self._rate_before, self._fair = rate, False
                self._pace.rate *= 2.0
            else:
                least = (_LEAST_OF_FEW if share < 0.1 else _LEAST) * self._pace.rate
                self._rate_before, self._fair = 0.0, _ABOVE * rate >= least
                self._pace.rate = max(_ABOVE * rate, least)
        self._start(ticket.number, ticket.sent_at)

    def overloaded(self, sent_at: float) -> None:
        """Narrow on a timeout or a 503 when most calls end so; a few of them are accidents.

        Once for all calls that left before the last time.
        """
        self._trouble += (1.0 - self._trouble) / max(4, self.size())
        if self._trouble > 0.5 and sent_at >= self._cut_at:
            self._window = max(1.0, self.size() * _CUT)
            self._cut_at = self._clock()
