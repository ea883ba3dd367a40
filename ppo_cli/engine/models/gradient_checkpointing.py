"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): a block keeps its inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ppo_cli.errors import ModelError


def checkpoint_blocks(model: Any) -> None:
    """Recompute each block in the backward pass, and keep only its inputs until then.

    transformers' own switch works only in training mode, where dropout, skipped layers and
    routers are random. Raises ModelError for a model without blocks.
    """
    for block in find_blocks(model, "model.enable_gradient_checkpointing"):
        block.forward = partial(_recompute, block.forward)


def find_blocks(model: Any, setting: str) -> list[nn.Module]:
    """Return the outermost repeated blocks of a model; ModelError names the `setting` without."""
    names = set(model._no_split_modules or ())  # of models that come with their own code
    blocks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names
    ]
    if not blocks:
        raise ModelError(
            f"The blocks of this {model.config.model_type} model are not known, which {setting} "
            f"needs: add {setting}=false to the command."
        )
    # An outer block computes the inner ones again.
    inner = {name for name in blocks if any(name.startswith(f"{other}.") for other in blocks)}
    return [model.get_submodule(name) for name in blocks if name not in inner]


def _recompute(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # In evaluation mode nothing is drawn at random: there is no generator to put back.
    return checkpoint(
        partial(forward, *args, **kwargs), use_reentrant=False, preserve_rng_state=False
    )
