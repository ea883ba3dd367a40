"""Float32 weights that are trained while products round them to bfloat16.

A checkpoint in bfloat16 holds just those numbers that bfloat16 can hold. Each lies in the middle
of all that are rounded to it, so that an update moves no product until many of them add up to
half a gap: at a learning rate of 1e-5 that takes some twenty steps for a weight of 0.1. Spread
over what is rounded to them, the share of weights that cross a border in a step is the share of a
gap that the update is: products move by the update, on average, from the first step on
(docs/log.md). It is the idea of stochastic rounding (Gupta et al. 2015, arXiv 1502.02551), done
once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALF_GAP = 1 << 15  # of two bfloat16 numbers, in float32's last places
BLOCK = (1 << 20) + 7  # random numbers that are drawn; they repeat


@torch.no_grad()
def make_master_weights(model: nn.Module, compute: torch.dtype, seed: int) -> None:
    """Give trained weights memory of their own; spread those that products round to bfloat16.

    What products are given stays the same to the bit. Norms, biases and embeddings that are only
    looked up stay as they are, and so do weights of a float32 checkpoint.
    """
    multiplied = {
        id(held)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for held in module.parameters(recurse=False)
    }
    noise = torch.randint(
        1 - HALF_GAP, HALF_GAP, (BLOCK,), dtype=torch.int32,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    for held in model.parameters():
        if held.requires_grad and not held.is_meta:
            # What was read from a file is mapped: its pages would be copied in the first step.
            held.data = held.data.clone()
            if compute == torch.bfloat16 and held.ndim >= 2 and id(held) in multiplied:
                spread(held.data, noise)


def spread(weights: Tensor, noise_N: Tensor) -> None:
    """Add last places to contiguous float32 numbers if bfloat16 holds them all; zeros stay.

    `noise_N` is used again and again, less than HALF_GAP either way.
    """
    blocks = weights.view(torch.int32).view(-1).split(len(noise_N))
    if not any((bits & (2 * HALF_GAP - 1)).any() for bits in blocks):
        for bits in blocks:
            bits += noise_N[: len(bits)] * (bits << 1 != 0)
