"""The breaker on a clock that the tests move."""

from __future__ import annotations

import random

import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.rewards.remote.breaker import BadRequests, Breaker
from ppo_cli.rewards.remote.failures import Failure, RemoteError
from tests.judge_server.clients import ManualClock

DOWN = RemoteError(Failure.RETRYABLE, "http_503", "overloaded", status=503)
DENIED = RemoteError(
    Failure.FATAL, "http_401", "bad key\nsk-abcdefghijklmnop\nCheck the key.", status=401
)


def asks_for(seconds: float) -> RemoteError:
    message = "Slow down.\nMuch."
    return RemoteError(Failure.RETRYABLE, "http_429", message, status=429, retry_after=seconds)


class Bench:
    """A breaker, its clock, and failures that it is told of."""

    def __init__(self, wait: float = 1800.0, window: int = 64) -> None:
        self.clock, self.window = ManualClock(), window
        self.breaker = Breaker("The judge", "openai (m)", wait, self.clock)
        self.breaker.sent()

    def fail(self, times: int = 1, *, every: float = 0.0, error: RemoteError = DOWN) -> None:
        for _ in range(times):
            self.clock.now += every
            self.breaker.failure(error, window=self.window, probe=False)

    def probe(self, error: RemoteError = DOWN) -> float:
        """Wait for the next probe, which fails; return how long that was."""
        waited, self.clock.now = self.breaker.next_probe - self.clock.now, self.breaker.next_probe
        self.breaker.failure(error, window=self.window, probe=True)
        return waited


@pytest.fixture
def down() -> Bench:
    """A breaker that a row of failures has opened."""
    bench = Bench(window=1)
    bench.fail(5, every=0.6)
    assert bench.breaker.open
    return bench


@pytest.mark.parametrize(
    ("window", "row"), [(1, 5), (5, 5), (12, 12), (20, 20), (64, 20), (64, 40)]
)
def test_a_row_of_failures_opens_it_after_two_quiet_seconds_or_when_it_is_long(
    window: int, row: int
) -> None:
    bench = Bench(window=window)
    bench.fail(row - 1, every=0.0 if row == 40 else 1.0)
    assert not bench.breaker.open
    bench.fail(every=0.0 if row == 40 else 1.0)
    assert bench.breaker.open


def test_quiet_seconds_are_counted_from_the_last_answer() -> None:
    bench = Bench(window=16)
    bench.clock.now += 60.0
    bench.breaker.success()
    bench.fail(30)
    assert not bench.breaker.open


@pytest.mark.parametrize("per_second", [2000, 64])
def test_a_third_of_all_calls_failing_does_not_open_it(per_second: int) -> None:
    bench, dice = Bench(), random.Random(3)
    for _ in range(50_000):
        bench.clock.now += 1.0 / per_second
        if dice.random() < 0.33:
            bench.fail()
        else:
            bench.breaker.success()
        assert not bench.breaker.open


def test_probes_become_rarer_and_a_success_closes(down: Bench) -> None:
    waits = [down.probe() for _ in range(7)]
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0])
    assert down.breaker.success()
    assert not down.breaker.open and down.breaker.describe() is None
    assert down.breaker.open_seconds() == pytest.approx(91.0)


def test_a_probe_waits_as_long_as_the_service_asks(down: Bench) -> None:
    down.probe(asks_for(77.0))
    assert down.breaker.next_probe == pytest.approx(down.clock.now + 77.0)


def test_late_answers_of_old_calls_are_not_probes(down: Bench) -> None:
    before = down.breaker.next_probe
    down.fail(50)
    assert down.breaker.next_probe == before


def test_it_gives_up_after_its_time_and_says_so(down: Bench) -> None:
    sentence = down.breaker.describe() or ""
    assert "http_503: overloaded" in sentence and "trying again in 1 s, for up to 30" in sentence
    down.clock.now += 1799.0
    assert not down.breaker.has_given_up()
    down.clock.now += 2.0
    assert down.breaker.has_given_up()
    stop = down.breaker.stop_error()
    assert isinstance(stop, Interrupted)
    assert "did not answer for 1,800 s (last: http_503: overloaded)" in str(stop)
    impatient = Bench(wait=0.0, window=1)
    assert not impatient.breaker.has_given_up()
    impatient.fail(5, every=0.6)
    assert impatient.breaker.has_given_up()


def test_a_fatal_answer_is_confirmed_three_times() -> None:
    bench = Bench(wait=0.0)
    bench.breaker.success()
    bench.fail(error=DENIED)
    waits = []
    while not bench.breaker.has_given_up():
        assert bench.breaker.confirms_fatal
        waits.append(bench.probe(DENIED))
    assert waits == pytest.approx([1.0, 1.5, 2.5])
    reason = bench.breaker.stop_reason
    assert reason.endswith("every request (http_401: bad key ***). Check the key.")
    assert "abcdefghijklmnop" not in reason


def test_a_fatal_answer_that_is_not_confirmed_costs_nothing() -> None:
    bench = Bench()
    for _ in range(2):
        bench.fail(20, error=DENIED)
        bench.probe(DENIED)
        bench.probe(DENIED)
        assert not bench.breaker.has_given_up()
        assert bench.breaker.success() and not bench.breaker.open


def test_a_fatal_answer_that_turns_into_an_outage_is_waited_out() -> None:
    bench = Bench(window=1)
    bench.fail(error=DENIED)
    bench.probe(DENIED)
    bench.probe(DOWN)
    assert bench.breaker.open and not bench.breaker.confirms_fatal
    bench.clock.now += 100.0
    assert not bench.breaker.has_given_up()


@pytest.mark.parametrize("seconds", [31.0, 3600.0, 1e12, float("inf")])
def test_a_long_pause_is_an_outage_with_one_try_before_its_end(seconds: float) -> None:
    bench = Bench(wait=100.0)
    breaker = bench.breaker
    bench.fail(error=asks_for(seconds))
    assert breaker.open and breaker.short_pause(seconds) == 0.0
    assert breaker.next_probe == pytest.approx(bench.clock.now + min(seconds, 90.0))
    probes = 0
    while not breaker.has_given_up():
        assert bench.clock.now < breaker.next_probe <= breaker.gives_up_at == 200.0
        bench.probe(asks_for(seconds))
        probes += 1
    assert bench.clock.now == 200.0 and probes <= 7
    assert "for 100 s and asked for a pause of" in breaker.stop_reason
    assert "\n" not in breaker.stop_reason


def test_a_short_pause_is_not_an_outage_and_ends_with_the_patience() -> None:
    bench = Bench(wait=5.0)
    bench.fail(error=asks_for(30.0))
    assert not bench.breaker.open
    pauses = [bench.breaker.short_pause(s) for s in (None, 0.0, 2.5, 30.0, 31.0)]
    assert pauses == [0, 0, 2.5, 5.0, 0]
    assert Bench(wait=0.0).breaker.short_pause(20.0) == 1.0


def test_the_description_mentions_a_requested_pause() -> None:
    bench = Bench()
    bench.fail(error=asks_for(3600.0))
    bench.clock.now += 10.0
    assert bench.breaker.describe() == (
        "The judge asked for a pause of 3,600 s (http_429: Slow down.); "
        "trying again in 1,760 s, for up to 30 min more."
    )
    bench.probe()
    assert "The judge does not answer (http_503" in (bench.breaker.describe() or "")


def test_bad_requests_in_a_row_on_different_texts_are_an_outage() -> None:
    row = BadRequests()
    assert not any(row.is_outage("same") for _ in range(9))
    row.clear()
    assert not any(row.is_outage(text) for text in ("0", "0", "0", "1", "2", "3"))
    assert row.is_outage("4") and row.is_outage("0")
    row.clear()
    assert not row.is_outage("5")


@pytest.mark.parametrize(
    ("answered", "others", "seconds"), [(False, 500, 45), (True, 500, 1800), (False, 503, 1800)]
)
def test_nothing_but_status_500_is_an_outage_of_a_service_that_has_answered(
    answered: bool, others: int, seconds: float
) -> None:
    bench = Bench(window=1)
    if answered:
        bench.breaker.success()
    for status in (*[500] * 5, others):
        error = RemoteError(Failure.RETRYABLE, f"http_{status}", "no", status=status)
        bench.fail(every=0.6, error=error) if not bench.breaker.open else bench.probe(error)
    began = bench.breaker.gives_up_at - seconds
    assert began <= bench.clock.now < began + 5.0
    bench.clock.now = bench.breaker.gives_up_at
    assert bench.breaker.has_given_up()
