"""Which library multiplies float32 matrices on the CPU: oneDNN or torch's BLAS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch


def set_matmul_library(library: Literal["blas", "onednn"]) -> bool:
    """Select oneDNN or torch's BLAS for float32 products on the CPU; returns whether it is in use.

    torch passes these products to oneDNN only if bfloat16 is allowed inside them. Without AMX
    oneDNN still computes in float32, twice as fast as MKL on AMD processors with AVX-512
    (notes/lab_book.md). A trial product verifies that; if oneDNN rounds, BLAS stays selected.
    """
    products = _products()
    products.fp32_precision = "bf16" if library == "onednn" else "none"
    if library == "onednn" and not _multiplies_exactly():
        products.fp32_precision = "none"
    return using_onednn() == (library == "onednn")


def using_onednn() -> bool:
    """Whether oneDNN computes float32 products."""
    return bool(_products().fp32_precision == "bf16")


def _products() -> Any:
    # torch replaces this module by an object with properties, which its type stubs do not know.
    backend: Any = torch.backends.mkldnn
    return backend.matmul


@contextmanager
def use_blas() -> Iterator[None]:
    """Context in which BLAS computes products: oneDNN is slower for many small ones."""
    products = _products()
    previous, products.fp32_precision = products.fp32_precision, "none"
    try:
        yield
    finally:
        products.fp32_precision = previous


def _multiplies_exactly() -> bool:
    """Whether a product of numbers that bfloat16 cannot represent has float32 precision."""
    # 1 + 2^-12 needs 13 bits of mantissa; bfloat16 has 8.
    number = 1 + 2.0**-12
    product = torch.full((64, 64), number) @ torch.full((64, 64), number)
    return bool(((product.double() / (64 * number**2) - 1).abs() < 1e-6).all())
