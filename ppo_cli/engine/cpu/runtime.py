"""Settings of a process that computes on the CPU: threads, and glibc's handling of freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

import torch

from ppo_cli.machine.processor import count_cores


def set_threads(threads: int | None) -> None:
    """Set the number of threads; None means OMP_NUM_THREADS, else torch's choice within the quota.

    The number stays fixed during a run: with another number sums are computed in another order,
    and a resumed run would differ in the last bits.
    """
    if threads is None:
        chosen = "OMP_NUM_THREADS" in os.environ
        threads = torch.get_num_threads() if chosen else min(torch.get_num_threads(), count_cores())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let glibc reuse the memory of freed tensors; does nothing without glibc.

    By default glibc maps each large block again, and the kernel zeroes its pages.
    """
    library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(library, "mallopt"):
        # Blocks below 1 GiB come from the heap, which is never trimmed and grows by 64 MiB.
        library.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        library.mallopt(M_TOP_PAD, 1 << 26)


# Bytes from which blocks are mapped, so that freeing returns them; gathered layers are larger.
LARGE_BLOCK = 1_000_000


def return_freed_memory() -> None:
    """Make glibc return large freed blocks to the system, now and later.

    Ranks gather and free weights layer by layer. If glibc kept those blocks, fragmentation would
    cost half as much memory again as is in use.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        gc.collect()
        library.malloc_trim(0)
