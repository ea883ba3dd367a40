"""Rollouts to score, a network that answers as a test says, and a wait; for reward models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_cli.records import Prompt, Rollout
from ppo_cli.rewards.models.base import Scores


def rollout_of(index: int, response: str, question: str = "Is 17 a prime number?") -> Rollout:
    """One of two responses to prompt number `index // 2`."""
    messages = ({"role": "user", "content": question},)
    prompt = Prompt(
        f"row-{index // 2}", question, messages, question, (1,), ground_truth=str(index)
    )
    return Rollout(prompt, index % 2, (1,), np.zeros(1, np.float32), response, "stop")


def rollouts_of(count: int, seed: int = 3) -> list[Rollout]:
    """Responses and questions of different lengths."""
    draw = random.Random(seed)
    texts = ["".join(draw.choices("abc def. ", k=draw.randrange(1, 60))) for _ in range(count)]
    return [rollout_of(i, text, "Why? " * (i % 5 + 1)) for i, text in enumerate(texts)]


class Answering:
    """A network whose scores a function computes from the ids and the mask of a batch."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Scores]) -> None:
        self.module = torch.nn.Linear(1, 1)
        self._answer = answer

    def score(self, ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Any = None) -> Scores:
        return self._answer(ids_BL, mask_BL)
