"""The device and precision of an engine, copies to the device, and checks of the planned GPUs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.errors import MissingPart, first_line
from ppo_cli.machine.gpus import pin_gpu_order
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.torch_build import GpuFault, describe_gpus


@dataclass(frozen=True)
class Compute:
    """A device and the precision of matrix products; trained weights stay in float32."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def choose(cls, dtype: str) -> Compute:
        """Choose the GPU if there is one."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(device, getattr(torch, dtype))

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which forward passes run."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor in page-locked memory if `device` is a GPU, else unchanged.

    Only copies from page-locked memory are asynchronous. torch keeps the memory until they end.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device asynchronously, behind the work queued there."""
    return pin(tensor, device).to(device, non_blocking=True)


def require_gpus(machine: Machine, planned: int) -> None:
    """Raise MissingPart if torch cannot use the planned GPUs, or sees GPUs that were not planned.

    Also fixes the order in which this process and its children number the GPUs.
    """
    pin_gpu_order(os.environ)
    if (fault := machine.gpu_fault(planned) or find_cuda_fault(machine, planned)) is not None:
        raise MissingPart(str(fault))


def find_cuda_fault(machine: Machine, planned: int) -> GpuFault | None:
    """Return why CUDA does not start, or why its GPUs differ from the plan; None if all is well."""
    gpus, starts = machine.gpus[:planned], torch.cuda.is_available()
    if not planned and starts:
        return GpuFault(
            f"torch {torch.__version__} sees a GPU that NVIDIA's management library (NVML) does "
            "not show, so nothing was planned for it",
            "in a container, start it with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`",
        )
    if not planned or (starts and torch.cuda.device_count() >= planned):
        return None
    # Initialise CUDA for its own error text: `is_available` only returns False.
    try:
        torch.cuda.init()
        problem = f"it sees {torch.cuda.device_count()} of {planned} GPUs"
    except (RuntimeError, AssertionError) as error:
        problem = first_line(error).rstrip(".")
    who = (
        describe_gpus(gpus, machine.inventory)
        if gpus
        else "A GPU that NVIDIA's driver does not show"
    )
    return GpuFault(
        f"{who} cannot be used by torch {torch.__version__}: {problem}",
        "`sudo nvidia-modprobe -u`, or a restart of the machine, brings back a driver that hangs",
    )


def expand_segments() -> None:
    """Enable expandable segments in CUDA's allocator, which reduces fragmentation.

    Not in vLLM's processes: its memory pools do not work with them.
    """
    # Private in torch 2.13; the public way is an environment variable before torch is imported.
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
