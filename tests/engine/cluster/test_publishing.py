"""When samplers that share the learner's devices sleep and wake, and who makes room for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.engine.cluster.publishing import Publisher

ROUSED = ["learner spare_memory", "sampler wake_up"]


def publisher(said: list[str], *, colocated: bool) -> Publisher:
    """One that writes down what it asks of whom."""

    def ask(member: str, name: str, *rest: Any) -> SimpleNamespace:
        said.append(f"{member} {name}")
        return SimpleNamespace(ref=None)

    waits = SimpleNamespace(collect=lambda calls, *limit: [], timeout_s=1.0)
    cluster: Any = SimpleNamespace(ask=ask, waits=waits)
    members: Any = [["learner"], ["sampler"]]
    return Publisher(cluster, *members, colocated=colocated)


@pytest.mark.parametrize("connected", [False, True])
def test_the_learner_makes_room_before_samplers_wake(connected: bool) -> None:
    said: list[str] = []
    weights = publisher(said, colocated=True)
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
    weights = publisher(said, colocated=False)
    weights.sleep()
    weights.send()
    assert said == ["learner weights", "sampler load_weights"]
