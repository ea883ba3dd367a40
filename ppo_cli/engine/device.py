"""Where an engine computes, in which precision, and with how many CPU threads."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.config.machine.gpus import has_bfloat16, list_gpus, pin_gpu_order
from ppo_cli.config.machine.torch_build import GpuFault, describe, find_gpu_fault
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
    pin_gpu_order(os.environ)
    if (fault := find_gpu_fault(planned) or find_cuda_fault(planned)) is not None:
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
        problem = f"it sees {torch.cuda.device_count()} of {planned} GPUs"
    except (RuntimeError, AssertionError) as error:
        problem = first_line(error).rstrip(".")
    who = describe(gpus) if gpus else "A GPU that NVIDIA's driver does not show"
    return GpuFault(
        f"{who} cannot be used by torch {torch.__version__}: {problem}",
        "`sudo nvidia-modprobe -u`, or a restart of the machine, brings back a driver that hangs",
    )


def expand_segments() -> None:
    """Let CUDA's allocator grow its segments: less memory is lost between tensors.

    Not in a process of vLLM's, whose own pools do not work with it.
    """
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
