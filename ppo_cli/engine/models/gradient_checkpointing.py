"""Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174): a block keeps its inputs alone."""

from __future__ import annotations

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
    names = set(model._no_split_modules or ())  # of models that come with their own code
    blocks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in names
    ]
    if not blocks:
        raise ModelError(
            f"Gradient checkpointing does not know the blocks of this {model.config.model_type} "
            "model: add model.enable_gradient_checkpointing=false to the command."
        )
    for name in blocks:
        # An outer block computes the inner ones again.
        if not any(name.startswith(f"{other}.") for other in blocks):
            block = model.get_submodule(name)
            block.forward = partial(_recompute, block)


def _recompute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = partial(type(block).forward, block, *args, **kwargs)
    if not torch.is_grad_enabled():
        return forward()
    # In evaluation mode nothing is drawn at random: there is no generator to put back.
    return checkpoint(forward, use_reentrant=False, preserve_rng_state=False)
