"""When samplers that share the learner's devices sleep and wake, and who makes room for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.engine.cluster.engine import Publisher

ROUSED = ["learner spare_memory", "sampler wake_up"]


def publisher(said: list[str], *sleepers: str, reads_in_place: bool = False) -> Publisher:
    """One that writes down what it asks of whom."""

    def ask(member: str, name: str, *rest: Any) -> SimpleNamespace:
        said.append(f"{member} {name}")
        return SimpleNamespace(ref=None)

    def call(members: list[str], name: str, *rest: Any, **limit: Any) -> None:
        for member in members:
            ask(member, name)

    def collect(calls: list[Any], *limit: Any) -> list[bool]:
        return [reads_in_place] * len(calls)

    waits = SimpleNamespace(collect=collect, timeout_s=1.0)
    cluster: Any = SimpleNamespace(ask=ask, call=call, waits=waits)
    members: Any = [["learner"], ["sampler", *(s for s in sleepers if s != "sampler")]]
    return Publisher(cluster, *members, sleepers=sleepers)  # type: ignore[arg-type]


@pytest.mark.parametrize("connected", [False, True])
def test_the_learner_makes_room_before_samplers_wake(connected: bool) -> None:
    said: list[str] = []
    weights = publisher(said, "sampler")
    if connected:
        weights.connect(SimpleNamespace())  # type: ignore[arg-type]
    weights.sleep()
    said.clear()
    weights.wake()
    sent = ["learner send_weights"]
    taken = ["sampler load_weights"]
    assert said == (ROUSED + sent if connected else ["learner weights", *ROUSED, *taken])
    said.clear()
    weights.wake()
    assert not said


def test_samplers_with_devices_of_their_own_never_sleep() -> None:
    said: list[str] = []
    weights = publisher(said)
    weights.sleep()
    weights.send()
    assert said == ["learner weights", "sampler load_weights"]


def test_samplers_that_read_where_the_learner_writes_are_told_once() -> None:
    said: list[str] = []
    weights = publisher(said, reads_in_place=True)
    weights.send()
    weights.send()
    assert said == ["learner weights", "sampler load_weights", "learner weights"]


def test_only_samplers_that_share_devices_sleep_and_all_get_the_weights() -> None:
    said: list[str] = []
    weights = publisher(said, "sharer")
    weights.sleep()
    weights.wake()
    assert said == [
        "sharer sleep", "learner weights", "learner spare_memory", "sharer wake_up",
        "sampler load_weights", "sharer load_weights",
    ]  # fmt: skip
