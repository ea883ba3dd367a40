"""The grammar of `--placement`: which devices have which role.

It is written as follows:

    train:0-5,rollout:6-7,reward:5        ranges and single numbers
    train:0-5,rollout:6,judge:7           a judge that the run starts (type local)
    train:0-3,6,rollout:4,5,7             a number without a role belongs to the role before it

Numbers count GPUs over all nodes (with 8 per node, node 1 starts at 8). On the CPU they count
slots; a slot is a place for one process.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

from ppo_cli.errors import did_you_mean

Role = Literal["train", "rollout", "reward", "judge"]
Roles = dict[Role, tuple[int, ...]]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
# `3` or `0-5`.
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def read_placement(text: str) -> Roles:
    """Return the sorted devices of each role; ValueError says what is wrong with the text."""
    # A role holds for all numbers up to the next role: `train:0-3,5,rollout:6`.
    devices_of: dict[Role, list[int]] = {}
    role: Role | None = None
    for piece in filter(None, (part.strip() for part in text.split(","))):
        name, colon, numbers = piece.rpartition(":")
        if colon:
            role = _parse_role(name.strip())
        if role is None:
            how = "write ROLE:DEVICES for each role, such as train:0-5,rollout:6-7"
            how = f"write train:{piece}" if _RANGE.fullmatch(piece) else how
            raise ValueError(f"'{piece}' comes before any role; {how}")
        devices_of.setdefault(role, []).extend(_parse_range(numbers.strip()))
    # A device may have several roles, but each only once.
    for name, devices in devices_of.items():
        twice = sorted({device for device in devices if devices.count(device) > 1})
        if twice:
            raise ValueError(f"device {twice[0]} is named twice for {name}; name it once")
    return {name: tuple(sorted(devices)) for name, devices in devices_of.items()}


def format_devices(devices: tuple[int, ...]) -> str:
    """Write device numbers as `read_placement` takes them: `0-5,7`."""
    # Group consecutive numbers into ranges.
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _parse_role(name: str) -> Role:
    """Return the role of this name; ValueError for another word."""
    for role in ROLES:
        if name == role:
            return role
    near = did_you_mean(name, ROLES) or " Roles are train, rollout, reward and judge."
    raise ValueError(f"there is no role '{name}'.{near}")


def _parse_range(text: str) -> range:
    """Return the device numbers in `3` or `0-5`; ValueError for another text."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a device; write a number or a range, such as 0-5")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"the range {text} goes backwards; write {last}-{first}")
    return range(first, last + 1)
