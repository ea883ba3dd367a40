"""A reward server on loopback, rewards that ask it, and rollouts made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.rewards.models.served import ServedModelReward
from tests.reward_server import RewardServer
from tests.rewards.scoring import sum_rollout
from tests.settings import complete_reward_model

PATHS = {"vllm": "/classify", "openrlhf": "/get_reward"}
SECRET = "loopback-secret-0123456789"


@pytest.fixture(autouse=True)
def quick(short_waits: None) -> None:
    """All tests here."""


class Bench:
    """A reward server on loopback, rewards that ask it, and rollouts made by hand."""

    def __init__(self, server: RewardServer) -> None:
        self.server = server
        self.rewards: list[ServedModelReward] = []

    def make(self, wire: str = "vllm", *, name: str = "model", **changes: Any) -> ServedModelReward:
        usual: dict[str, Any] = {"path": self.server.url(PATHS[wire]), "timeout": 5.0}
        settings = complete_reward_model(**(usual | changes))
        self.rewards.append(ServedModelReward(settings, name=name, environ={"MY_KEY": SECRET}))
        return self.rewards[-1]

    def prompt(self, number: int = 0, **changes: Any) -> Prompt:
        return self.rollout(number, **changes).prompt

    def rollout(
        self, number: int, text: str | None = None, sample: int = 0, **changes: Any
    ) -> Rollout:
        rendered = f"<|im_start|>user\nWhat is {number} + 1?<|im_end|>\n"
        return sum_rollout(number, text, sample, **{"rendered": rendered} | changes)

    def submit_all(self, reward: ServedModelReward, rollouts: list[Rollout]) -> list[Future[Score]]:
        futures = [reward.submit(rollout) for rollout in rollouts]
        reward.end_round()
        return futures

    def score_all(self, reward: ServedModelReward, rollouts: list[Rollout]) -> list[Score]:
        return [future.result(25) for future in self.submit_all(reward, rollouts)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with RewardServer() as server:
        bench = Bench(server)
        yield bench
        for each in bench.rewards:
            each.close()
