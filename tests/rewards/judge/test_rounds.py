"""What becomes of responses without a verdict: held back, asked again, masked, or a stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.rounds import FailurePolicy, JudgingRound, PendingScore
from ppo_cli.rewards.remote.failures import Failure

Answer = Callable[[int, int], "float | Failure"]  # (row, how often asked before)


def rollout(row: int) -> Rollout:
    prompt = Prompt(str(row), "q", (), "q", ())
    return Rollout(prompt, 0, (1, 2), np.zeros(2, np.float32), "r", "stop")


def play(
    rules: FailurePolicy, rows: int, answer: Answer, *, up: bool = False
) -> tuple[list[Any], list[int]]:
    """Scores (or what was raised) of a step, and how often each row was asked."""
    asked = [0] * rows

    async def judge(entry: PendingScore) -> None:
        row = int(entry.rollout.prompt.uid)
        told = answer(row, asked[row])
        asked[row] += 1
        await asyncio.sleep(0)
        if isinstance(told, Failure):
            entry.error = JudgeError(told, told.value, "no luck")
        else:
            entry.future.set_result(Score(told))

    async def step() -> list[Any]:
        loop = asyncio.get_running_loop()

        async def witness() -> bool:
            return up

        round_ = JudgingRound(rules, judge, witness)
        for row in range(rows):
            entry, done = PendingScore(rollout(row)), concurrent.futures.Future[None]()
            round_.add(entry, done)
            task = loop.create_task(judge(entry))
            task.add_done_callback(lambda _, done=done: done.set_result(None))
        await round_.finish()
        return [e.future.exception() or e.future.result() for e in round_.entries]

    return asyncio.run(step()), asked


def rules(**changes: Any) -> FailurePolicy:
    return FailurePolicy(
        **{"on_failure": "mask", "max_failure_rate": 0.2, "outage_wait": 30.0} | changes
    )


def values(scores: list[Any]) -> list[float | None]:
    return [s.value for s in scores]


def test_a_few_failures_are_masked_and_asked_no_more() -> None:
    scores, asked = play(rules(), 10, lambda row, _: Failure.RETRYABLE if row < 2 else 0.5)
    assert values(scores) == [None, None] + [0.5] * 8
    assert asked == [1] * 10
    assert scores[0].failure == "retryable: no luck"


def test_a_mean_of_the_step_on_wish() -> None:
    policy = rules(on_failure="batch_mean")
    scores, _ = play(policy, 5, lambda row, _: Failure.REFUSED if row == 0 else row / 4)
    assert scores[0].value == pytest.approx((0.25 + 0.5 + 0.75 + 1.0) / 4)
    assert scores[0].imputed.startswith("refused")


def test_a_mean_needs_somebody_to_take_it_from() -> None:
    policy = rules(on_failure="batch_mean", max_failure_rate=1.0)
    scores, _ = play(policy, 3, lambda row, _: Failure.REFUSED)
    assert values(scores) == [None] * 3


def test_stop_means_stop() -> None:
    scores, _ = play(
        rules(on_failure="stop"), 10, lambda row, _: Failure.UNPARSED if row == 3 else 1.0
    )
    assert isinstance(scores[3], Interrupted) and "1 of 10" in str(scores[3])
    assert values(scores[:3]) == [1.0] * 3


def test_too_many_failures_are_asked_again_and_nothing_finished_is() -> None:
    scores, asked = play(
        rules(), 10, lambda row, before: Failure.RETRYABLE if row < 5 and before == 0 else 0.5
    )
    assert values(scores) == [0.5] * 10
    assert asked == [2] * 5 + [1] * 5


def test_while_it_waits_one_at_a_time_is_tried() -> None:
    order: list[int] = []
    told: list[str] = []
    policy = rules()

    def answer(row: int, before: int) -> float | Failure:
        order.append(row)
        told.append(policy.waiting_message or "")
        return Failure.RETRYABLE if len(order) < 6 else 1.0

    scores, _ = play(policy, 4, answer)
    assert values(scores) == [1.0] * 4
    assert order[:6] == [0, 1, 2, 3, 0, 1]  # all once, then one after another
    assert told[3] == told[6] == "" and policy.waiting_message is None
    assert told[4].startswith("4 of 4 responses got no verdict (retryable 4): calls stop")
    assert "new attempt in 1 s" in told[4] and "new attempt in 2 s" in told[5]


def test_an_outage_that_does_not_end_stops_the_run_with_what_was_scored() -> None:
    policy = rules(outage_wait=0.05)
    scores, _ = play(policy, 4, lambda row, _: 1.0 if row == 0 else Failure.RETRYABLE)
    assert scores[0].value == 1.0
    assert all(isinstance(s, Interrupted) for s in scores[1:])
    assert "3 of 4" in str(scores[1]) and "--rm_outage_wait" in str(scores[1])
    assert policy.waiting_message is None


def test_one_or_two_texts_are_never_the_judges_trouble() -> None:
    scores, asked = play(rules(), 4, lambda row, _: Failure.RETRYABLE if row < 2 else 1.0)
    assert values(scores) == [None, None, 1.0, 1.0] and asked == [1] * 4
    scores, _ = play(
        rules(max_failure_rate=0.0, outage_wait=0.01),
        9, lambda row, _: Failure.RETRYABLE if row < 1 else 1.0,
    )  # fmt: skip
    assert isinstance(scores[0], Interrupted)  # unless none at all is allowed


def test_too_many_refusals_stop_the_run_and_are_not_asked_again() -> None:
    scores, asked = play(rules(), 8, lambda row, _: Failure.REFUSED if row < 4 else 1.0)
    assert all(isinstance(s, Interrupted) for s in scores[:4])
    assert "refused 4" in str(scores[0]) and "--rm_max_failure_rate" in str(scores[0])
    assert asked == [1] * 8


def test_too_many_unreadable_answers_are_asked_for_once_more() -> None:
    scores, asked = play(
        rules(), 8, lambda row, before: Failure.UNPARSED if row < 4 and before == 0 else 1.0
    )
    assert values(scores) == [1.0] * 8 and asked == [2] * 4 + [1] * 4


def test_texts_that_fail_while_others_pass_are_not_waited_for() -> None:
    """Four stubborn texts and one that only stumbled: three tries tell them apart."""

    def answer(row: int, before: int) -> float | Failure:
        stumbles = row == 4 and before < 1
        return Failure.RETRYABLE if row < 4 or stumbles else 1.0

    policy = rules(outage_wait=1e6, max_failure_rate=0.3)
    scores, asked = play(policy, 12, answer, up=True)
    assert all(isinstance(s, Interrupted) for s in scores[:4]) and max(asked) <= 8
    assert values(scores[4:]) == [1.0] * 8


def test_a_stop_of_one_is_a_stop_of_all() -> None:
    async def step() -> list[Any]:
        async def judge(entry: PendingScore) -> None:
            if entry.rollout.prompt.uid == "0":
                entry.future.set_exception(Interrupted("the budget is used up"))
            else:
                entry.error = JudgeError(Failure.RETRYABLE, "timeout", "slow")

        async def witness() -> bool:
            return False

        round_ = JudgingRound(rules(), judge, witness)
        for row in range(3):
            entry, done = PendingScore(rollout(row)), concurrent.futures.Future[None]()
            round_.add(entry, done)
            await judge(entry)
            done.set_result(None)
        await round_.finish()
        return [e.future.exception() for e in round_.entries]

    assert [str(e) for e in asyncio.run(step())] == ["the budget is used up"] * 3
