"""How many calls may be under way, and how fast new ones may follow.

`Capacity` learns both from the calls that a server refuses; `Spacing` keeps the caps on requests
and tokens a minute that the user set. Pure bookkeeping on a clock; who waits, and for how long, is
for `judge.breaker`. docs/design/008-judge-limiter.md has the reasons and the figures.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ppo_cli.config.reward_schema import ApiReward

Clock = Callable[[], float]

# The first calls: so many a second, twice as many every _RAMP_S until one is refused.
FIRST_RATE = 160.0
_RAMP_S = 0.05
_FASTEST = 1e4
# How the pace grows: by this share a second, for each second since the last refused call.
_GAIN = 0.04
_FIRST_GAIN = 0.5  # until the pace is known
_FEW_CALLS, _FEW_S = 8, 0.1
_LEAST_CALLS, _LEAST_S = 5, 1.0
# A refused call tells of the slots where so many were under way, of the most that were let in.
_NEAR = 0.8
_FORGET = 0.999
_SOONER = 0.8
_RAREST = 20.0
LONG_DRY_S = 2.0
_DEAF_S = 30.0
_CUT = 0.7
# The seconds that a late call may catch up.
_CAP_CREDIT_S = 0.25
_CREDIT_S = 0.03


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

    def hold(self, until: float) -> None:
        """Take nothing before then."""
        self._next = max(self._next, until)


@dataclass(eq=False)
class Ticket:
    """One verdict that waits for its call; `tokens` is what the call may use of a token cap."""

    tokens: int = 0
    sent: int = 0
    sent_at: float = 0.0
    others: int = 0
    extra: bool = False
    refused: bool = False
    let_in: bool = False
    probing: bool = False
    failed_probes: int = 0


class Capacity:
    """How fast calls may leave, and how many may be under way, learned from those refused.

    A call tries one of the two. One that leaves while fewer than `slots` are under way tells of
    the pace when it is refused. Now and then an extra call leaves while all slots are taken.
    """

    def __init__(self, most: int, clock: Clock = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._delay = 0.0  # until a call is refused
        self.restart()

    def restart(self) -> None:
        """Begin afresh, as after an outage: as many calls as there are, ever faster."""
        self.slots, self.ramping, self._known = self.most, True, False
        self._pace = Spacing(FIRST_RATE, self._clock, _CREDIT_S)
        self._sent: deque[Ticket] = deque()  # those that may still be refused
        self._proven = 0.0  # the most calls under way when one was let in
        self._extra_s, self._extra_least_s, self._extra_at = 0.0, 0.0, -math.inf
        self._trouble, self._cut_at = 0.0, -math.inf
        self._sent_at = self._answered_at = self._refused_at = -math.inf
        self._refusing = self._careful = False
        self._useless, self._deaf_until = 0, -math.inf
        self._begin()
        self._idle = True

    def _begin(self) -> None:
        """Count from now on: what the server saved up before is unknown."""
        self._since = self._grown_at = self._let_in_at = self._refusal_at = self._clock()
        self._let_in = self._turned_away = 0
        self._before = (0, 0.0)  # calls let in, and seconds, of the time counted before this one
        self._idle = False

    @property
    def rate(self) -> float:
        """Calls a second at the moment."""
        return self._pace.rate

    def size(self) -> int:
        """How many calls may be under way."""
        return self.slots

    def idle(self) -> None:
        """Note that nothing is under way, and nobody waits."""
        self._idle = not self._refusing

    def wait(self, under_way: int) -> float:
        """Seconds until the next call may leave; infinite when only an answer can change that."""
        if under_way >= self.most:
            return math.inf
        now, wait = self._clock(), self._pace.wait()
        if self._careful:
            wait = max(wait, self._sent_at + 1.5 * self._delay - now)
        return wait if under_way < self.slots else max(wait, self._extra_at - now)

    def sent(self, ticket: Ticket, under_way: int) -> None:
        """Note that a call leaves while so many others are under way."""
        if self._idle:
            self._begin()
        self._settle()
        self._grow()
        now = self._sent_at = self._clock()
        ticket.extra, ticket.others = under_way >= self.slots, under_way
        ticket.let_in = False
        if ticket.extra:
            self._extra_at = now + max(self._extra_s, self._extra_least_s)
        self._pace.take()
        self._sent.append(ticket)

    def answered(self) -> None:
        """Take a call that was answered."""
        self._settle()
        self._answered_at = self._clock()
        self._trouble -= self._trouble / self.slots

    def refused(self, ticket: Ticket, others: int, asked_s: float = math.inf) -> bool:
        """Take a call that was refused; whether none has been let in for long.

        `others` are under way. The server asked for a pause of `asked_s` seconds.
        """
        now = self._clock()
        self._delay = max(0.98 * self._delay, now - ticket.sent_at)
        self._let_in -= ticket.let_in
        if ticket in self._sent:
            self._sent.remove(ticket)
        for later in self._sent:
            later.others -= later.sent_at > ticket.sent_at
        self._settle()
        interval = 1.0 / self._pace.rate
        dry = max(0.0, ticket.sent_at - self._let_in_at)
        gap = (now - self._since) / (max(0, self._let_in) + 1)  # between two that are let in
        pause = max(interval, min(asked_s, max(dry / 3.0, gap / 2.0), 0.25 + dry / 12.0))
        if now < self._deaf_until:
            self._turned_away += 1
            if self._turned_away > max(20, 3 * self._let_in):
                self._deaf_until = now
        elif ticket.extra:
            self._extra_s = max(min(2.0 * self._extra_s, _RAREST * gap), pause)
            self._extra_at = max(self._extra_at, ticket.sent_at + self._extra_s)
        else:
            self._refusing, self._refused_at = True, now
            if self.ramping:
                self.slots = max(1, others, int(self._proven))
            elif others >= _NEAR * self._proven:
                self.slots = max(1, min(self.slots, others))
            if self.ramping or others < _NEAR * self._proven:
                self._slow_down(ticket)
            self._pace.hold(now + pause)
        return not self._proven or now - self._let_in_at > LONG_DRY_S

    def overloaded(self, ticket: Ticket) -> None:
        """Narrow on a timeout or a 503 when most calls end so; a few of them are accidents.

        Once for all calls that left before the last time.
        """
        now = self._clock()
        self._trouble += (1.0 - self._trouble) / max(4, self.slots)
        if self._trouble > 0.5 and ticket.sent_at >= self._cut_at:
            self.slots, self.ramping = max(1, int(_CUT * self.slots)), False
            self._extra_least_s, self._cut_at = now - ticket.sent_at, now
            self._extra_at = now + self._extra_least_s

    def _slow_down(self, ticket: Ticket) -> None:
        """Set the pace to the calls that were let in since it was set before, a second.

        The server had nothing left then, nor has it now. A few calls more or less at the two ends
        matter less when the time before counts too.
        """
        now = self._refusal_at = self._clock()
        self._turned_away += 1
        late = sum(one.sent_at < ticket.sent_at for one in self._sent)
        calls, seconds = self._let_in + late, now - self._since
        if self.ramping:
            self.ramping = False
            seconds = max(seconds - self._delay, 0.02)
            self._pace.rate = max(1.0, max(1, calls) / seconds)
        else:
            self._careful = True
            few = calls >= (_LEAST_CALLS if self._known else 2) and seconds >= _LEAST_S
            if not few and not (not self._known and calls >= _FEW_CALLS and seconds >= _FEW_S):
                if not self._known:
                    most = (calls + 1 + self._before[0]) / (seconds + self._before[1])
                    self._pace.rate = min(self._pace.rate, most)
                return
            rate = (calls + self._before[0]) / (seconds + self._before[1])
            share = self._turned_away / (self._turned_away + calls)
            # Refusals that stay frequent, however slowly calls leave, are none of their speed.
            if calls >= _FEW_CALLS:
                self._useless = self._useless + 1 if share > 0.15 else 0
            if self._useless >= 4:
                self.restart()
                self._deaf_until = now + _DEAF_S
                return
            least = 0.5 if calls >= _FEW_CALLS else 0.0
            if self._known:
                least = 0.95 if share < 0.05 else 0.85 if share < 0.25 else 0.5
            self._pace.rate = max(least * self._pace.rate, min(self._pace.rate, rate))
            self._known = share < 0.2
        self._before, self._turned_away = (calls, seconds), 0
        self._since, self._let_in = now, -late

    def _settle(self) -> None:
        """Count the calls that would have been refused by now: they were let in."""
        before = self._clock() - 1.5 * self._delay
        while self._sent and self._sent[0].sent_at < before:
            ticket = self._sent.popleft()
            quiet = ticket.sent_at - max(self._let_in_at, self._answered_at)
            if self._refusing and quiet > max(LONG_DRY_S, 4.0 / self._pace.rate):
                self.restart()
                return
            ticket.let_in = True
            self._let_in += 1
            self._let_in_at = ticket.sent_at
            self._refusing = False
            self._careful = self._careful and ticket.sent_at <= self._refused_at
            self._proven = max(_FORGET * self._proven, ticket.others + 1)
            if ticket.extra:
                self.slots = max(self.slots, min(self.most, ticket.others + 1))
                self._extra_s *= _SOONER

    def _grow(self) -> None:
        """Ever faster while no call is refused, unless something else holds calls back."""
        now = self._clock()
        step, self._grown_at = now - self._grown_at, now
        if self.ramping:
            self._pace.rate = min(_FASTEST, self._pace.rate * 2.0 ** (step / _RAMP_S))
        elif self._pace.slack() <= _CREDIT_S:
            gain = (_GAIN if self._known else _FIRST_GAIN) * (now - self._refusal_at)
            more = min(0.5, gain) * min(1.0, step)
            self._pace.rate = min(_FASTEST, self._pace.rate * (1.0 + more))
