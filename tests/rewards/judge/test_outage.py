"""The breaker on a clock that the tests move."""

from __future__ import annotations

import random

import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.rewards.judge.exchange import Failure, JudgeError
from ppo_cli.rewards.judge.outage import Breaker


class Hands:
    """A clock's hands, moved by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


DOWN = JudgeError(Failure.RETRYABLE, "http_503", "overloaded", status=503)
DENIED = JudgeError(Failure.FATAL, "http_401", "bad key sk-abcdefghijklmnop", status=401)


def make(wait: float = 1800.0) -> tuple[Breaker, Hands]:
    clock = Hands()
    breaker = Breaker("openai (m)", wait, clock)
    breaker.sent()
    return breaker, clock


def open_by_failures(breaker: Breaker, clock: Hands) -> None:
    for _ in range(5):
        clock.now += 0.6
        breaker.failure(DOWN, window=1, probe=False)
    assert breaker.open


def test_a_row_of_failures_opens_it_after_two_seconds_or_when_it_is_long() -> None:
    breaker, clock = make()
    for _ in range(40):
        assert not breaker.open
        breaker.failure(DOWN, window=64, probe=False)
    assert breaker.open
    breaker, clock = make()
    for _ in range(30):
        breaker.failure(DOWN, window=64, probe=False)
    assert not breaker.open
    clock.now += 2.1
    breaker.failure(DOWN, window=64, probe=False)
    assert breaker.open


def test_one_at_a_time_needs_five_in_a_row() -> None:
    breaker, clock = make()
    for _ in range(4):
        clock.now += 5.0
        breaker.failure(DOWN, window=1, probe=False)
    assert not breaker.open
    breaker.failure(DOWN, window=1, probe=False)
    assert breaker.open


@pytest.mark.parametrize("per_second", [2000, 64])
def test_a_third_of_all_calls_failing_does_not_open_it(per_second: int) -> None:
    breaker, clock = make()
    dice = random.Random(3)
    for _ in range(50_000):
        clock.now += 1.0 / per_second
        if dice.random() < 0.33:
            breaker.failure(DOWN, window=64, probe=False)
        else:
            breaker.success()
        assert not breaker.open


def test_probes_come_ever_more_slowly_and_a_success_closes() -> None:
    breaker, clock = make()
    open_by_failures(breaker, clock)
    waits = []
    for _ in range(7):
        waits.append(breaker.next_probe - clock.now)
        clock.now = breaker.next_probe
        breaker.failure(DOWN, window=1, probe=True)
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0])
    assert breaker.success()
    assert not breaker.open
    assert breaker.open_seconds() == pytest.approx(61.0 + 30.0)
    assert breaker.sentence() is None


def test_a_probe_waits_as_long_as_the_judge_asks_for() -> None:
    breaker, clock = make()
    open_by_failures(breaker, clock)
    slow = JudgeError(Failure.RETRYABLE, "http_429", "later", status=429, retry_after=77.0)
    breaker.failure(slow, window=1, probe=True)
    assert breaker.next_probe == pytest.approx(clock.now + 77.0)


def test_late_answers_of_old_calls_do_not_count_as_probes() -> None:
    breaker, clock = make()
    open_by_failures(breaker, clock)
    before = breaker.next_probe
    for _ in range(50):
        breaker.failure(DOWN, window=1, probe=False)
    assert breaker.next_probe == before


def test_it_is_given_up_after_its_time_and_says_so() -> None:
    breaker, clock = make(wait=1800.0)
    open_by_failures(breaker, clock)
    told = breaker.sentence() or ""
    assert "http_503: overloaded" in told and "trying again in 1 s" in told and "30 min." in told
    clock.now += 1799.0
    assert not breaker.lapsed()
    clock.now += 2.0
    assert breaker.lapsed()
    assert isinstance(breaker.stop(), Interrupted)
    assert "did not answer for 1,800 s (last: http_503: overloaded)" in str(breaker.stop())


def test_without_patience_it_is_given_up_at_once() -> None:
    breaker, clock = make(wait=0.0)
    assert not breaker.lapsed()
    open_by_failures(breaker, clock)
    assert breaker.lapsed()


def test_a_fatal_answer_is_checked_three_times() -> None:
    breaker, clock = make(wait=0.0)
    breaker.success()
    breaker.failure(DENIED, window=64, probe=False)
    waits = []
    while not breaker.lapsed():
        assert breaker.suspects_fatal
        waits.append(breaker.next_probe - clock.now)
        clock.now = breaker.next_probe
        breaker.failure(DENIED, window=64, probe=True)
    assert waits == pytest.approx([1.0, 1.5, 2.5])
    assert "turns every call away" in breaker.gave_up and "Check the key" in breaker.gave_up
    assert "abcdefghijklmnop" not in breaker.gave_up


def test_a_fatal_hiccup_costs_nothing() -> None:
    breaker, clock = make()
    breaker.failure(DENIED, window=64, probe=False)
    for _ in range(20):
        breaker.failure(DENIED, window=64, probe=False)
    clock.now = breaker.next_probe
    assert breaker.success()
    assert not breaker.open and not breaker.lapsed()


def test_a_fatal_answer_that_turns_into_an_outage_is_waited_for() -> None:
    breaker, clock = make()
    breaker.failure(DENIED, window=1, probe=False)
    breaker.failure(DENIED, window=1, probe=True)
    breaker.failure(DOWN, window=1, probe=True)
    assert breaker.open and not breaker.suspects_fatal
    clock.now += 100.0
    assert not breaker.lapsed()
