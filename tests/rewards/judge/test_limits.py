"""The brakes on calls, on a clock that the tests move."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.rewards.judge.breaker import Admission, Breaker
from ppo_cli.rewards.judge.calls import Failure, JudgeError
from ppo_cli.rewards.remote.limiter import Capacity, Limits, Spacing, Ticket


class Hands:
    """A clock's hands, moved by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Hands:
    return Hands()


def test_limits_come_from_the_settings() -> None:
    settings = ApiReward(
        timeout=7.0, concurrency=5, max_rpm=30, max_tpm=900, hedge_after=2.0, outage_wait=50.0
    )
    assert Limits.of(settings) == Limits(5, 30, 900, 7.0, 21.0, 2.0, 50.0, 2)
    assert Limits.of(ApiReward(timeout=7.0, deadline=8.0)).deadline == 8.0


def test_spacing_keeps_its_rate_and_has_no_burst(clock: Hands) -> None:
    spacing, times = Spacing(10.0, clock), []
    for _ in range(50):
        clock.now += spacing.wait()
        spacing.take()
        times.append(clock.now)
    assert times[-1] - times[0] == pytest.approx(4.9)
    clock.now += 1000.0
    burst = 0
    while spacing.wait() == 0.0:
        spacing.take()
        burst += 1
    assert burst <= 4


def test_spacing_takes_back_what_an_estimate_had_too_much(clock: Hands) -> None:
    spacing = Spacing(100.0, clock)
    spacing.take(200.0)
    before = spacing.wait()
    spacing.correct(-150.0)
    assert spacing.wait() == pytest.approx(before - 1.5)


@pytest.mark.parametrize(
    ("limits", "expected", "used", "at_once"),
    [
        (Limits(max_tpm=6000), 1000, 100, True),
        (Limits(max_tpm=6000), 100, 100, True),
        (Limits(max_tpm=6000), 100, 1000, False),
        (Limits(max_rpm=60), 0, 0, True),
        (Limits(max_rpm=20), 0, 0, False),
    ],
)
def test_a_cap_lets_the_next_call_go_when_the_last_one_is_paid_for(
    clock: Hands, limits: Limits, expected: int, used: int, at_once: bool
) -> None:
    """A second after a call; the tokens that it took count, not those expected."""

    async def work() -> bool:
        breaker = Breaker("openai (m)", 1800.0, clock)
        admission = Admission(limits, breaker, clock)
        clock.now += 10.0
        first, second = Ticket(tokens=expected), Ticket(tokens=expected)
        await admission.enter(first)
        admission.succeeded(first, used=used)
        clock.now += 1.0
        waiting = asyncio.ensure_future(admission.enter(second))
        await asyncio.sleep(0)
        left = waiting.done()
        admission.close("over")
        await asyncio.gather(waiting, return_exceptions=True)
        return left

    assert asyncio.run(work()) is at_once


def fails(what: int | str) -> JudgeError:
    """A failure that may pass: a status, or none and its cause."""
    status = what if isinstance(what, int) else None
    return JudgeError(
        Failure.RETRYABLE, f"http_{what}" if status else str(what), "no", status=status
    )


def test_what_each_failure_teaches(clock: Hands) -> None:
    """After one failure and after seven of seven: slots, whether all of them may be used at once.

    A plain "too many" takes a slot each; an overload narrows when most calls end so.
    """
    calm = (8, True, True)
    expected = dict.fromkeys((429, 529), ((7, False, False), (1, False, False)))
    expected |= {503: ((8, True, False), (5, False, False))}
    expected |= dict.fromkeys((408, 504, "timeout"), (calm, (5, False, True)))
    expected |= dict.fromkeys((500, 502, "connection"), (calm, calm))

    def taught(what: int | str, times: int) -> tuple[int, bool, bool]:
        admission = Admission(Limits(concurrency=8), Breaker("m", 1800.0, clock), clock)
        tickets = [Ticket() for _ in range(8)]
        for ticket in tickets:
            admission.enter_now(ticket)
        clock.now += 0.5
        for ticket in tickets[:times]:
            admission.failed(ticket, fails(what))
        for ticket in tickets[times:]:
            admission.dropped(ticket)
        return admission.capacity.size(), admission.capacity.ramping, admission.room()

    assert {what: (taught(what, 1), taught(what, 7)) for what in expected} == expected


def test_a_later_failure_does_not_end_a_pause_that_was_asked_for(clock: Hands) -> None:
    async def work() -> list[bool]:
        admission = Admission(Limits(concurrency=8), Breaker("m", 1800.0, clock), clock)
        first, second = Ticket(), Ticket()
        for ticket in (first, second):
            admission.enter_now(ticket)
        asked = JudgeError(Failure.RETRYABLE, "http_429", "no", status=429, retry_after=30.0)
        admission.failed(first, asked)
        clock.now += 1.0
        admission.failed(second, fails(500))
        waiting = asyncio.ensure_future(admission.enter(Ticket()))
        entered = []
        for later in (20.0, 20.0):
            clock.now += later
            admission.dropped(Ticket())  # whoever leaves looks whether others may go
            await asyncio.sleep(0.01)
            entered.append(waiting.done())
        admission.close("over")
        await asyncio.gather(waiting, return_exceptions=True)
        return entered

    assert asyncio.run(work()) == [False, True]


def calls_in(capacity: Capacity, clock: Hands, seconds: float) -> int:
    """How many calls leave within a time in which none is answered."""
    end, sent = clock.now + seconds, 0
    while (wait := capacity.wait(sent)) <= end - clock.now:
        clock.now += wait
        capacity.sent(Ticket(sent_at=clock.now), sent)
        sent += 1
    clock.now = end
    return sent


def test_the_first_calls_leave_ever_faster_up_to_the_cap(clock: Hands) -> None:
    assert 6 <= calls_in(Capacity(64, clock), clock, 0.04) <= 12
    assert calls_in(Capacity(64, clock), clock, 0.3) == 64


def test_after_an_outage_calls_begin_slowly_again(clock: Hands) -> None:
    async def work() -> tuple[bool, bool]:
        breaker = Breaker("openai (m)", 1800.0, clock)
        admission = Admission(Limits(concurrency=64), breaker, clock)
        assert calls_in(admission.capacity, clock, 1.0) == 64
        for _ in range(40):
            ticket = Ticket()
            admission.enter_now(ticket)
            admission.failed(ticket, fails(500))
        assert breaker.open
        clock.now += 60.0
        probe = Ticket()
        await admission.enter(probe)
        admission.succeeded(probe)
        return breaker.open, calls_in(admission.capacity, clock, 0.04) < 13

    assert asyncio.run(work()) == (False, True)


def test_some_overloads_are_accidents_and_most_are_not(clock: Hands) -> None:
    capacity, dice = Capacity(64, clock), random.Random(0)
    for _ in range(5000):
        clock.now += 0.02
        if dice.random() < 0.3:
            capacity.overloaded(Ticket(sent_at=clock.now - 0.5))
        else:
            capacity.answered()
    assert capacity.size() == 64
    for _ in range(100):
        capacity.overloaded(Ticket(sent_at=clock.now - 0.5))
    assert capacity.size() == 44  # once for calls of one time
    for _ in range(1000):
        clock.now += 1.0
        capacity.overloaded(Ticket(sent_at=clock.now - 0.5))
    assert capacity.size() == 1  # and never none


class Server:
    """Lets in `rate` calls a second, saves up `burst` of them, and answers after `latency`."""

    def __init__(self, clock: Hands, rate: float, burst: float = 1.0, latency: float = 0.1) -> None:
        self.clock, self.rate, self.burst, self.latency = clock, rate, burst, latency
        self.level, self.at = burst, clock.now
        self.slots = 1000
        self.let_in, self.turned_away = 0, 0
        self.under_way: list[tuple[float, bool, Ticket]] = []

    def lets_in(self) -> bool:
        now = self.clock.now
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1.0 or sum(fine for _, fine, _ in self.under_way) >= self.slots:
            return False
        self.level -= 1.0
        return True

    def serve(self, capacity: Capacity, seconds: float) -> None:
        """Ask as fast as the capacity allows; a refusal comes back after 5 ms."""
        end, clock = self.clock.now + seconds, self.clock
        while clock.now < end:
            ends = min((at for at, _, _ in self.under_way), default=math.inf)
            wait = capacity.wait(len(self.under_way))
            if clock.now + wait < ends:
                clock.now += wait
                ticket = Ticket(sent_at=clock.now)
                capacity.sent(ticket, len(self.under_way))
                fine = self.lets_in()
                self.let_in, self.turned_away = self.let_in + fine, self.turned_away + (not fine)
                took = self.latency if fine else 0.005
                self.under_way.append((clock.now + took, fine, ticket))
                continue
            clock.now = max(clock.now, ends)
            one = min(self.under_way, key=lambda call: call[0])
            self.under_way.remove(one)
            if one[1]:
                capacity.answered()
            else:
                capacity.refused(one[2], len(self.under_way))


def test_the_pace_is_learned_from_refusals(clock: Hands) -> None:
    """After a while nearly all that a server allows is used, and few calls are refused."""
    missed = []
    for rate, burst in ((50.0, 20.0), (50.0, 1.0), (5.0, 1.0), (10.0, 200.0)):
        capacity, server = Capacity(128, clock), Server(clock, rate, burst)
        server.serve(capacity, 60.0)
        server.let_in = server.turned_away = 0
        server.serve(capacity, 60.0)
        used, refused = server.let_in / (60.0 * rate), server.turned_away / server.let_in
        if used < 0.85 or refused > 0.1:
            missed.append((rate, burst, used, refused))
    assert missed == []


def test_the_pace_follows_a_server_that_changes(clock: Hands) -> None:
    capacity, server = Capacity(128, clock), Server(clock, 50.0, 20.0)
    server.serve(capacity, 20.0)
    assert 40.0 < capacity.rate < 65.0
    server.rate = 25.0
    server.serve(capacity, 20.0)
    assert 20.0 < capacity.rate < 35.0
    server.rate = 100.0
    server.serve(capacity, 20.0)
    assert 80.0 < capacity.rate < 130.0


def test_the_slots_are_learned_from_refusals(clock: Hands) -> None:
    for slots in (4, 16, 64):
        capacity, server = Capacity(128, clock), Server(clock, 1e6, 1e6, latency=0.5)
        server.slots = slots
        server.serve(capacity, 10.0)
        assert slots <= capacity.size() <= slots + 1
        assert server.let_in > 0.95 * 20 * slots
        assert server.turned_away < 0.2 * server.let_in
        server.slots = 2 * slots if slots < 64 else 32
        server.serve(capacity, 60.0)
        assert 0.9 * server.slots <= capacity.size() <= server.slots + 1


def test_refusals_that_do_not_follow_the_pace_are_noise(clock: Hands) -> None:
    class Moody(Server):
        dice = random.Random(1)

        def lets_in(self) -> bool:
            return self.dice.random() > 0.4

    server = Moody(clock, 1.0)
    server.serve(Capacity(32, clock), 60.0)
    assert server.let_in > 60.0 * 100.0  # of 60 x 320


def test_an_idle_minute_teaches_nothing(clock: Hands) -> None:
    capacity, server = Capacity(128, clock), Server(clock, 50.0, 20.0)
    server.serve(capacity, 20.0)
    before = capacity.rate
    clock.now += 60.0
    for _, fine, ticket in server.under_way:
        capacity.answered() if fine else capacity.refused(ticket, 0)
    server.under_way.clear()
    capacity.idle()
    clock.now += 600.0
    refused = server.turned_away
    server.serve(capacity, 5.0)
    assert capacity.rate == pytest.approx(before, rel=0.5)
    assert server.turned_away - refused < 20
