"""How far apart two computations of the same numbers may be, on any processor.

Bits are promised only for the same computation on the same machine: another processor, or another
shape of the same work, adds up in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAFETY = 8.0  # errors of a few operations in a row add to those of the longest sum


def allowed(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """The largest gap, as a share of the largest magnitude: rounding errors walk at random.

    `terms` counts the numbers that are summed into one result, all layers of a model together.
    """
    return SAFETY * torch.finfo(dtype).eps * float(terms) ** 0.5


def gap(actual: Tensor, exact: Tensor) -> float:
    """The largest difference, as a share of the largest magnitude; infinite when one is broken."""
    assert actual.shape == exact.shape, (actual.shape, exact.shape)
    actual, exact = actual.detach().double(), exact.detach().double()
    share = float((actual - exact).abs().max() / exact.abs().max().clamp_min(1e-12))
    return share if share == share else float("inf")


def assert_near(
    actual: Tensor, exact: Tensor, *, terms: int, dtype: torch.dtype = torch.float32
) -> None:
    """Fail when two ways to compute the same numbers differ by more than rounding."""
    assert gap(actual, exact) <= allowed(terms, dtype), (gap(actual, exact), allowed(terms, dtype))
