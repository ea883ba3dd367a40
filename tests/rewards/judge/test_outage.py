"""The breaker on a clock that the tests move."""

from __future__ import annotations

import random

import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.rewards.judge.calls import Failure, JudgeError, Question, Scale, Usage
from ppo_cli.rewards.remote.breaker import BadRequests, Breaker
from tests.judge_server.clients import Hands

DOWN = JudgeError(Failure.RETRYABLE, "http_503", "overloaded", status=503)
DENIED = JudgeError(
    Failure.FATAL, "http_401", "bad key\nsk-abcdefghijklmnop\nCheck the key.", status=401
)


def asks_for(seconds: float) -> JudgeError:
    told = "Slow down.\nMuch."
    return JudgeError(Failure.RETRYABLE, "http_429", told, status=429, retry_after=seconds)


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


def test_two_quiet_seconds_are_counted_from_the_last_answer() -> None:
    breaker, clock = make()
    clock.now += 60.0
    breaker.success()
    for _ in range(30):
        breaker.failure(DOWN, window=16, probe=False)
    assert not breaker.open


@pytest.mark.parametrize(("window", "row"), [(1, 5), (5, 5), (12, 12), (20, 20), (64, 20)])
def test_the_row_that_opens_it_is_as_long_as_the_window(window: int, row: int) -> None:
    breaker, clock = make()
    for _ in range(row - 1):
        clock.now += 1.0
        breaker.failure(DOWN, window=window, probe=False)
    assert not breaker.open
    breaker.failure(DOWN, window=window, probe=False)
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
    assert breaker.gave_up.endswith("every request (http_401: bad key ***). Check the key.")
    assert "abcdefghijklmnop" not in breaker.gave_up


def test_a_fatal_hiccup_costs_nothing() -> None:
    breaker, clock = make()
    breaker.failure(DENIED, window=64, probe=False)
    for _ in range(20):
        breaker.failure(DENIED, window=64, probe=False)
    clock.now = breaker.next_probe
    assert breaker.success()
    assert not breaker.open and not breaker.lapsed()


def test_each_fatal_answer_gets_all_its_checks() -> None:
    breaker, clock = make()
    for _ in range(2):
        breaker.failure(DENIED, window=64, probe=False)
        for _ in range(2):
            clock.now = breaker.next_probe
            breaker.failure(DENIED, window=64, probe=True)
        assert not breaker.lapsed() and not breaker.gave_up
        assert breaker.success()


def test_a_fatal_answer_that_turns_into_an_outage_is_waited_for() -> None:
    breaker, clock = make()
    breaker.failure(DENIED, window=1, probe=False)
    breaker.failure(DENIED, window=1, probe=True)
    breaker.failure(DOWN, window=1, probe=True)
    assert breaker.open and not breaker.suspects_fatal
    clock.now += 100.0
    assert not breaker.lapsed()


@pytest.mark.parametrize("seconds", [31.0, 3600.0, 1e12, float("inf")])
def test_a_long_pause_is_an_outage_and_is_tried_once_more_before_the_end(seconds: float) -> None:
    breaker, clock = make(wait=100.0)
    breaker.failure(asks_for(seconds), window=64, probe=False)
    assert breaker.open
    assert breaker.short_pause(seconds) == 0.0
    assert breaker.next_probe == pytest.approx(clock.now + min(seconds, 90.0))
    tries = 0
    while not breaker.lapsed():
        assert clock.now < breaker.next_probe <= breaker.gives_up_at == 200.0
        clock.now = breaker.next_probe
        tries += 1
        breaker.failure(asks_for(seconds), window=64, probe=True)
    assert clock.now == 200.0
    assert tries <= 7
    assert "did not answer for 100 s and asked for a pause of" in breaker.gave_up
    assert "\n" not in breaker.gave_up


def test_a_short_pause_is_no_outage_and_ends_with_the_patience() -> None:
    breaker, _ = make(wait=5.0)
    breaker.failure(asks_for(30.0), window=64, probe=False)
    assert not breaker.open
    assert [breaker.short_pause(s) for s in (None, 0.0, 2.5, 30.0, 31.0)] == [0, 0, 2.5, 5.0, 0]
    assert make(wait=0.0)[0].short_pause(20.0) == 1.0


def test_the_sentence_tells_of_a_pause_that_was_asked_for() -> None:
    breaker, clock = make()
    breaker.failure(asks_for(3600.0), window=64, probe=False)
    clock.now += 10.0
    assert breaker.sentence() == (
        "The judge asked for a pause of 3,600 s (http_429: Slow down. Much.); "
        "trying again in 1,760 s, for up to 30 min. more."
    ).replace("Slow down. Much.", "Slow down.")
    clock.now = breaker.next_probe
    breaker.failure(DOWN, window=64, probe=True)
    assert "The judge does not answer (http_503" in (breaker.sentence() or "")


def refused(cause: str = "bad_request") -> JudgeError:
    return JudgeError(Failure.REFUSED, cause, "no", status=400, usage=Usage(3))


def text(n: int) -> Question:
    return Question("", str(n), str(n), Scale(1, 10))


def test_a_row_of_bad_requests_on_different_texts_is_no_matter_of_the_texts() -> None:
    row = BadRequests()
    votes = [Question("", f"{n} 7", "7", Scale(1, 10)) for n in range(9)]
    assert {row.weigh(refused(), vote).kind for vote in votes} == {Failure.REFUSED}
    row.answered()
    kinds = [row.weigh(refused(), text(n)).kind for n in (0, 0, 0, 0, 0, 1, 2, 3)]
    assert set(kinds) == {Failure.REFUSED}
    fifth = row.weigh(refused(), text(4))
    assert (fifth.kind, fifth.cause, fifth.status, fifth.usage) == (
        Failure.RETRYABLE, "bad_request", 400, Usage(3),
    )  # fmt: skip
    assert row.weigh(refused(), text(0)).kind is Failure.RETRYABLE
    assert row.weigh(refused("content_filter"), text(5)).kind is Failure.REFUSED
    row.answered()
    assert row.weigh(refused(), text(6)).kind is Failure.REFUSED
