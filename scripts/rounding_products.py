"""A fault for scripts/check_anywhere: oneDNN as it is on a processor with AMX.

There, float32 products are rounded to bfloat16 once torch may leave them to oneDNN. torch loads
this as a device back end, by an entry point that the script writes.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

PRODUCTS = torch.library.Library("aten", "IMPL")


def _round(factor: Tensor) -> Tensor:
    allowed: Any = torch.backends.mkldnn
    if factor.dtype != torch.float32 or allowed.matmul.fp32_precision != "bf16":
        return factor
    return factor.bfloat16().float()


# The forms with an `out` are operators of their own, whose kernels stay.
def _mm(first: Tensor, other: Tensor) -> Tensor:
    return torch.mm(_round(first), _round(other), out=first.new_empty(0))


def _bmm(first: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(_round(first), _round(other), out=first.new_empty(0))


def _addmm(bias: Tensor, first: Tensor, other: Tensor, **scales: float) -> Tensor:
    factors = _round(first), _round(other)
    return torch.addmm(bias, *factors, **scales, out=first.new_empty(0))


def _baddbmm(bias: Tensor, first: Tensor, other: Tensor, **scales: float) -> Tensor:
    factors = _round(first), _round(other)
    return torch.baddbmm(bias, *factors, **scales, out=first.new_empty(0))


def install() -> None:
    """Take the place of torch's products on the CPU."""
    with warnings.catch_warnings(action="ignore"):  # torch warns of what is meant
        for name, kernel in {"mm": _mm, "bmm": _bmm, "addmm": _addmm, "baddbmm": _baddbmm}.items():
            PRODUCTS.impl(name, kernel, "CPU")
