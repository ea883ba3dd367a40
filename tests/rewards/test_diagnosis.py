"""A reward of nothing is told with its likely cause and one example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_cli.records import Part, Rollout, Score, Scored
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.diagnosis import commands, explain_no_reward

MakeRollout = Callable[..., Rollout]
Build = Callable[..., Reward]


def judge(reward: Reward, *rollouts: Rollout) -> str | None:
    return explain_no_reward([Scored(r, reward.submit(r).result(60)) for r in rollouts])


def said(reward: Reward, *rollouts: Rollout) -> str:
    text = judge(reward, *rollouts)
    assert text is not None
    assert "\n" not in text
    return text


def test_silent_when_something_scored(build: Build, rollout: MakeRollout) -> None:
    assert judge(build(), rollout("#### 72"), rollout("#### 1")) is None
    assert explain_no_reward([]) is None


def test_extraction_that_found_nothing(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), rollout("It is 72."), rollout("72"), rollout("#### 71"))
    assert "extraction found nothing in 2 of 3 responses" in text
    assert "the rule gsm8k looks for `#### NUMBER`" in text
    assert "Ask for that form in the prompts" in text
    assert "response 'It is 72.', ground_truth '72', extracted nothing." in text
    assert "prompt 'How many clips did Natalia sell?'" in text


def test_responses_that_were_cut_off(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), *[rollout("thinking " * 200, finish_reason="length")] * 3)
    assert "3 of them were cut off at --max_response_length" in text
    assert len(text) < 1000


def test_a_ground_truth_of_another_kind(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), *[rollout("#### 72", "seventy-two")] * 2)
    assert "All 2 responses failed: ground_truth" in text
    assert "ground_truth 'seventy-two' is not a number" in text
    assert "ppo data check" in text


def test_a_ground_truth_that_is_a_whole_text(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), rollout("Paris", "word " * 40, "exact"))
    assert "likely because of the ground_truth" in text
    assert "a text rather than an answer" in text


def test_no_ground_truth_at_all(build: Build, rollout: MakeRollout) -> None:
    assert "the row has no ground_truth" in said(build(), rollout("#### 1", None))


def test_a_source_without_a_rule(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), rollout("1", "1", "mine"))
    assert "no rule for data_source 'mine'" in text
    assert "--reward_function" in text


def test_empty_responses(build: Build, rollout: MakeRollout) -> None:
    assert "2 of 2 responses are empty" in said(build(), rollout(""), rollout("\n"))


def test_plainly_wrong_answers(build: Build, rollout: MakeRollout) -> None:
    text = said(build(), rollout("#### 71"), rollout("#### 73"))
    assert "an answer was found in 2 of 2 responses: all are wrong" in text
    assert "extracted '71'" in text


def test_a_function_that_gives_zero_or_fails(rollout: MakeRollout) -> None:
    def text(score: Score) -> Any:
        return explain_no_reward([Scored(rollout("a"), score)])

    assert "The reward function gave 0 to all 1 responses" in text(Score(0.0))
    failed = text(Score.failed("raised KeyError: 'x'"))
    assert failed.startswith("All 1 responses failed with KeyError: 'x'. Correct the reward ")
    assert "raise reward.timeout" in text(Score.failed("timeout: took longer than 10 s"))


def test_failures_are_counted_by_their_cause(rollout: MakeRollout) -> None:
    reasons = ["raised KeyError: 'x'"] * 2 + ["timeout: took longer than 10 s"]
    scored = [Scored(rollout("a"), Score.failed(reason)) for reason in reasons]
    look = commands(Path("my run"), ["a b.jsonl"])
    told = explain_no_reward([*scored, Scored(rollout("b"), Score(0.0))], look)
    assert told is not None
    assert "3 of 4 responses failed, 2 of them with KeyError: 'x'." in told
    assert "`ppo show 'my run' --worst 20` names the failure" in told


def test_a_mixture_that_comes_to_nothing_names_the_parts_that_never_vary(
    rollout: MakeRollout,
) -> None:
    scored = [
        Scored(rollout(text), Score(0.0, parts={"model": Part(3.5, 0.0), "rule": Part(raw, 0.0)},
                                    mixture={"rule": Score(raw)}))
        for text, raw in (("7", 0.0), ("8", 1.0))
    ]  # fmt: skip
    told = explain_no_reward(scored)
    assert told is not None
    assert "The mixture is 0 for all 2 responses. Parts with one value for all of them: " in told
    assert "model (3.5)." in told
