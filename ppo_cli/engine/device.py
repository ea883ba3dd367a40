"""Where an engine computes, in which precision, and with how many CPU threads."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ppo_cli.config.machine.gpus import fix_order, has_bfloat16, list_gpus
from ppo_cli.config.machine.processor import count_cores
from ppo_cli.config.machine.torch_build import GpuFault, describe, find_fault
from ppo_cli.errors import MissingPart, first_line


@dataclass(frozen=True)
class Compute:
    """A device and the precision of matrix products; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, dtype: str | None) -> Compute:
        """Take the GPU if there is one; unset precision is bfloat16 where it computes in that."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        half = device.type == "cuda" and has_bfloat16(list_gpus()[:1])
        name = dtype or ("bfloat16" if half else "float32")
        return cls(device, getattr(torch, name))

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which forward passes run."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in page-locked memory where `device` is a GPU: only from there copies are queued.

    torch keeps the memory until the copies out of it are done.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Queue a copy of a CPU tensor to the device: the host does not wait for earlier work there."""
    return pin(tensor, device).to(device, non_blocking=True)


def require_gpus(planned: int) -> None:
    """Raise MissingPart where torch cannot use the GPUs that are planned, or sees unplanned ones.

    From here on all processes number GPUs as the plan does.
    """
    fix_order(os.environ)
    if (fault := find_fault(planned) or find_cuda_fault(planned)) is not None:
        raise MissingPart(str(fault))


def find_cuda_fault(planned: int) -> GpuFault | None:
    """Return why CUDA does not start here, or shows other GPUs than are planned."""
    gpus, starts = list_gpus()[:planned], torch.cuda.is_available()
    if not planned and starts:
        return GpuFault(
            f"torch {torch.__version__} sees a GPU that NVIDIA's management library (NVML) does "
            "not show, so nothing was planned for it",
            "in a container, start it with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`",
        )
    if not planned or (starts and torch.cuda.device_count() >= planned):
        return None
    try:
        torch.cuda.init()
        said = f"it sees {torch.cuda.device_count()} of {planned} GPUs"
    except (RuntimeError, AssertionError) as error:
        said = first_line(error).rstrip(".")
    who = describe(gpus) if gpus else "A GPU that NVIDIA's driver does not show"
    return GpuFault(
        f"{who} cannot be used by torch {torch.__version__}: {said}",
        "`sudo nvidia-modprobe -u`, or a restart of the machine, brings back a driver that hangs",
    )


def expand_segments() -> None:
    """Let CUDA's allocator grow its segments: less memory is lost between tensors.

    Not in a process of vLLM's, whose own pools do not work with it.
    """
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def multiply_with(library: Literal["blas", "onednn"]) -> bool:
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
def products_by_blas() -> Iterator[None]:
    """Leave products in this block to BLAS: many small ones at once are slower with oneDNN."""
    products = _products()
    held, products.fp32_precision = products.fp32_precision, "none"
    try:
        yield
    finally:
        products.fp32_precision = held


def _multiplies_exactly() -> bool:
    """Whether a product of numbers that bfloat16 cannot hold is right to float32's precision."""
    number = 1 + 2.0**-12
    product = torch.full((64, 64), number) @ torch.full((64, 64), number)
    return bool(((product.double() / (64 * number**2) - 1).abs() < 1e-6).all())


def set_threads(wanted: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Take `wanted` threads; None: OMP_NUM_THREADS, else torch's choice within the CPU quota.

    They stay fixed during a run: another number of threads sums in another order, and a resumed
    run would no longer be the same bit for bit.
    """
    if wanted is None:
        chosen = "OMP_NUM_THREADS" in environ
        wanted = torch.get_num_threads() if chosen else min(torch.get_num_threads(), count_cores())
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free for the next ones; elsewhere nothing happens.

    By default it maps each large block anew, and the system clears it page by page.
    """
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        library.mallopt(M_TOP_PAD, 1 << 26)
