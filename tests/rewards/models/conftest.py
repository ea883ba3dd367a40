"""Products as in a fresh process, and rewards around small models that are closed in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ppo_cli.engine.cpu.products import set_matmul_library
from ppo_cli.rewards.base import InProcess
from ppo_cli.rewards.models.base import LoadedModel
from ppo_cli.rewards.models.local import LocalModelReward
from tests.rewards.models.rounds import Answering
from tests.rewards.models.tiny import loaded
from tests.settings import complete_reward_model


@pytest.fixture(autouse=True)
def _products_as_in_a_fresh_process() -> None:
    """An engine that other tests had in this process may have left them to oneDNN."""
    set_matmul_library("blas")


@pytest.fixture
def reward_of() -> Iterator[Callable[..., LocalModelReward]]:
    """Build rewards around a model, or around a network that answers by a function."""
    with ExitStack() as stack:

        def make(
            model: LoadedModel | None = None, *, host: Any = InProcess, answer: Any = None,
            kind: str = "llama3", name: str = "model", max_length: int = 512, **settings: Any,
        ) -> LocalModelReward:  # fmt: skip
            network = answer and Answering(answer)
            chosen = model or loaded(kind, network=network, max_length=max_length)
            fields = complete_reward_model(path="made/model", **{"self_test": "off", **settings})
            reward = LocalModelReward(fields, name=name, load=lambda _: chosen, host=host)
            stack.callback(reward.close)
            return reward

        yield make
