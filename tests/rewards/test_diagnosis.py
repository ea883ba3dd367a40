"""A reward of nothing is told with its likely cause and one example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.records import Part, Rollout, Score, Scored
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.diagnosis import commands, explain_no_reward
from tests.rewards.scoring import make_rollout

Build = Callable[..., Reward]


def judge(reward: Reward, *rollouts: Rollout) -> str | None:
    return explain_no_reward([Scored(r, reward.submit(r).result(60)) for r in rollouts])


def explain(reward: Reward, *rollouts: Rollout) -> str:
    text = judge(reward, *rollouts)
    assert text is not None and "\n" not in text
    return text


def test_silent_when_something_scored(build: Build) -> None:
    assert judge(build(), make_rollout("#### 72"), make_rollout("#### 1")) is None
    assert explain_no_reward([]) is None


WORD = "word " * 40
CAUSES: dict[str, tuple[list[tuple[Any, ...]], list[str]]] = {
    "nothing extracted": (
        [("It is 72.",), ("72",), ("#### 71",)],
        ["extraction found nothing in 2 of 3 responses", "the rule gsm8k looks for `#### NUMBER`",
         "Ask for that form in the prompts", "prompt 'How many clips did Natalia sell?'",
         "response 'It is 72.', ground_truth '72', extracted nothing."],
    ),
    "truth of another kind": (
        [("#### 72", "seventy-two")] * 2,
        ["All 2 responses failed: ground_truth 'seventy-two' is not a number", "ppo data check"],
    ),
    "truth is a text": (
        [("Paris", WORD, "exact")], ["likely because of the ground_truth", "a text rather than"]
    ),
    "no truth": ([("#### 1", None)], ["the row has no ground_truth"]),
    "no rule": ([("1", "1", "mine")], ["no rule for data_source 'mine'", "--reward_function"]),
    "empty": ([("",), ("\n",)], ["2 of 2 responses are empty"]),
    "wrong": (
        [("#### 71",), ("#### 73",)],
        ["an answer was found in 2 of 2 responses: all are wrong", "extracted '71'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named(cause: str, build: Build) -> None:
    rows, fragments = CAUSES[cause]
    text = explain(build(), *[make_rollout(*row) for row in rows])
    assert [fragment for fragment in fragments if fragment not in text] == []


def test_responses_that_were_cut_off(build: Build) -> None:
    text = explain(build(), *[make_rollout("thinking " * 200, finish_reason="length")] * 3)
    assert "3 of them were cut off at --max_response_length" in text
    assert len(text) < 1000


def test_a_function_that_gives_zero_or_fails() -> None:
    def text(score: Score) -> Any:
        return explain_no_reward([Scored(make_rollout("a"), score)])

    assert "The reward function gave 0 to all 1 responses" in text(Score(0.0))
    failed = text(Score.failed("raised KeyError: 'x'"))
    assert failed.startswith("All 1 responses failed with KeyError: 'x'. Correct the reward ")
    assert "raise reward.timeout" in text(Score.failed("timeout: took longer than 10 s"))
    rollout, score = replace(make_rollout("a"), failure="raised X"), Score.failed("raised X")
    assert "Correct the environment" in str(explain_no_reward([Scored(rollout, score)]))


def test_failures_are_counted_by_their_cause() -> None:
    reasons = ["raised KeyError: 'x'"] * 2 + ["timeout: took longer than 10 s"]
    scored = [Scored(make_rollout("a"), Score.failed(reason)) for reason in reasons]
    look = commands(Path("my run"), ["a b.jsonl"])
    text = explain_no_reward([*scored, Scored(make_rollout("b"), Score(0.0))], look)
    assert text is not None
    assert "3 of 4 responses failed, 2 of them with KeyError: 'x'." in text
    assert "`ppo show 'my run' --worst 20` names the failure" in text


def test_a_mixture_that_comes_to_nothing_names_the_parts_that_never_vary() -> None:
    scored = []
    for raw in (0.0, 1.0):
        parts = {"model": Part(3.5, 0.0), "rule": Part(raw, 0.0)}
        score = Score(0.0, parts=parts, mixture={"model": Score(3.5), "rule": Score(raw)})
        scored.append(Scored(make_rollout(str(raw)), score))
    text = explain_no_reward(scored)
    assert text is not None
    assert "The mixture is 0 for all 2 responses. Parts with one value for all of them: " in text
    assert "model (3.5)." in text
    # An environment alone is no mixture, though its parts are counted as in one.
    alone = [
        Scored(s.rollout, replace(s.score, mixture={"environment": Score(0.0)})) for s in scored
    ]
    text = explain_no_reward(alone)
    assert text is not None and "mixture" not in text and "from environment alone" in text
