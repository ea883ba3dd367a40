"""Rollouts made by hand, and reward files written for one test."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.records import FinishReason, Prompt, Rollout
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.registry import build_reward

MakeRollout = Callable[..., Rollout]


@pytest.fixture
def rollout() -> MakeRollout:
    def make(
        text: str,
        ground_truth: Any = "72",
        data_source: str = "openai/gsm8k",
        finish_reason: FinishReason = "stop",
        **extra_info: Any,
    ) -> Rollout:
        question = "How many clips did Natalia sell?"
        prompt = Prompt("0", question, (), question, (1,), data_source, ground_truth, extra_info)
        return Rollout(prompt, 0, (1,), np.zeros(1, np.float32), text, finish_reason)

    return make


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Write a reward file and return its path."""

    def write(text: str, name: str = "my_reward.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def build() -> Iterator[Callable[..., Reward]]:
    """Build rewards from settings; all of them are closed in the end."""
    built: list[Reward] = []

    def make(sources: set[str] | None = None, **settings: Any) -> Reward:
        built.append(build_reward(RewardSettings(**settings), sources=sources or set()))
        return built[-1]

    yield make
    for reward in built:
        reward.close()
