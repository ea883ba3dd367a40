"""Rollouts made by hand, and a way to score a round of them with any reward, as the loop does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ppo_cli.records import FinishReason, Prompt, Rollout, Score
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
