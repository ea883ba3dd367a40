"""The brakes on calls, on a clock that the tests move."""

from __future__ import annotations

import asyncio
import random

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.rewards.judge.calls import Failure, JudgeError
from ppo_cli.rewards.remote.breaker import Admission, Breaker
from ppo_cli.rewards.remote.limits import FIRST_WINDOW, Capacity, Limits, Spacing, Ticket
from tests.judge_server.clients import Hands


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


@pytest.mark.parametrize(
    ("limits", "tokens", "most"),
    [
        (Limits(concurrency=10**4, max_rpm=30), 0, 30),
        (Limits(concurrency=10**4, max_rpm=600), 0, 600),
        (Limits(concurrency=10**4, max_tpm=60_000), 100, 600),
    ],
)
def test_no_minute_has_more_calls_than_its_cap(
    clock: Hands, limits: Limits, tokens: int, most: int
) -> None:
    """Calls wait all the time, and now and then the loop that lets them go is late."""
    dice, sent = random.Random(1), list[float]()

    async def work() -> None:
        admission = Admission(limits, Breaker("openai (m)", 1800.0, clock), clock)

        async def send() -> None:
            ticket = Ticket(tokens=tokens)
            await admission.enter(ticket)
            sent.append(clock.now)
            admission.succeeded(ticket, used=tokens)

        tasks = [asyncio.ensure_future(send()) for _ in range(4 * most)]
        began = clock.now
        while clock.now < began + 180.0:
            await asyncio.sleep(0)
            clock.now += 0.2 if dice.random() < 0.02 else 0.02
            admission.pump()
        admission.close("over")
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    minutes = [sum(start <= moment < start + 60.0 for moment in sent) for start in sent[: 2 * most]]
    assert 0.95 * most <= max(minutes) <= most


def fails(what: int | str) -> JudgeError:
    """A failure that may pass: a status, or none and its cause."""
    status = what if isinstance(what, int) else None
    return JudgeError(
        Failure.RETRYABLE, f"http_{what}" if status else str(what), "no", status=status
    )


def test_what_each_failure_teaches(clock: Hands) -> None:
    """After one failure and after seven of seven: calls under way, a pace, room for a second call.

    A plain "too many" sets the pace at once, an overload narrows when most calls end so.
    """
    refused, calm = (8, True, False), (8, False, True)
    expected = {429: (refused, refused), 529: (refused, refused)}
    expected |= {503: ((8, False, False), (5, False, False))}
    expected |= dict.fromkeys((408, 504, "timeout"), (calm, (5, False, True)))
    expected |= dict.fromkeys((500, 502, "connection"), (calm, calm))

    def taught(what: int | str, times: int) -> tuple[int, bool, bool]:
        admission = Admission(Limits(concurrency=8), Breaker("m", 1800.0, clock), clock)
        tickets = [Ticket() for _ in range(times)]
        for ticket in tickets:
            admission.admit(ticket)
        clock.now += 0.5
        for ticket in tickets:
            admission.failed(ticket, fails(what))
        return admission.capacity.size(), not admission.capacity.ramping, admission.room()

    assert {what: (taught(what, 1), taught(what, 7)) for what in expected} == expected


def test_a_later_failure_does_not_end_a_pause_that_was_asked_for(clock: Hands) -> None:
    async def work() -> list[bool]:
        admission = Admission(Limits(concurrency=8), Breaker("m", 1800.0, clock), clock)
        first, second = Ticket(), Ticket()
        for ticket in (first, second):
            await admission.enter(ticket)
        asked = JudgeError(Failure.RETRYABLE, "http_429", "no", status=429, retry_after=30.0)
        admission.failed(first, asked)
        clock.now += 1.0
        admission.failed(second, fails(500))
        waiting = asyncio.ensure_future(admission.enter(Ticket()))
        entered = []
        for later in (20.0, 20.0):
            clock.now += later
            admission.leave(Ticket())  # whoever leaves looks whether others may go
            await asyncio.sleep(0.01)
            entered.append(waiting.done())
        admission.close("over")
        await asyncio.gather(waiting, return_exceptions=True)
        return entered

    assert asyncio.run(work()) == [False, True]


def test_after_an_outage_the_window_opens_from_its_start_again(clock: Hands) -> None:
    async def work() -> tuple[int, int, int]:
        breaker = Breaker("openai (m)", 1800.0, clock)
        admission = Admission(Limits(concurrency=64), breaker, clock)
        admission.capacity.sent(Ticket())
        clock.now += 10.0
        before = admission.capacity.size()
        for _ in range(40):
            ticket = Ticket()
            await admission.enter(ticket)
            admission.failed(ticket, fails(500))
        assert breaker.open
        clock.now += 60.0
        probe = Ticket()
        await admission.enter(probe)
        admission.succeeded(probe)
        assert not breaker.open
        at_once = admission.capacity.size()
        await admission.enter(Ticket())
        clock.now += 10.0
        return before, at_once, admission.capacity.size()

    assert asyncio.run(work()) == (64, FIRST_WINDOW, 64)


def test_window_opens_by_itself_while_nothing_objects(clock: Hands) -> None:
    capacity = Capacity(64, clock)
    clock.now += 10.0
    assert capacity.size() == FIRST_WINDOW
    capacity.sent(Ticket())
    clock.now += 0.06
    assert FIRST_WINDOW < capacity.size() < 64
    clock.now += 0.5
    assert capacity.size() == 64


def test_some_overloads_are_accidents_and_most_are_not(clock: Hands) -> None:
    capacity, dice = Capacity(64, clock), random.Random(0)
    capacity.sent(Ticket())
    clock.now += 1.0
    for _ in range(5000):
        clock.now += 0.02
        if dice.random() < 0.3:
            capacity.overloaded(clock.now - 0.5)
        else:
            capacity.answered(Ticket(), waiting=True)
    assert capacity.size() == 64
    for _ in range(200):
        clock.now += 0.02
        capacity.overloaded(clock.now - 0.5)
    narrow = capacity.size()
    assert 1 <= narrow < 32
    for _ in range(1000):
        capacity.answered(Ticket(), waiting=False)
    assert capacity.size() == narrow
    for _ in range(narrow + 1):
        capacity.answered(Ticket(), waiting=True)
    assert narrow < capacity.size() <= narrow + 2


def refuse_one(capacity: Capacity, clock: Hands) -> Ticket:
    """Fifty calls a second, of which the last is refused."""
    for _ in range(50):
        clock.now += 0.02
        capacity.sent(ticket := Ticket())
    capacity.refused(ticket)
    return ticket


def test_an_idle_minute_teaches_nothing(clock: Hands) -> None:
    capacity = Capacity(64, clock)
    refuse_one(capacity, clock)
    before = capacity.rate
    assert before == pytest.approx(50.0, rel=0.1)
    capacity.idle()
    clock.now += 60.0
    refuse_one(capacity, clock)
    assert capacity.rate == pytest.approx(before, rel=0.1)


def test_late_refusals_do_not_count_twice(clock: Hands) -> None:
    capacity = Capacity(64, clock)
    late = [Ticket() for _ in range(30)]
    for ticket in late:
        capacity.sent(ticket)
    refuse_one(capacity, clock)
    before = capacity.rate
    clock.now += 1.0
    for ticket in late:
        capacity.refused(ticket)
    assert capacity.rate == before


def test_a_refusal_that_asks_for_little_is_no_outage_before_long(clock: Hands) -> None:
    """Not while others are answered; after half a minute without an answer it is."""
    breaker = Breaker("openai (m)", 1800.0, clock)
    admission = Admission(Limits(concurrency=8), breaker, clock)
    opened = []
    for _ in range(60):
        clock.now += 1.0
        admission.admit(ticket := Ticket())
        admission.failed(ticket, fails(429))
        opened.append(breaker.open)
    assert not any(opened[:30])
    assert opened[-1]
