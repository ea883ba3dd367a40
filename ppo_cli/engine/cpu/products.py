"""Which library multiplies float32 matrices on the CPU: oneDNN or torch's BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


def set_matmul_library(library: Literal["blas", "onednn"]) -> bool:
    """Have oneDNN or torch's BLAS multiply float32 matrices on the CPU; whether it is so now.

    torch gives these products to oneDNN where bfloat16 is allowed inside of them. Without AMX
    oneDNN computes them in float32 nonetheless, twice as fast as MKL on AMD's processors with
    AVX-512 (docs/log.md). That it does so is tried: where products are rounded, BLAS stays.
    """
    products = _products()
    products.fp32_precision = "bf16" if library == "onednn" else "none"
    if library == "onednn" and not _multiplies_exactly():
        products.fp32_precision = "none"
    return using_onednn() == (library == "onednn")


def using_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices."""
    return bool(_products().fp32_precision == "bf16")


def _products() -> Any:
    backend: Any = torch.backends.mkldnn  # torch puts an object in the place of the module
    return backend.matmul


@contextmanager
def use_blas() -> Iterator[None]:
    """Leave products in this block to BLAS: many small ones at once are slower with oneDNN."""
    products = _products()
    previous, products.fp32_precision = products.fp32_precision, "none"
    try:
        yield
    finally:
        products.fp32_precision = previous


def _multiplies_exactly() -> bool:
    """Whether a product of numbers that bfloat16 cannot hold is right to float32's precision."""
    number = 1 + 2.0**-12
    product = torch.full((64, 64), number) @ torch.full((64, 64), number)
    return bool(((product.double() / (64 * number**2) - 1).abs() < 1e-6).all())
