"""Rollouts made by hand, reward files written for one test, and rewards that are closed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.records import Rollout
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.registry import build_reward
from tests.rewards.scoring import make_rollout


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    return make_rollout


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
    rewards: list[Reward] = []

    def make(sources: set[str] | None = None, **settings: Any) -> Reward:
        rewards.append(build_reward(RewardSettings(**settings), sources=sources or set()))
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.close()
