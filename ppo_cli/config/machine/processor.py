"""What the processor multiplies matrices with, and how many cores are ours; without torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

ZEN_5 = 26  # the family of AMD's first processors that compute AVX-512 in full width


def read_cpuinfo(root: Path = Path("/")) -> str:
    """What Linux says of the processor; nothing elsewhere."""
    try:
        return (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def matmul_library(
    asked: Literal["blas", "onednn"] | None,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Literal["blas", "onednn"]:
    """What multiplies float32 matrices on the CPU: as set, else the one that was measured faster.

    MKL goes by the name of the maker, and takes AVX2 on AMD's processors that have AVX-512. Those
    before Zen 5 compute it in halves, no faster than AVX2 (docs/log.md). With AMX oneDNN would
    round to bfloat16 (`ppo_cli.engine.cpu.products.set_matmul_library`).
    """
    if asked is not None:
        return asked
    processor = read_cpuinfo(root)
    flags = _processor_flags(processor)
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags and "amx_tile" not in flags
    held_back = environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"  # torch's own switch
    family = re.search(r"^cpu family\s*: (\d+)", processor, re.MULTILINE)
    zen5 = "AuthenticAMD" in processor and family is not None and int(family[1]) >= ZEN_5
    return "onednn" if wide and zen5 and not held_back else "blas"


def has_fast_bfloat16(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Whether oneDNN multiplies matrices in bfloat16, about twice as fast as in float32.

    It needs AVX512-BF16 or AMX, and that oneDNN may use them.
    """
    held_back = any(environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    flags = _processor_flags(read_cpuinfo(root))
    return not held_back and ("avx512_bf16" in flags or {"amx_tile", "amx_bf16"} <= flags)


def _processor_flags(processor: str) -> set[str]:
    return set(processor.partition("\nflags")[2].partition("\n")[0].split())


def has_bfloat16() -> bool:
    """Whether the processor computes in bfloat16; without, it is slower than float32."""
    found = read_cpuinfo()
    return not found or any(word in found for word in ("avx512_bf16", "amx_bf16", " bf16"))


def count_cores() -> int:
    """The cores that this process may use: those of its affinity, within the CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The CPUs that control groups grant this process (version 2, or 1); None where unlimited."""
    base = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in groups:
        _, names, path = line.split(":", 2)
        if not names:
            home = base / path.lstrip("/")
            levels = [level for level in (home, *home.parents) if level.is_relative_to(base)]
            found += [_quota(*_words(level / "cpu.max")) for level in levels]
        elif "cpu" in names.split(","):
            for home in (base / "cpu" / path.lstrip("/"), base / "cpu"):
                words = (*_words(home / "cpu.cfs_quota_us"), *_words(home / "cpu.cfs_period_us"))
                found.append(_quota(*words))
    return min(found, default=None, key=lambda q: math.inf if q is None else q)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no limit at this level, or a group that the container does not show
        return []


def _quota(most: str = "max", period: str = "100000") -> float | None:
    return None if most == "max" or int(most) <= 0 else int(most) / int(period)
