"""Sampling ahead: which weights a round has, what waits for what, and how errors come out."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ppo_cli.engine.async_rollout import AheadEngine, Round
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import ModelError, WorkerLost
from tests.engine.ahead_runs import PROMPTS, Run, SmallEngine, fail_with
from tests.waiting import wait_until

Start = Callable[..., Run]


def version_of(logprob: float) -> int:
    """The version of the weights that a token of the small engine was drawn under."""
    return round(-1 / float(logprob)) - 2


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_rounds_are_as_old_as_was_asked_and_no_older(start: Start, steps: int) -> None:
    run = start(steps).train(8)
    assert [t.staleness for t in run.trained] == [min(i, steps) for i in range(8)]
    assert run.inner.rounds_drawn == 8  # none twice, and none past the end


@pytest.mark.parametrize(("steps", "partial"), [(1, 3), (2, 3), (3, 2), (2, 1)])
def test_a_response_gets_so_many_tokens_between_two_publishes(
    start: Start, steps: int, partial: int
) -> None:
    run = start(steps, partial).train(8)
    assert [t.staleness for t in run.trained] == [min(i, steps) for i in range(8)]
    carried = 0
    for trained in run.trained:
        present = trained.step - 1  # the publishes before it
        oldest = present - trained.staleness
        for _, ids, logprobs, _, _, before in trained.rollouts:
            drawn_under = [version_of(logprob) for logprob in np.frombuffer(logprobs, np.float32)]
            # As many tokens under each version as it may get, the rest under the present one.
            under = [min(oldest + i // partial, present) for i in range(len(ids))]
            assert drawn_under == under
            assert before == sum(version < under[-1] for version in under)
            carried += before > 0
    assert carried > 10


def test_under_weights_that_stay_it_does_not_matter_where_a_response_paused(start: Start) -> None:
    def train(partial: int | None) -> list[list[tuple[Any, ...]]]:
        run = start(2, partial)
        run.inner.step = lambda minibatch: {}  # type: ignore[method-assign]
        return [[(r[0], r[1], r[3], r[4]) for r in t.rollouts] for t in run.train(6).trained]

    assert train(3) == train(None)


def test_publish_does_not_wait_for_the_long_ones(start: Start) -> None:
    run = start(2, 3).train(3)
    batch = run.begin_step()
    run.end_step(batch)
    rounds = run.engine._rounds  # type: ignore[attr-defined]
    lengths = [{len(r.token_ids) for r in round_.unfinished} for round_ in rounds]
    assert lengths == [{6}, {3}]  # of the next step, and of the one after it
    run.inner.calls.clear()
    run.begin_step()
    # What is left of the round is sampled at once, then the others go on together.
    wait_until(lambda: run.inner.calls.count("annotate") == 1 and not run.inner.is_sampling)
    assert sorted(run.inner.calls) == ["annotate", "generate 1005", "generate 1006"]


def test_what_was_carried_over_outlasts_an_error(start: Start) -> None:
    run = start(2, 3).train(3)
    before = {r.key: r.token_ids for r in run.engine._rounds[1].rollouts}  # type: ignore[attr-defined]

    def fail_in_background() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise WorkerLost("sampler 0")

    run.inner.pause = fail_in_background
    batch = run.begin_step()
    with pytest.raises(WorkerLost):
        run.engine.publish()
    run.inner.pause = lambda: None
    run.end_step(batch)
    run.train(1)
    trained_ids = {key: ids for key, ids, *_ in run.trained[-1].rollouts}
    assert all(trained_ids[key][: len(ids)] == ids for key, ids in before.items())


@pytest.mark.parametrize(("steps", "partial"), [(1, None), (2, None), (1, 3), (3, 2)])
def test_the_clock_decides_nothing(start: Start, steps: int, partial: int | None) -> None:
    def slowly(seed: int) -> Run:
        run, chance = start(steps, partial), random.Random(seed)
        run.inner.pause = lambda: time.sleep(chance.choice([0, 0, 0.004]))
        step = run.inner.step
        run.inner.step = lambda m: (time.sleep(chance.choice([0, 0.02])), step(m))[1]  # type: ignore[method-assign]
        return run.train(6)

    quick = start(steps, partial).train(6)
    for seed in range(3):
        run = slowly(seed)
        assert run.trained == quick.trained
        assert run.inner.weights == quick.inner.weights


def test_steps_do_not_wait_for_the_round_but_publish_does(start: Start) -> None:
    run = start(1).train(1)
    run.inner.calls.clear()
    batch, event = run.begin_step_and_hold()
    in_steps: list[bool] = []
    step = run.inner.step

    def note(minibatch: Any) -> Any:
        in_steps.append(run.inner.is_sampling)
        if len(in_steps) == 2:
            threading.Timer(0.2, event.set).start()
        return step(minibatch)

    run.inner.step = note  # type: ignore[method-assign]
    run.end_step(batch)
    assert in_steps == [True, True] and event.is_set()
    assert sorted(run.inner.calls[:2]) == ["annotate", "generate 1003"]
    assert run.inner.calls[2:] == ["step", "step", "publish"]


def test_validations_and_baselines_are_sampled_at_once_and_alone(start: Start) -> None:
    run = start(2)
    run.inner.pause = lambda: time.sleep(0.001)
    run.train(6, validate=True, baselines=True)
    calls = [call for call in run.inner.calls if call.startswith("generate")]
    assert calls[:6] == [
        "generate 1001", "generate 2001", "generate 1002", "generate 1003", "generate 3000",
        "generate 2002",
    ]  # fmt: skip
    assert [t.staleness for t in run.trained] == [0, 1, 2, 2, 2, 2]


def test_validations_see_the_newest_weights(start: Start) -> None:
    run = start(2)
    run.validate()
    for version in (1, 2, 3):
        run.train(1)
        assert {r.weight_version for r in run.validate()} == {version}


def test_what_is_sampled_in_the_middle_of_a_step_waits_for_the_round(start: Start) -> None:
    run = start(1).train(1)
    _, event = run.begin_step_and_hold()
    threading.Timer(0.1, event.set).start()
    assert len(run.validate()) == 4
    assert run.inner.calls[-1] == "generate 3000"


def test_rows_of_the_same_words_are_not_taken_for_each_other() -> None:
    round_ = Round(PROMPTS[:2], Sampling(seed=1), begun_at=0)
    assert round_.matches(list(PROMPTS[:2]), Sampling(seed=1))
    assert not round_.matches(PROMPTS[:2], Sampling(seed=2))
    twin, other_words = replace(PROMPTS[1], uid="row:77"), replace(PROMPTS[1], token_ids=(1, 99))
    for prompts in (
        PROMPTS[1::-1], PROMPTS[:1], [PROMPTS[0], twin], [PROMPTS[0], other_words],
    ):  # fmt: skip
        assert not round_.matches(prompts, Sampling(seed=1))


@pytest.mark.parametrize(
    "error", [ModelError("no such token"), WorkerLost("sampler 0 on node b"), KeyError("bug")]
)
def test_what_goes_wrong_in_the_background_comes_out_once_and_as_itself(
    start: Start, error: Exception
) -> None:
    run = start(1).train(1)
    run.inner.pause = fail_with(error)
    batch = run.begin_step()
    with pytest.raises(type(error)) as caught:
        run.end_step(batch)
    assert caught.value is error
    assert run.inner.calls[-1] == "step"
    run.engine.publish()
    assert run.inner.calls[-1] == "publish"


def test_an_error_comes_out_when_something_else_is_sampled(start: Start) -> None:
    run = start(1).train(1)
    run.inner.pause = fail_with(WorkerLost("sampler 0"))
    run.begin_step()
    with pytest.raises(WorkerLost):
        run.validate()


def test_a_round_that_failed_is_sampled_anew(start: Start) -> None:
    run, calm = start(1).train(1), start(1).train(4)
    run.inner.pause = fail_with(WorkerLost("sampler 0"))
    batch = run.begin_step()
    with pytest.raises(WorkerLost):
        run.engine.publish()
    run.inner.pause = lambda: None
    run.end_step(batch)
    run.train(2)
    # The third round was lost, so it was drawn after the publish, and is fresh.
    assert [t.staleness for t in run.trained] == [0, 1, 0, 1]
    assert run.trained[:2] == calm.trained[:2]


def test_a_sampler_that_missed_a_publish_is_noticed(start: Start) -> None:
    run = start(1).train(2)
    run.inner.version -= 1
    with pytest.raises(AssertionError, match="weights 1 after 2 publishes"):
        run.validate()


def test_closed_in_the_middle_of_a_round(start: Start) -> None:
    run = start(1).train(1)
    run.begin_step_and_hold()
    started = time.monotonic()
    run.close()
    run.close()
    assert time.monotonic() - started < 30
    assert not run.inner.is_sampling and run.inner.closed.is_set()


def test_a_round_under_way_stops_at_its_next_rollout(start: Start) -> None:
    run = start(1).train(1)
    run.inner.pause = lambda: time.sleep(0.05)
    run.begin_step()
    wait_until(lambda: run.inner.is_sampling)
    run.close()
    assert run.inner.rounds_drawn == 2 and not run.inner.is_sampling


def test_at_least_one_step_ahead() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        AheadEngine(SmallEngine(), lambda ahead: None, 0)
