"""Settings of a process that computes on the CPU: threads, and glibc's handling of freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Mapping

import torch

from ppo_cli.config.machine.processor import count_cores


def set_threads(threads: int | None, environ: Mapping[str, str] = os.environ) -> None:
    """Take `wanted` threads; None: OMP_NUM_THREADS, else torch's choice within the CPU quota.

    They stay fixed during a run: another number of threads sums in another order, and a resumed
    run would no longer be the same bit for bit.
    """
    if threads is None:
        chosen = "OMP_NUM_THREADS" in environ
        threads = torch.get_num_threads() if chosen else min(torch.get_num_threads(), count_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


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


LARGE_BLOCK = 1_000_000  # bytes


def return_freed_memory() -> None:
    """Have the C library give large freed blocks back to the system, now and from now on.

    Weights are gathered and let go layer by layer; kept for reuse and cut up by what comes
    between, such blocks cost half as much memory again as is in use.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        gc.collect()
        library.malloc_trim(0)
