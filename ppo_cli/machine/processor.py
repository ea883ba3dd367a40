"""What the processor can compute, and how many cores this process may use; without torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

ZEN_5 = 26  # CPU family of AMD's first processors with full-width AVX-512


def read_cpuinfo(root: Path = Path("/")) -> str:
    """Return Linux's /proc/cpuinfo; "" on other systems."""
    try:
        return (root / "proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""


def matmul_library(
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Literal["blas", "onednn"]:
    """Return the library for float32 products on the CPU that was measured faster.

    MKL looks at the maker and uses AVX2 on AMD processors that have AVX-512. AMD processors before
    Zen 5 split AVX-512 into halves, which is not faster than AVX2 (notes/lab_book.md). With AMX
    oneDNN would round to bfloat16 (`ppo_cli.engine.cpu.products.set_matmul_library`).
    """
    processor = read_cpuinfo(root)
    # AVX-512 is worth it on Zen 5 and newer; AMX would round, and torch may be told to avoid it.
    flags = _processor_flags(processor)
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags and "amx_tile" not in flags
    held_back = environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"  # torch's switch
    family = re.search(r"^cpu family\s*: (\d+)", processor, re.MULTILINE)
    zen5 = "AuthenticAMD" in processor and family is not None and int(family[1]) >= ZEN_5
    return "onednn" if wide and zen5 and not held_back else "blas"


def has_fast_bfloat16(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> bool:
    """Whether oneDNN multiplies matrices in bfloat16, about twice as fast as in float32.

    That takes AVX512-BF16 or AMX, and no variable that forbids oneDNN to use them.
    """
    held_back = any(environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"))
    flags = _processor_flags(read_cpuinfo(root))
    return not held_back and ("avx512_bf16" in flags or {"amx_tile", "amx_bf16"} <= flags)


def _processor_flags(processor: str) -> set[str]:
    return set(processor.partition("\nflags")[2].partition("\n")[0].split())


def has_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions; without, it is slower than float32."""
    cpuinfo = read_cpuinfo()
    return not cpuinfo or any(word in cpuinfo for word in ("avx512_bf16", "amx_bf16", " bf16"))


def count_cores() -> int:
    """Count the cores that this process may use: its affinity, within the CPU quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def count_physical_cores(root: Path = Path("/")) -> int:
    """Count those of these cores that are not hyper-threads of another: torch uses so many."""
    cores = count_cores()
    if not hasattr(os, "sched_getaffinity"):
        return cores
    blocks = read_cpuinfo(root).split("\n\n")
    facts = [dict(re.findall(r"^([a-z ]+?)\s*: (\d+)$", block, re.MULTILINE)) for block in blocks]
    usable = os.sched_getaffinity(0)
    # Without these facts (virtual machines, ARM) every core counts.
    physical = {
        (fact.get("physical id"), fact.get("core id", fact["processor"]))
        for fact in facts
        if "processor" in fact and int(fact["processor"]) in usable
    }
    return min(cores, len(physical) or cores)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs that control groups grant this process; None if unlimited."""
    base = root / "sys/fs/cgroup"
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in groups:
        _, names, path = line.split(":", 2)
        # Version 2 has one line without names, and each level has a limit; version 1 has a line
        # for each controller.
        if not names:
            home = base / path.lstrip("/")
            levels = [level for level in (home, *home.parents) if level.is_relative_to(base)]
            quotas += [_compute_quota(*_read_fields(level / "cpu.max")) for level in levels]
        elif "cpu" in names.split(","):
            for home in (base / "cpu" / path.lstrip("/"), base / "cpu"):
                fields = (
                    *_read_fields(home / "cpu.cfs_quota_us"),
                    *_read_fields(home / "cpu.cfs_period_us"),
                )
                quotas.append(_compute_quota(*fields))
    return min(quotas, default=None, key=lambda q: math.inf if q is None else q)


def _read_fields(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no limit at this level, or a group that the container does not show
        return []


def _compute_quota(limit: str = "max", period: str = "100000") -> float | None:
    return None if limit == "max" or int(limit) <= 0 else int(limit) / int(period)
