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
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses: what is tested is what happens, not how long it takes."""
    for name, value in (
        ("client.FIRST_BACKOFF_S", 0.005), ("client.LONGEST_BACKOFF_S", 0.02),
        ("client.FIRST_POLL_S", 0.05), ("client.UNREACHABLE_S", 0.1), ("breaker.QUIET_S", 0.1),
        ("breaker.FIRST_WAIT_S", 0.05), ("breaker.CONFIRM_WAITS_S", (0.1, 0.15, 0.25)),
    ):  # fmt: skip
        monkeypatch.setattr(f"ppo_cli.rewards.remote.{name}", value)


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
