"""Admission on a clock that the tests move: caps, pauses, and what each failure changes."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from ppo_cli.rewards.remote.admission import Admission
from ppo_cli.rewards.remote.breaker import Breaker
from ppo_cli.rewards.remote.failures import Failure, RemoteError
from ppo_cli.rewards.remote.limits import (
    FIRST_WINDOW,
    AdaptiveWindow,
    Limits,
    QueueSlot,
    RateLimiter,
)
from tests.judge_server.clients import ManualClock
from tests.settings import complete_judge


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def admission_of(clock: ManualClock, **limits: int) -> Admission:
    return Admission(Limits(**limits), Breaker("The judge", "m", 1800.0, clock), clock)  # type: ignore[arg-type]


def failure(status: int | None, cause: str = "", retry_after: float | None = None) -> RemoteError:
    cause = cause or f"http_{status}"
    return RemoteError(Failure.RETRYABLE, cause, "no", status=status, retry_after=retry_after)


def test_limits_come_from_the_settings() -> None:
    settings = complete_judge(
        timeout=7.0, concurrency=5, max_rpm=30, max_tpm=900, hedge_after=2.0, outage_wait=50.0
    )
    assert Limits.of(settings) == Limits(5, 30, 900, 7.0, 21.0, 2.0, 50.0)
    assert Limits.of(complete_judge(timeout=7.0, deadline=8.0)).deadline == 8.0


def test_a_rate_limiter_spreads_units_and_corrects_estimates(clock: ManualClock) -> None:
    limiter, times = RateLimiter(10.0, clock), []
    for _ in range(50):
        clock.now += limiter.wait()
        limiter.consume()
        times.append(clock.now)
    assert times[-1] - times[0] == pytest.approx(4.9)
    before = limiter.wait()
    limiter.correct(-0.5)
    assert limiter.wait() == pytest.approx(before - 0.05)
    clock.now += 1000.0
    burst = 0
    while limiter.wait() == 0.0:
        limiter.consume()
        burst += 1
    assert burst <= 4


@pytest.mark.parametrize(
    ("limits", "expected", "used", "at_once"),
    [
        ({"max_tpm": 6000}, 1000, 100, True), ({"max_tpm": 6000}, 100, 1000, False),
        ({"max_rpm": 60}, 0, 0, True), ({"max_rpm": 20}, 0, 0, False),
    ],
)  # fmt: skip
def test_caps_count_the_tokens_used_and_not_those_expected(
    clock: ManualClock, limits: dict[str, int], expected: int, used: int, at_once: bool
) -> None:
    async def enter_twice() -> bool:
        admission = admission_of(clock, **limits)
        clock.now += 10.0
        first, second = QueueSlot(tokens=expected), QueueSlot(tokens=expected)
        await admission.enter(first)
        admission.succeeded(first, tokens=used)
        clock.now += 1.0
        waiting = asyncio.ensure_future(admission.enter(second))
        await asyncio.sleep(0)
        entered = waiting.done()
        admission.close("over")
        await asyncio.gather(waiting, return_exceptions=True)
        return entered

    assert asyncio.run(enter_twice()) is at_once


@pytest.mark.parametrize(
    ("limits", "tokens", "calls"),
    [({"max_rpm": 30}, 0, 30), ({"max_rpm": 600}, 0, 600), ({"max_tpm": 60_000}, 100, 600)],
)
def test_no_minute_has_more_calls_than_its_cap(
    clock: ManualClock, limits: dict[str, int], tokens: int, calls: int
) -> None:
    """Calls wait all the time, and sometimes the event loop is late."""
    dice, sent = random.Random(1), list[float]()

    async def run_three_minutes() -> None:
        admission = admission_of(clock, concurrency=10**4, **limits)

        async def send() -> None:
            slot = QueueSlot(tokens=tokens)
            await admission.enter(slot)
            sent.append(clock.now)
            admission.succeeded(slot, tokens=tokens)

        tasks = [asyncio.ensure_future(send()) for _ in range(4 * calls)]
        began = clock.now
        while clock.now < began + 180.0:
            await asyncio.sleep(0)
            clock.now += 0.2 if dice.random() < 0.02 else 0.02
            admission.pump()
        admission.close("over")
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run_three_minutes())
    minutes = [sum(start <= at < start + 60.0 for at in sent) for start in sent[: 2 * calls]]
    assert 0.95 * calls <= max(minutes) <= calls


CALM, SLOW = ((8, True), (8, True)), ((8, True), (5, True))
REFUSED = ((7, False), (1, False))


@pytest.mark.parametrize(
    ("status", "cause", "after_one_and_seven"),
    [
        (429, "", REFUSED), (529, "", REFUSED), (503, "", ((8, False), (5, False))),
        (408, "", SLOW), (504, "", SLOW), (None, "timeout", SLOW), (500, "", CALM),
        (None, "connection", CALM),
    ],
)  # fmt: skip
def test_what_each_failure_changes(
    clock: ManualClock, status: int | None, cause: str, after_one_and_seven: object
) -> None:
    """The window, and whether a hedged call may leave, after 1 and 7 failures of 8 calls."""

    def fail(times: int) -> tuple[int, bool]:
        admission = admission_of(clock, concurrency=8)
        slots = [QueueSlot() for _ in range(8)]
        for slot in slots:
            admission.admit(slot)
        clock.now += 0.5
        for slot in slots[:times]:
            admission.failed(slot, failure(status, cause))
        return admission.window.size, admission.allows_hedge()

    assert (fail(1), fail(7)) == after_one_and_seven


def test_a_later_failure_does_not_end_a_requested_pause(clock: ManualClock) -> None:
    async def fail_twice() -> list[bool]:
        admission = admission_of(clock, concurrency=8)
        first, second = QueueSlot(), QueueSlot()
        for slot in (first, second):
            await admission.enter(slot)
        admission.failed(first, failure(429, retry_after=30.0))
        clock.now += 1.0
        admission.failed(second, failure(500))
        waiting = asyncio.ensure_future(admission.enter(QueueSlot()))
        entered = []
        for _ in range(2):
            clock.now += 20.0
            admission.pump()
            await asyncio.sleep(0.01)
            entered.append(waiting.done())
        admission.close("over")
        await asyncio.gather(waiting, return_exceptions=True)
        return entered

    assert asyncio.run(fail_twice()) == [False, True]


def test_a_rate_limit_becomes_an_outage_after_half_a_minute(clock: ManualClock) -> None:
    admission = admission_of(clock, concurrency=8)
    opened = []
    for _ in range(60):
        clock.now += 1.0
        admission.admit(slot := QueueSlot())
        admission.failed(slot, failure(429))
        opened.append(admission.breaker.open)
    assert not any(opened[:30]) and opened[-1]


def test_after_an_outage_the_window_starts_small_again(clock: ManualClock) -> None:
    async def go_down_and_up() -> int:
        admission = admission_of(clock, concurrency=64)
        admission.window.size = 64
        for _ in range(40):
            slot = QueueSlot()
            await admission.enter(slot)
            admission.failed(slot, failure(500))
        assert admission.breaker.open
        clock.now += 60.0
        await admission.enter(slot := QueueSlot())
        admission.succeeded(slot)
        assert not admission.breaker.open
        return admission.window.size

    assert asyncio.run(go_down_and_up()) == FIRST_WINDOW


def grow(window: AdaptiveWindow, clock: ManualClock, seconds: float) -> int:
    """Let calls leave whenever the full window allows it; return how often it grew."""
    size, end = window.size, clock.now + seconds
    while clock.now < end and window.wait(window.size) < float("inf"):
        clock.now += max(0.001, window.wait(window.size))
        window.sent(window.size)
    return window.size - size


def test_the_window_grows_to_its_limit_while_nothing_is_refused(clock: ManualClock) -> None:
    window = AdaptiveWindow(64, clock)
    assert (window.size, AdaptiveWindow(4, clock).size) == (FIRST_WINDOW, 4)
    assert grow(window, clock, 0.1) < 64 - FIRST_WINDOW
    grow(window, clock, 1.0)
    assert window.size == 64 and window.wait(63) == 0.0


def test_a_refusal_narrows_the_window_and_slows_its_growth(clock: ManualClock) -> None:
    window = AdaptiveWindow(10**6, clock)
    quick = grow(window, clock, 1.0)
    sent_at = clock.now
    for _ in range(8):  # those that left before the pause grew do not make it longer
        clock.now += 0.01
        window.refused(sent_at, 20)
    assert window.size == 20
    window.answered()
    slower = grow(window, clock, 1.0)
    for _ in range(8):
        clock.now += 0.01
        window.refused(clock.now, 20)
    window.answered()
    assert quick > slower > 1.5 * grow(window, clock, 1.0) > 0


def test_an_empty_quota_is_tried_ever_more_rarely(clock: ManualClock) -> None:
    window, times = AdaptiveWindow(64, clock), []
    began = clock.now
    while clock.now < began + 60.0:
        clock.now += max(0.01, window.wait(0))
        window.sent(0)
        times.append(clock.now)
        window.refused(clock.now, 0)
    gaps = [b - a for a, b in pairwise(times)]
    assert 5.0 < max(gaps) < 7.0 and len(times) < 100
    window.answered()
    assert window.wait(window.size) <= 0.2


def test_some_overloads_are_accidents_and_most_are_not(clock: ManualClock) -> None:
    window, dice = AdaptiveWindow(64, clock), random.Random(0)
    window.size = 64
    for _ in range(5000):
        clock.now += 0.02
        if dice.random() < 0.3:
            window.overloaded(clock.now - 0.5)
        else:
            window.answered()
    assert window.size == 64
    for _ in range(200):
        clock.now += 0.02
        window.overloaded(clock.now - 0.5)
    assert 1 <= window.size < 32
    assert grow(window, clock, 3.0) <= 4
