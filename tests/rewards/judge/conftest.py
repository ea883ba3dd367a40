"""A loopback judge for each test, and rewards that ask it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.reward import JudgeReward
from tests.judge_server import JudgeServer
from tests.judge_server.asking import KEYS, WIRES
from tests.settings import complete_judge


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    import openai  # noqa: F401  # it takes a second, which no call should pay for

    with JudgeServer(seed=2) as running:  # dice without a long row of sixes
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[VerdictCache]:
    cache = VerdictCache(tmp_path / "judge.sqlite")
    yield cache
    cache.close()


@pytest.fixture
def judge_of(server: JudgeServer, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Build rewards that ask the server over a wire; all of them are closed in the end."""
    rewards: list[JudgeReward] = []

    def build(
        wire: str = "openai",
        *,
        kind: Callable[..., Any] = JudgeReward,
        name: str = "judge",
        environ: dict[str, str] | None = None,
        **changes: Any,
    ) -> Any:
        usual = {
            "enable": True, "type": WIRES[wire], "model": "judge-1", "base_url": server.url(wire),
            "cache": str(tmp_path / "c.sqlite"), "canary_every": 0,
            "noise_responses": 0,
        }  # fmt: skip
        keys = KEYS | {"OTHER_KEY": "k2"} | (environ or {})
        rewards.append(kind(complete_judge(**(usual | changes)), name=name, environ=keys))
        return rewards[-1]

    yield build
    for reward in rewards:
        reward.close()
