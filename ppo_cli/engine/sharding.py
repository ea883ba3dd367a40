"""PROVISIONAL (alone only): the sharding helper replaces this file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppo_cli.engine.models import Policy, ValueModel, load_policy, load_value_model


def _place(model: Any, compute: Any, gradient_checkpointing: bool) -> None:
    model.to(compute.device)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )


def load_spread_policy(
    path: str, ranks: Any, sharding: Any, compute: Any, *, gradient_checkpointing: bool = False,
    **options: Any,
) -> Policy:
    policy = load_policy(path, **options)
    _place(policy.model, compute, gradient_checkpointing)
    return policy


def load_spread_value_model(
    path: str, ranks: Any, sharding: Any, compute: Any, *, gradient_checkpointing: bool = False,
    **options: Any,
) -> ValueModel:
    value_model = load_value_model(path, **options)
    _place(value_model.model, compute, gradient_checkpointing)
    return value_model


def full_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
