"""What becomes of responses without a verdict: asked again, masked, imputed, or a stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.judge.calls import JudgeError
from ppo_cli.rewards.judge.rounds import FailurePolicy, JudgingRound, PendingScore
from ppo_cli.rewards.remote.failures import Failure
from tests.rewards.virtual_time import VirtualLoop

Answer = Callable[[int, int], "float | Failure | Exception"]  # (row, number of earlier calls)
RETRYABLE, REFUSED, UNPARSED = Failure.RETRYABLE, Failure.REFUSED, Failure.UNPARSED


def policy(**changes: Any) -> FailurePolicy:
    usual = {"on_failure": "mask", "max_failure_rate": 0.2, "outage_wait": 30.0}
    return FailurePolicy(**usual | changes)


def play(
    rules: FailurePolicy, rows: int, answer: Answer, *, up: bool = False
) -> tuple[list[Any], list[int]]:
    """Return the scores of a step (or what was raised), and how often each row was asked."""
    calls = [0] * rows

    async def judge(entry: PendingScore) -> None:
        row = int(entry.rollout.prompt.uid)
        outcome = answer(row, calls[row])
        calls[row] += 1
        await asyncio.sleep(0)
        if isinstance(outcome, Failure):
            entry.error = JudgeError(outcome, outcome.value, "no luck")
        elif isinstance(outcome, Exception):
            entry.future.set_exception(outcome)
        else:
            entry.future.set_result(Score(outcome))

    async def step() -> list[Any]:
        async def check_judge() -> bool:
            return up

        round_ = JudgingRound(rules, judge, check_judge, lambda score, rollout: score)
        for row in range(rows):
            prompt = Prompt(str(row), "q", (), "q", ())
            entry = PendingScore(Rollout(prompt, 0, (1,), np.zeros(1, np.float32), "r", "stop"))
            done = concurrent.futures.Future[None]()
            round_.add(entry, done)
            task = asyncio.get_running_loop().create_task(judge(entry))
            task.add_done_callback(lambda _, done=done: done.set_result(None))
        await round_.finish()
        return [e.future.exception() or e.future.result() for e in round_.entries]

    loop = VirtualLoop()
    with pytest.MonkeyPatch.context() as patch, closing(loop):
        patch.setattr("time.monotonic", loop.time)
        return loop.run_until_complete(step()), calls


MEAN = {"on_failure": "batch_mean"}


@pytest.mark.parametrize(
    ("changes", "answers", "values", "calls"),
    [  # answers: one per call of each row, the last one from then on
        ({}, [[RETRYABLE]] * 2 + [[0.5]] * 8, [None] * 2 + [0.5] * 8, [1] * 10),
        (MEAN, [[REFUSED], [0.25], [0.5], [0.5], [1.0]], [0.5625, 0.25, 0.5, 0.5, 1.0], [1] * 5),
        (MEAN | {"max_failure_rate": 1.0}, [[REFUSED]] * 3, [None] * 3, [1] * 3),
        ({}, [[RETRYABLE, 0.5]] * 5 + [[0.5]] * 5, [0.5] * 10, [2] * 5 + [1] * 5),
        ({}, [[RETRYABLE]] * 2 + [[1.0]] * 2, [None, None, 1.0, 1.0], [1] * 4),
        ({}, [[UNPARSED, 1.0]] * 4 + [[1.0]] * 4, [1.0] * 8, [2] * 4 + [1] * 4),
    ],
    ids=["few masked", "mean", "no mean", "asked again", "two texts", "unreadable"],
)  # fmt: skip
def test_a_step_goes_on_with_scores(
    changes: dict[str, Any], answers: list[list[Any]], values: list[float | None], calls: list[int]
) -> None:
    def answer(row: int, before: int) -> float | Failure:
        outcome: float | Failure = answers[row][min(before, len(answers[row]) - 1)]
        return outcome

    scores, times = play(policy(**changes), len(answers), answer)
    assert [score.value for score in scores] == values and times == calls
    failures = {score.failure or score.imputed for score in scores} - {""}
    assert failures <= {"retryable: no luck", "refused: no luck"}


@pytest.mark.parametrize(
    ("changes", "failure", "failed", "rows", "fragments"),
    [
        ({"on_failure": "stop"}, UNPARSED, 1, 10, ["1 of 10", "stop"]),
        ({"outage_wait": 0.05}, RETRYABLE, 3, 4, ["3 of 4", "--rm_outage_wait"]),
        ({"max_failure_rate": 0.0, "outage_wait": 0.01}, RETRYABLE, 1, 9, ["1 of 9"]),
        ({}, REFUSED, 4, 8, ["refused 4", "--rm_max_failure_rate"]),
    ],
    ids=["on_failure", "outage", "none allowed", "refusals"],
)
def test_a_run_stops_with_what_was_scored(
    changes: dict[str, Any], failure: Failure, failed: int, rows: int, fragments: list[str]
) -> None:
    rules = policy(**changes)
    scores, calls = play(rules, rows, lambda row, _: failure if row < failed else 1.0)
    assert all(isinstance(score, Interrupted) for score in scores[:failed])
    assert [fragment for fragment in fragments if fragment not in str(scores[0])] == []
    assert [score.value for score in scores[failed:]] == [1.0] * (rows - failed)
    assert rules.waiting_message is None and (failure is not REFUSED or calls == [1] * rows)


def test_in_an_outage_one_entry_at_a_time_is_tried() -> None:
    order: list[int] = []
    messages: list[str] = []
    rules = policy()

    def answer(row: int, before: int) -> float | Failure:
        order.append(row)
        messages.append(rules.waiting_message or "")
        return RETRYABLE if len(order) < 6 else 1.0

    scores, _ = play(rules, 4, answer)
    assert [score.value for score in scores] == [1.0] * 4
    assert order[:6] == [0, 1, 2, 3, 0, 1]  # all once, then one after another
    assert messages[3] == messages[6] == "" and rules.waiting_message is None
    assert messages[4].startswith("4 of 4 responses got no verdict (retryable 4): calls stop")
    assert "new attempt in 1 s" in messages[4] and "new attempt in 2 s" in messages[5]


def test_texts_that_fail_while_others_pass_are_not_waited_for() -> None:
    """Four texts always fail and one fails once: three tries tell them apart."""

    def answer(row: int, before: int) -> float | Failure:
        return RETRYABLE if row < 4 or (row == 4 and before < 1) else 1.0

    scores, calls = play(policy(outage_wait=1e6, max_failure_rate=0.3), 12, answer, up=True)
    assert all(isinstance(score, Interrupted) for score in scores[:4]) and max(calls) <= 8
    assert [score.value for score in scores[4:]] == [1.0] * 8


def test_a_stop_of_one_entry_stops_all() -> None:
    stop = Interrupted("the budget is used up")
    scores, _ = play(policy(), 3, lambda row, _: stop if row == 0 else RETRYABLE)
    assert [str(score) for score in scores] == ["the budget is used up"] * 3
