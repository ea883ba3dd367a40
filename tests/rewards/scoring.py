"""Rollouts made by hand, and a way to score a round of them with any reward, as the loop does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ppo_cli.records import FinishReason, Prompt, Rollout, Score, Turn
from ppo_cli.rewards.base import Reward, RoundKind


def make_rollout(
    text: str,
    ground_truth: Any = "72",
    data_source: str = "openai/gsm8k",
    finish_reason: FinishReason = "stop",
    **extra_info: Any,
) -> Rollout:
    question = "How many clips did Natalia sell?"
    prompt = Prompt("0", question, (), question, (1,), data_source, ground_truth, extra_info)
    return Rollout(prompt, 0, (1,), np.zeros(1, np.float32), text, finish_reason)


def rollouts_of(*texts: str, n: int = 1) -> list[Rollout]:
    """Return rollouts of one token a character, `n` to a prompt."""
    prompts = [Prompt(f"p{i // n:04d}", "", (), "", (1,)) for i in range(len(texts))]
    rollouts = []
    for i, text in enumerate(texts):
        ids, logprobs = tuple(range(len(text))), np.zeros(len(text), np.float32)
        rollouts.append(Rollout(prompts[i], i % n, ids, logprobs, text, "stop"))
    return rollouts


def score_all(
    reward: Reward, rollouts: Sequence[Rollout], kind: RoundKind = "train", seconds: float = 300.0
) -> list[Score]:
    futures = [reward.submit(rollout) for rollout in rollouts]
    reward.end_round(kind)
    return [future.result(seconds) for future in futures]


def sum_prompt(number: int, **changes: Any) -> Prompt:
    """A prompt that asks for a number and one more."""
    text = f"What is {number} + 1?"
    fields: dict[str, Any] = {
        "text": text, "messages": ({"role": "user", "content": text},), "rendered": text,
        "token_ids": (1,), "ground_truth": str(number + 1),
    }  # fmt: skip
    return Prompt(str(number), **(fields | changes))


def sum_rollout(
    number: int, response: str | None = None, sample: int = 0, **changes: Any
) -> Rollout:
    """A response to that prompt, the right one unless another one is given."""
    text = f"It is {number + 1}." if response is None else response
    prompt, logprobs = sum_prompt(number, **changes), np.zeros(1, np.float32)
    return Rollout(prompt, sample, (1,), logprobs, text, "stop")


def number_of(user: str) -> int:
    """The number that a request asks about."""
    return int(user.split("What is ")[1].split(" +")[0])


def sum_episode(
    number: int, result: str = "2", answer: str | None = None, thought: str = "", sample: int = 0
) -> Rollout:
    """Two turns for the prompt of `sum_rollout`: a call of the tool `add`, then the answer."""
    rollout = sum_rollout(number, answer, sample)
    function = {"name": "add", "arguments": {"a": number, "b": 1}}
    calls = {
        "role": "assistant", "content": "Let me add.", "reasoning_content": thought,
        "tool_calls": [{"id": "c0", "type": "function", "function": function}],
    }  # fmt: skip
    tool = {"role": "tool", "tool_call_id": "c0", "content": result}
    turns = (
        Turn(0, 4, "Let me add.", calls, (tool,), {"form": 0.25}, 0.5, (("add", 0.5),)),
        Turn(9, 12, rollout.text, {"role": "assistant", "content": rollout.text}),
    )
    return replace(
        rollout, token_ids=tuple(range(12)), sampler_logprobs=np.zeros(12, np.float32), turns=turns
    )
