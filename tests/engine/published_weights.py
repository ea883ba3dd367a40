"""Weights as samplers get them in bfloat16: cast before ranks put them together, and after."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import Ranks
from ppo_cli.engine.sharding.tensors import gather_tensor
from tests.engine.packed_steps import settings


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank gives when tensors are put together."""

    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is done on pieces, below DTensors."""
        if DTensor in types:
            return NotImplemented
        if "all_gather" in func.name():
            self.sent += args[0].nbytes
        return func(*args, **(kwargs or {}))


def published(ranks: Ranks, path: str, lora_rank: int) -> list[int]:
    """Bytes that went when weights were cast after and before; the weights must be the same.

    An adapter is merged into them.
    """
    config = settings(
        model={"path": path, "lora_rank": lora_rank, "lora_merge": lora_rank > 0},
        algorithm={"adv_estimator": "grpo"}, actor={"use_kl_loss": False}, rollout={"n": 2},
    )  # fmt: skip
    learner = Learner(config, load_tokenizer(path), ranks, total_steps=1)
    for name, tensor in learner.policy.model.named_parameters():
        if "lora_" in name:  # half of them are zero at first
            tensor.data.add_(0.01)
    with Traffic() as traffic:
        after = {name: t.to(torch.bfloat16) for name, t in learner.published(gather_tensor)}
    with Traffic() as cast:
        pieces = learner.published(partial(gather_tensor, dtype=torch.bfloat16), gather_tensor)
        before = {name: t.to(torch.bfloat16) for name, t in pieces}
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in after)
    return [traffic.sent, cast.sent]
