"""The memory of this machine, within the limits of its control groups."""

from __future__ import annotations

import os
from pathlib import Path


def own_memory() -> tuple[int, int] | None:
    """Return the mapped and the resident bytes of this process; None where nothing tells them."""
    try:
        mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:  # macOS has no such file
        return None
    page = os.sysconf("SC_PAGE_SIZE")
    return int(mapped) * page, int(resident) * page


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's memory, or the limit of its control groups."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Version 2 of control groups, then version 1.
    limits = [physical]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / "sys/fs/cgroup" / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
