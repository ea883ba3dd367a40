"""How a small model is trained in the checks of spread ones, and how two trainings compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.ranks import Ranks, sum_over_ranks
from ppo_cli.engine.sharding.tensors import gather_copy
from ppo_cli.engine.training.optimizer import Optimizer
from tests.engine.packed_steps import build_optimizer

FLOAT32 = Compute(torch.device("cpu"), torch.float32)
BFLOAT16 = Compute(torch.device("cpu"), torch.bfloat16)
STEPS, ROWS, LENGTH = 3, 7, 12
CaseReport = dict[str, Any]


@dataclass
class TrainedModel:
    """What is left of a training."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    optimizer: Optimizer
    model: Policy | ValueModel


def rows(step: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(5, vocabulary, (ROWS, LENGTH), generator=generator)


def policy_loss(policy: Policy, ids_BL: Tensor) -> Tensor:
    def view(ids_BL: Tensor) -> tuple[Tensor, ...]:
        hidden = policy.hidden_BLH(ids_BL)[:, :-1].flatten(0, 1)
        return gather_logprobs_entropy(hidden, policy.head, ids_BL[:, 1:].flatten(), 1.0, 8)

    logprobs_N, entropy_N = policy.run(view, ids_BL)
    return -(logprobs_N + 0.01 * entropy_N).sum() / (ROWS * (LENGTH - 1))


def value_loss(value_model: ValueModel, ids_BL: Tensor) -> Tensor:
    def value(ids_BL: Tensor) -> tuple[Tensor, ...]:
        return (value_model.values_BL(ids_BL),)

    (values_BL,) = value_model.run(value, ids_BL)
    assert values_BL.dtype == torch.float32
    return ((values_BL - ids_BL / 100) ** 2).sum() / (ROWS * LENGTH)


def train(
    model: Any, ranks: Ranks, compute: Compute = FLOAT32, *, spoilt: bool = False
) -> TrainedModel:
    """A few AdamW steps, two micro-batches each; `spoilt` puts a NaN into one rank's loss."""
    loss_of = policy_loss if isinstance(model, Policy) else value_loss
    optimizer = build_optimizer(
        model.model, Optim(lr=1e-3, eps=1e-6), total_steps=STEPS, grad_clip=0.5, ranks=ranks
    )
    vocabulary = min(200, model.model.config.vocab_size)
    losses, norms = [], []
    for step in range(STEPS):
        own_rows = rows(step, vocabulary)[ranks.data_rank :: ranks.data_size]
        total = 0.0
        with model.awake():
            for part, last in ((own_rows[:2], False), (own_rows[2:], True)):
                model.weights_context.sync_gradients(last)
                with compute.autocast():
                    loss = loss_of(model, part) if len(part) else loss_of(model, own_rows[:1]) * 0
                if spoilt and ranks.rank == ranks.size - 1:
                    loss = loss * torch.nan
                loss.backward()
                total += loss.item()
            losses.append(sum_over_ranks(ranks, total) / ranks.tensor_size)
            norm, stepped = optimizer.apply()
        assert stepped is not spoilt
        norms.append(norm)
    parameters = {n: gather_copy(p) for n, p in model.model.named_parameters()}
    moments = {n: gather_copy(m) for n, m in optimizer.moments().items()}
    return TrainedModel(losses, norms, parameters, moments, optimizer, model)


def gap(first: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert list(first) == list(other), (list(first)[:5], list(other)[:5])
    assert all(first[n].shape == other[n].shape and first[n].isfinite().all() for n in first)
    return max((first[n] - other[n]).abs().max().item() for n in first)


def compare(spread: TrainedModel, alone: TrainedModel | None) -> CaseReport:
    """How far apart two trainings ended; every rank tells its own norms."""
    if alone is None:
        return {"norms": spread.norms}
    return {
        "norms": spread.norms,
        "loss": max(abs(a - b) for a, b in zip(spread.losses, alone.losses, strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(spread.norms, alone.norms, strict=True)),
        "parameters": gap(spread.parameters, alone.parameters),
        "moments": gap(spread.moments, alone.moments),
        "learned": alone.losses[0] - alone.losses[-1],
    }
