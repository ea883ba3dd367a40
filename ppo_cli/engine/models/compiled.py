"""Compiled blocks: norms, rotations and activations of a block become a few fused kernels.

Each block is compiled alone, with lengths that may change: all layers share one compilation, and
hooks of FSDP2 and gradient checkpointing stay outside of it. Attention runs as it is, because the
boundaries of packed rows are read on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from transformers import AttentionInterface

from ppo_cli.engine.models.attention import BY_ROWS, attend_by_rows
from ppo_cli.engine.models.gradient_checkpointing import find_blocks
from ppo_cli.errors import ModelError, first_line

VARIANTS = 32
CACHES = ("past_key_values", "layer_past")


def compile_blocks(model: Any) -> None:
    """Compile each block of a model when it is first run; call it before `checkpoint_blocks`.

    Raises ModelError for a model without known blocks, and from a pass when a block does not
    compile on this machine.
    """
    # Trained, frozen and single rows, with and without gradients: beyond this number of variants
    # a block would run uncompiled.
    torch._dynamo.config.recompile_limit = VARIANTS
    AttentionInterface.register(BY_ROWS, torch.compiler.disable(attend_by_rows))
    for block in find_blocks(model, "model.compile_layers"):
        compiled = torch.compile(block.forward, dynamic=True)
        block.forward = partial(_run, block.forward, compiled)


def _run(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A sampler's cache grows with each token; families name it differently.
    if any(kwargs.get(name) is not None for name in CACHES):
        return plain(*args, **kwargs)
    try:
        return compiled(*args, **kwargs)
    except torch._dynamo.exc.TorchDynamoException as error:
        raise ModelError(
            f"The layers of this model do not compile on this machine ({first_line(error)}). Leave "
            "model.compile_layers out, or set it to false."
        ) from error
