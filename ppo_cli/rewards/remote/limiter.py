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

FIRST_RATE = 160.0
FASTEST = 1e4
_RAMP_S = 0.05
LONG_DRY_S = 2.0
_CUT = 0.7
_CAP_CREDIT_S = 0.25
_CREDIT_S = 0.03
NEAR = 0.8
BELOW = 0.98
FIRST_HOLD = 1.0
GAIN = 0.02
DECAY = 0.999
DRY = 3.0
SLACK = 0.0
RETRY = 0.3
FEW = 4
ALONE = 3.0

GAP = 0.5
SOONER = 0.8
EARLY = 0.5


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
    settled: bool = False
    probing: bool = False
    failed_probes: int = 0


class Capacity:
    """How fast calls may leave, and how many may be under way, learned from those refused.

    Two limits, and each call tries only one of them. The pace: a call that leaves while fewer
    than `slots` are under way tells of it when it is refused. The slots: now and then an extra
    call leaves while all of them are taken.
    """

    def __init__(self, most: int, clock: Clock = time.monotonic) -> None:
        self.most = most
        self._clock = clock
        self._delay = 0.0  # until a call is refused
        self.restart()

    def restart(self) -> None:
        """Begin afresh, as after an outage: as many calls as there are, ever faster."""
        now = self._clock()
        self.slots, self.ramping = self.most, True
        self._pace = Spacing(FIRST_RATE, self._clock, _CREDIT_S)
        self._sent: deque[Ticket] = deque()
        self._proven = 0.0  # the most under way when a call was let in; slowly forgotten
        self._since = self._pushed_at = self._grown_at = self._let_in_at = now
        self._began: float | None = None
        self._let_in, self._found, self._refusing = 0, False, False
        self._before, self._turned_away = (0, 0.0), 0
        self._careful, self._sent_at = False, -math.inf
        self._refused_at = self._answered_at = -math.inf
        self._extra_s, self._extra_at = 0.0, -math.inf
        self._trouble, self._cut_at = 0.0, -math.inf

    @property
    def rate(self) -> float:
        """Calls a second at the moment."""
        return self._pace.rate

    def size(self) -> int:
        """How many calls may be under way."""
        return self.slots

    def wait(self, under_way: int) -> float:
        """Seconds until the next call may leave; infinite when only an answer can change that."""
        if under_way >= self.most:
            return math.inf
        wait = self._pace.wait()
        if self._careful:
            wait = max(wait, self._sent_at + 1.5 * self._delay - self._clock())
        if under_way < self.slots:
            return wait
        return max(wait, self._extra_at - self._clock())

    def sent(self, ticket: Ticket, under_way: int) -> None:
        """Note that a call leaves while so many others are under way."""
        now = self._clock()
        self._settle()
        if self._began is None:
            self._began = self._since = self._let_in_at = self._grown_at = now
        self._grow()
        ticket.refused, ticket.settled, ticket.others = False, False, under_way
        ticket.extra = under_way >= self.slots
        if ticket.extra:
            self._extra_at = now + max(self._extra_s, 1.0 / self._pace.rate)
        self._sent_at = now
        self._pace.take()
        self._sent.append(ticket)

    def answered(self, ticket: Ticket) -> None:
        """Take a call that was let in."""
        self._settle()
        self._answered_at = self._clock()
        self._trouble -= self._trouble / self.size()

    def refused(self, ticket: Ticket, others: int, hint: float = math.inf) -> bool:
        """Take a call that was refused; whether none has been let in for long.

        `others` are under way, and the server asked for a pause of `hint` seconds at most.
        """
        now = self._clock()
        ticket.refused = True
        self._delay = max(0.98 * self._delay, now - ticket.sent_at)
        self._let_in -= ticket.settled
        for later in self._sent:
            later.others -= later.sent_at > ticket.sent_at
        self._settle()
        dry = max(0.0, ticket.sent_at - self._let_in_at)
        self._refusing = self._refusing or not ticket.extra
        gap = (now - self._since) / (max(0, self._let_in) + 1)
        interval = 1.0 / self._pace.rate
        hold = max(interval, min(hint, max(dry / DRY, GAP * gap), 0.25 + dry / 12))
        if ticket.extra:
            self._extra_s = max(min(2.0 * self._extra_s, 20.0 * gap), hold)
            self._extra_at = max(self._extra_at, ticket.sent_at + self._extra_s)
        elif self.ramping:
            self.ramping = False
            self.slots = max(1, others, int(self._proven))
            self._lesson(ticket, first=True)
        elif others + SLACK >= NEAR * self._proven:
            self.slots = max(1, min(self.slots, others))
        else:
            self._lesson(ticket)
        if not ticket.extra:
            if now - self._refused_at > ALONE * interval and self._found:
                hold = RETRY * interval
                self._pace.correct(-(1.0 - RETRY))
            self._refused_at = now
            self._pace.hold(now + hold)
        return now - self._let_in_at > LONG_DRY_S

    def _lesson(self, ticket: Ticket, first: bool = False) -> None:
        now = self._clock()
        self._pushed_at = now
        self._turned_away += 1
        self._careful = True
        seconds = now - self._since
        peek = sum(t.sent_at < ticket.sent_at and not t.refused for t in self._sent)
        let_in = self._let_in + peek
        if first:
            seconds = max(seconds - self._delay, 0.02)
            let_in = max(let_in, 1)
            self._pace.rate = max(1.0, let_in / seconds)
        elif (seconds >= 1.0 and let_in >= (5 if self._found else 2)) or (seconds >= 0.1 and let_in >= FEW and not self._found):
            delivered = (let_in + self._before[0]) / (seconds + self._before[1])
            rate = min(self._pace.rate, BELOW * delivered)
            share = self._turned_away / (self._turned_away + let_in)
            if self._found:
                rate = max(rate, (0.95 if share < 0.05 else 0.7) * self._pace.rate)
            self._found = share < 0.2
            self._pace.rate = rate
        else:
            if not self._found:
                most = (let_in + 1 + self._before[0]) / (seconds + self._before[1])
                self._pace.rate = min(self._pace.rate, most)
            return
        self._before, self._turned_away = (let_in, seconds), 0
        self._since, self._let_in = now, -peek

    def overloaded(self, ticket: Ticket) -> None:
        """Narrow on a timeout or a 503 when most calls end so; a few of them are accidents.

        Once for all calls that left before the last time.
        """
        now = self._clock()
        self._trouble += (1.0 - self._trouble) / max(4, self.size())
        if self._trouble > 0.5 and ticket.sent_at >= self._cut_at:
            self.slots, self.ramping = max(1, int(_CUT * self.slots)), False
            self._cut_at = now

    def _settle(self) -> None:
        """Count the calls that would have been refused by now: they were let in."""
        before = self._clock() - 1.5 * self._delay
        while self._sent and (self._sent[0].sent_at < before or self._sent[0].refused):
            ticket = self._sent.popleft()
            if ticket.refused:
                continue
            ticket.settled = True
            self._let_in += 1
            self._proven = max(DECAY * self._proven, ticket.others + 1)
            quiet = ticket.sent_at - max(self._let_in_at, self._answered_at)
            if self._refusing and quiet > max(LONG_DRY_S, 4.0 / self._pace.rate):
                self.restart()
                self._began = self._since = self._let_in_at = self._grown_at = self._clock()
                return
            self._refusing = False
            if ticket.sent_at > self._refused_at:
                self._careful = False
            self._let_in_at = max(self._let_in_at, ticket.sent_at)
            if ticket.extra:
                self.slots = max(self.slots, min(self.most, ticket.others + 1))
                self._extra_s *= SOONER

    def _grow(self) -> None:
        now = self._clock()
        step, self._grown_at = now - self._grown_at, now
        if self.ramping:
            self._pace.rate = min(FASTEST, self._pace.rate * 2.0 ** (step / _RAMP_S))
        elif self._pace.slack() <= _CREDIT_S:
            a_second = min(0.5, (GAIN if self._found else EARLY) * (now - self._pushed_at))
            self._pace.rate = min(FASTEST, self._pace.rate * (1.0 + a_second * min(1.0, step)))
