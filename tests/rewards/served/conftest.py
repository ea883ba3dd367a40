"""A reward server on loopback, rewards that ask it, and rollouts made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.served import client
from ppo_cli.rewards.served.reward import ServedModelReward
from tests.reward_server import RewardServer

PATHS = {"vllm": "/classify", "openrlhf": "/get_reward", "rerank": "/rerank"}
SECRET = "loopback-secret-0123456789"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses: what is tested is what happens, not how long it takes."""
    monkeypatch.setattr(client, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(client, "LONGEST_BACKOFF_S", 0.02)
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(client, "FIRST_ANSWER_S", 0.1)


class Bench:
    """A reward server on loopback, rewards that ask it, and rollouts made by hand."""

    def __init__(self, server: RewardServer) -> None:
        self.server = server
        self.made: list[ServedModelReward] = []

    def make(self, wire: str = "vllm", *, name: str = "model", **changes: Any) -> ServedModelReward:
        usual: dict[str, Any] = {"path": self.server.url(PATHS[wire]), "timeout": 5.0}
        settings = ModelReward(**(usual | changes))
        self.made.append(ServedModelReward(settings, name=name, environ={"MY_KEY": SECRET}))
        return self.made[-1]

    def prompt(self, number: int = 0, **changes: Any) -> Prompt:
        text = f"What is {number} + 1?"
        known: dict[str, Any] = {
            "text": text, "messages": ({"role": "user", "content": text},),
            "rendered": f"<|im_start|>user\n{text}<|im_end|>\n", "token_ids": (1,),
            "ground_truth": str(number + 1),
        }  # fmt: skip
        return Prompt(str(number), **(known | changes))

    def rollout(
        self, number: int, text: str | None = None, sample: int = 0, **more: Any
    ) -> Rollout:
        said = f"It is {number + 1}." if text is None else text
        asked = self.prompt(number, **more)
        return Rollout(asked, sample, (1,), np.zeros(1, np.float32), said, "stop")

    def score_all(self, reward: ServedModelReward, rollouts: list[Rollout]) -> list[Score]:
        futures = [reward.submit(rollout) for rollout in rollouts]
        reward.end_round()
        return [future.result(25) for future in futures]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with RewardServer() as server:
        bench = Bench(server)
        yield bench
        for each in bench.made:
            each.close()
