"""GPUs of this machine, counted without torch; and the parser of `--placement`.

    train:0-5,rollout:6-7,reward:5        ranges and single numbers
    train:0-3,6,rollout:4,5,7             a number without a role belongs to the role before it

Numbers count GPUs over all nodes (with 8 a node, node 1 starts at 8), or, on the CPU, slots.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

from ppo_cli.errors import did_you_mean


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


Role = Literal["train", "rollout", "reward"]
Roles = dict[Role, tuple[int, ...]]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def read_placement(text: str) -> Roles:
    """Return the devices of each role, sorted; ValueError says in words what is wrong."""
    found: dict[Role, list[int]] = {}
    role: Role | None = None
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, colon, numbers = piece.rpartition(":")
        if colon:
            role = _role(name.strip())
        if role is None:
            raise ValueError(f"'{piece}' stands before any role; {_role_first(piece)}")
        found.setdefault(role, []).extend(_numbers(numbers.strip()))
    for name, devices in found.items():
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            raise ValueError(f"device {twice[0]} is named twice for {name}; name it once")
    return {name: tuple(sorted(devices)) for name, devices in found.items()}


def numbered(devices: tuple[int, ...]) -> str:
    """Write device numbers as `read_placement` takes them: `0-5,7`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _role_first(piece: str) -> str:
    """Say how it is written; only what is a device is shown behind a role."""
    if _RANGE.fullmatch(piece):
        return f"write train:{piece}"
    return "write ROLE:DEVICES for each role, such as train:0-5,rollout:6-7"


def _role(name: str) -> Role:
    for role in ROLES:
        if name == role:
            return role
    near = did_you_mean(name, ROLES) or " Roles are train, rollout and reward."
    raise ValueError(f"there is no role '{name}'.{near}")


def _numbers(text: str) -> range:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"'{text}' is no device; write a number or a range, such as 0-5")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"the range {text} runs backwards; write {last}-{first}")
    return range(first, last + 1)
