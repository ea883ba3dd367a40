"""How many GPUs this machine offers, told cheaply and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def gpu_count(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> int:
    """Count the visible NVIDIA GPUs; CUDA_VISIBLE_DEVICES narrows what the driver shows."""
    env = os.environ if environ is None else environ
    present = _devices_present(root)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, _devices_listed(visible))


def _devices_present(root: Path) -> int:
    driver = list((root / "proc/driver/nvidia/gpus").glob("*"))
    nodes = [p for p in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)]
    return len(nodes) or len(driver)


def _devices_listed(visible: str) -> int:
    """Count as CUDA does: the list ends at the first entry that is empty or negative."""
    count = 0
    for entry in visible.split(","):
        name = entry.strip()
        if not name or name.startswith("-"):
            break
        count += 1
    return count
