"""Whether the installed torch can compute on this machine's GPUs, without importing it.

`scripts/setup` chooses among the same builds: CUDA 13 by default, CUDA 12 for older drivers and
older GPUs.
"""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ppo_cli.machine.gpus import Gpu, Inventory
from ppo_cli.machine.versions import setup_command

# The oldest driver that runs programs built with a major version of CUDA: CUDA's release notes,
# table of minor version compatibility.
DRIVERS: Final = {11: 450, 12: 525, 13: 580}
# Compute capabilities: CUDA 13 supports TURING and newer; BLACKWELL and newer need CUDA 12.8.
TURING, BLACKWELL = (7, 5), (10, 0)
USE_CPU: Final = 'To compute on the CPU: `export CUDA_VISIBLE_DEVICES=""`.'


@dataclass(frozen=True)
class TorchBuild:
    """The version of torch, and of the CUDA that it was built for; None: CPUs only."""

    version: str
    cuda: tuple[int, int] | None

    def __str__(self) -> str:
        built = "CPUs" if self.cuda is None else f"CUDA {self.cuda[0]}.{self.cuda[1]}"
        return f"torch {self.version} is built for {built}"


def read_build(python: str = sys.executable) -> TorchBuild | None:
    """Read from its files what a Python's torch was built for; None if it is not installed."""
    if python == sys.executable:
        spec = find_spec("torch")
        files = [] if spec is None or spec.origin is None else [Path(spec.origin)]
    else:
        places = Path(python).parent.parent
        files = list(places.glob("lib/python3*/site-packages/torch/__init__.py"))
    if not files:
        return None
    facts = runpy.run_path(str(files[0].with_name("version.py")))
    cuda = facts["cuda"] and tuple(int(part) for part in facts["cuda"].split(".")[:2])
    return TorchBuild(facts["__version__"], cuda)


@dataclass(frozen=True)
class GpuFault:
    """Why torch cannot compute on the GPUs of this machine, and how to repair that."""

    what: str
    repair: str

    def __str__(self) -> str:
        return f"{self.what}. {self.repair[0].upper()}{self.repair[1:]}. {USE_CPU}"


def find_gpu_fault(
    gpus: Sequence[Gpu], inventory: Inventory, build: TorchBuild | None
) -> GpuFault | None:
    """Return why the build of torch cannot compute on these GPUs of the inventory.

    None: it can, or there are no GPUs. `engine.device.require_gpus` finds faults that only a start
    of CUDA shows.
    """
    if inventory.fault is not None:
        what = "This machine has NVIDIA GPUs, but their driver does not answer: "
        return GpuFault(what + inventory.fault.rstrip("."), _suggest_driver_fix(inventory.fault))
    if not gpus or build is None:
        return None
    # The build has to match the driver and the oldest and newest of the GPUs.
    lowest, highest = min(map(_capability, gpus)), max(map(_capability, gpus))
    if build.cuda is None:
        why = ""
    elif inventory.cuda is not None and inventory.cuda[0] < build.cuda[0]:
        why = f", which needs driver {DRIVERS[build.cuda[0]]} or newer"
    elif (build.cuda >= (13, 0) and lowest < TURING) or (
        build.cuda < (12, 8) and highest >= BLACKWELL
    ):
        why = ", which has no code for this GPU"
    else:
        return None
    what = f"{describe_gpus(gpus, inventory)} cannot be used: {build}{why}"
    return GpuFault(what, _repair_command(build, gpus, inventory))


def _repair_command(build: TorchBuild, gpus: Sequence[Gpu], inventory: Inventory) -> str:
    """Return the command that installs the build of torch for these GPUs."""
    # The setup script is preferred; otherwise pip with the index of the build.
    name = _choose_build(gpus, inventory)
    if name is None:
        return f"update NVIDIA's driver to {DRIVERS[13]} or newer"
    if (setup := setup_command()) is not None:
        return f"run `{setup}`"
    version = build.version.partition("+")[0]
    line = [sys.executable, "-m", "pip", "install", f"torch=={version}+{name}", "--index-url"]
    return f"run `{shlex.join([*line, f'https://download.pytorch.org/whl/{name}'])}`"


def describe_gpus(gpus: Sequence[Gpu], inventory: Inventory) -> str:
    """Return the names of GPUs, and their driver with the newest CUDA that it runs."""
    names = dict.fromkeys(gpu.name for gpu in gpus)
    capabilities = dict.fromkeys(gpu.compute_capability for gpu in gpus if gpu.compute_capability)
    shown = " and ".join(f"{major}.{minor}" for major, minor in capabilities)
    major, minor = inventory.cuda or (0, 0)
    return (
        f"{' and '.join(names)} (compute capability {shown}, driver {inventory.driver} for CUDA "
        f"{major}.{minor})"
    )


def _capability(gpu: Gpu) -> tuple[int, int]:
    return gpu.compute_capability or TURING


def _choose_build(gpus: Sequence[Gpu], inventory: Inventory) -> str | None:
    """Return the build of torch that these GPUs and their driver can run; None: no build."""
    newest = (inventory.cuda or (13, 0))[0]
    if newest >= 13 and all(_capability(gpu) >= TURING for gpu in gpus):
        return "cu130"
    return "cu126" if newest >= 12 and all(_capability(gpu) < BLACKWELL for gpu in gpus) else None


def _suggest_driver_fix(fault: str) -> str:
    if "mismatch" in fault:
        return "it was updated while the machine ran: `sudo reboot`"
    if "Not Found" in fault:
        return "in a container, start it with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`"
    return "`nvidia-smi` shows its state"
