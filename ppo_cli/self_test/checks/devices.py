"""The devices that torch, NVML and the plan see."""

from __future__ import annotations

import os

import torch

from ppo_cli.engine.device import Compute
from ppo_cli.machine.gpus import Gpu, has_bfloat16, list_gpus
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.memory import host_memory
from ppo_cli.planning.memory.devices import GIB
from ppo_cli.self_test.results import Results, Setup

SAME_MEMORY = 0.05  # NVML counts what the driver reserves, CUDA does not


def check_devices(setup: Setup, results: Results) -> None:
    """Compare what counts GPUs with what computes on them, and what the plan takes for memory."""
    # The plan, NVML and torch have to count the same GPUs.
    gpus, planned = list_gpus(), len(Machine.here().gpus)
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    results.require(f"the plan counts {planned} GPUs and NVML {len(gpus)}", planned == len(gpus))
    results.require(f"NVML counts {len(gpus)} GPUs and torch {usable}", usable == len(gpus))
    # The engine has to choose the device that is tested.
    chosen = Compute.choose("float32")
    results.require(
        f"torch computes on {chosen.device.type}, not on {setup.device}",
        chosen.device.type == setup.device,
    )
    results.figures["cpus"] = os.cpu_count() or 1
    results.figures["host_gib"] = round(host_memory() / GIB, 1)
    for index, gpu in enumerate(gpus[:usable]):
        with results.part(f"GPU {index}"):
            _check_gpu(index, gpu, results)


def _check_gpu(index: int, gpu: Gpu, results: Results) -> None:
    """Check that NVML and CUDA see the same memory, and that a sum works.

    The plan of memory counts with NVML's size. Free memory and name go to the figures.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    results.compare(
        f"memory of GPU {index} by NVML and by CUDA", abs(gpu.memory_bytes / total_bytes - 1),
        SAME_MEMORY,
    )  # fmt: skip
    with torch.cuda.device(index):
        numbers = torch.arange(1000, device="cuda", dtype=torch.float32)
        results.compare(f"sum on GPU {index}", abs(float(numbers.sum()) - 499_500), 0)
        results.figures[f"gpu_{index}_bfloat16"] = "native" if has_bfloat16([gpu]) else "emulated"
    results.figures[f"gpu_{index}_free_gib"] = round(free_bytes / GIB, 1)
    results.figures[f"gpu_{index}"] = torch.cuda.get_device_name(index)
