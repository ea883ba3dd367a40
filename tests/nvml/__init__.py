"""Machines with NVIDIA GPUs, told to NVML's own Python binding by a small library in C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from ppo_cli.machine import gpus

GIB = 1 << 30
DRIVER = "driver|580.95.05|13000"
RTX_4090 = f"card|NVIDIA GeForce RTX 4090|GPU-4090a|{24 * GIB}|8.9|16384|3105"
GT_1030 = f"card|NVIDIA GeForce GT 1030|GPU-1030b|{2 * GIB}|6.1|384|1911"
H100 = gpus.Gpu("NVIDIA H100 80GB HBM3", "GPU-h1000", 80 * GIB, (9, 0))
T4 = f"card|Tesla T4|GPU-t4c|{16 * GIB}|7.5|2560|1590"


def h100(number: int) -> str:
    return f"card|NVIDIA H100 80GB HBM3|GPU-h100{number}|{80 * GIB}|9.0|16896|1980"


@cache
def build_library() -> Path:
    """Compile the library; tests that need it are skipped without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = Path(mkdtemp(prefix="ppo-nvml-")) / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("library.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", path, source],
        check=True,
    )
    return path


def environment(folder: Path, *lines: str) -> dict[str, str]:
    """Variables with which a new process finds a machine that these lines describe."""
    machine = folder / "machine.nvml"
    machine.write_text("\n".join(lines))
    return {"LD_LIBRARY_PATH": str(build_library().parent), "FAKE_NVML": str(machine)}


class Machine:
    """What NVML shows to this process."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch

    def set(self, *lines: str) -> None:
        import pynvml

        gpus.read_inventory.cache_clear()
        self.patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(build_library())))
        self.patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        self.patch.setenv("FAKE_NVML", environment(self.folder, *lines)["FAKE_NVML"])
        self.patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.patch.delenv("CUDA_DEVICE_ORDER", raising=False)
