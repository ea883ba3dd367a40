"""The grammar of --placement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.planning.placement import (
    Roles,
    format_devices,
    read_placement,
)


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("train:0-2,rollout:6-7,reward:2", {"train": (0, 1, 2), "rollout": (6, 7), "reward": (2,)}),
        ("train:0-3,6,rollout:4,5,7", {"train": (0, 1, 2, 3, 6), "rollout": (4, 5, 7)}),
        (" train: 1 , 0 , rollout : 2-2 ,", {"train": (0, 1), "rollout": (2,)}),
        ("train:0,rollout:1,train:2", {"train": (0, 2), "rollout": (1,)}),
        ("", {}),
    ],
)
def test_roles_and_their_devices_are_read(text: str, roles: dict[str, object]) -> None:
    assert read_placement(text) == roles


@given(
    st.dictionaries(st.sampled_from(["train", "rollout", "reward"]), st.sets(st.integers(0, 64)))
)
def test_what_is_written_is_read_again(roles: dict[str, set[int]]) -> None:
    expected = {role: tuple(sorted(devices)) for role, devices in roles.items() if devices}
    text = ",".join(f"{role}:{format_devices(devices)}" for role, devices in expected.items())
    roles_read: Roles = read_placement(text)
    assert roles_read == expected
