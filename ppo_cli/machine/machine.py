"""What a plan needs to know about the machine that a run is for: read once, or assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final, Literal

from ppo_cli.errors import MissingPart, address_space
from ppo_cli.machine.device_record import Feature, read_record
from ppo_cli.machine.gpus import (
    NO_GPUS,
    ROOT,
    Gpu,
    Inventory,
    explain_hidden_gpus,
    has_bfloat16,
    hides_all_gpus,
    list_gpus,
    read_inventory,
)
from ppo_cli.machine.memory import host_memory
from ppo_cli.machine.processor import (
    count_cores,
    count_physical_cores,
    has_fast_bfloat16,
    matmul_library,
)
from ppo_cli.machine.torch_build import GpuFault, TorchBuild, find_gpu_fault, read_build
from ppo_cli.machine.versions import VersionFault, find_version_faults

# Optional packages that choices and checks of settings look for; none of them is imported.
PACKAGES: Final = (
    "bitsandbytes", "lm_eval", "peft", "ray", "verl", "vllm",
    "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip
THREAD_VARIABLES: Final = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}


@dataclass(frozen=True)
class Machine:
    """GPUs that a run may use, the processor, the memory, packages, and what is proven here."""

    gpus: tuple[Gpu, ...] = ()
    proven: frozenset[Feature] = frozenset()  # by the self-test on these GPUs
    packages: frozenset[str] = frozenset()  # those of PACKAGES that are installed
    cores: int = 1
    threads: int | None = None  # OMP_NUM_THREADS
    usual_threads: int | None = None  # of a process; None: variables decide
    host_bytes: int | None = None  # None: GPUs of another machine are assumed
    address_bytes: int | None = None  # that a process may map, `ulimit -v`; None: no limit
    fast_bfloat16: bool = False  # the processor multiplies in bfloat16 faster than in float32
    matmul: Literal["blas", "onednn"] = "blas"  # the faster library for float32 on the processor
    gpu_bytes: int | None = None  # of each GPU, if GPUs of another machine are assumed
    inventory: Inventory = NO_GPUS  # all GPUs and the driver; no fault if all are hidden
    hidden_gpus: str | None = None  # GPUs that a mistake in CUDA_VISIBLE_DEVICES hides
    torch: TorchBuild | None = None  # None: not installed
    version_faults: tuple[VersionFault, ...] = ()  # of Python and the installed packages

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Machine:
        """Read this machine as a process with these variables sees it."""
        gpus, inventory = list_gpus(environ), read_inventory(ROOT)
        record = read_record() if gpus else None
        return cls(
            gpus=gpus,
            proven=frozenset(record.proven if record else ()),
            packages=frozenset(name for name in PACKAGES if find_spec(name)),
            cores=count_cores(),
            threads=_read_threads(environ),
            usual_threads=None if THREAD_VARIABLES & environ.keys() else count_physical_cores(),
            host_bytes=host_memory(),
            address_bytes=address_space(),
            fast_bfloat16=has_fast_bfloat16(environ),
            matmul=matmul_library(environ),
            inventory=replace(inventory, fault=None) if hides_all_gpus(environ) else inventory,
            hidden_gpus=explain_hidden_gpus(environ),
            torch=read_build(),
            version_faults=tuple(find_version_faults()),
        )

    def assume_memory(self, gpu_bytes: int) -> Machine:
        """Return this machine with GPUs of another size, which are in another machine."""
        return replace(self, gpu_bytes=gpu_bytes, host_bytes=None)

    def has_bfloat16(self, gpus: int) -> bool:
        """Whether the first `gpus` GPUs compute in bfloat16; True if they are not here."""
        return has_bfloat16(self.gpus[:gpus])

    def gpu_fault(self, used: int) -> GpuFault | None:
        """Why torch cannot compute on the first `used` GPUs; None if it can, or there are none."""
        return find_gpu_fault(self.gpus[:used], self.inventory, self.torch)


def require_supported(*packages: str) -> None:
    """Raise MissingPart if Python, torch, transformers or a package has an unsupported version."""
    for fault in find_version_faults():
        if fault.package in ("python", "torch", "transformers", *packages):
            raise MissingPart(str(fault))


def _read_threads(environ: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS; None without one number, or where MKL has its own."""
    text = environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and "MKL_NUM_THREADS" not in environ else None
