"""Two nodes with real Ray: they join, end together, and what dies is named and leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import Pair, Started, open_pair

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's nodes are tried on Linux"),
    # Whole runs on two nodes are in tests/loop; these look closer, for those who change cluster/.
    pytest.mark.skipif(not os.environ.get("PPO_KILLS"), reason="set PPO_KILLS to run these"),
]

NODE = str(Path(__file__).with_name("run_node.py"))
ROOT = str(Path(__file__).parents[2])
# Generous, since the machine may be busy with other tests; a quiet one needs a few seconds.
START_S = 120.0


def start(pair: Pair, rank: int, *settings: str) -> Started:
    command = [sys.executable, NODE, str(pair.folder), "trainer.node_timeout=120", *settings]
    paths = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    return pair.start(rank, command, {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""})


def find(pair: Pair, rank: int, name: str) -> int:
    """Return the process on a node whose command line holds a name."""
    for pid in pair.remaining(rank):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if command[0].endswith(name.encode()):
            return pid
    raise AssertionError(f"no {name} on node {rank}")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as nodes:
        yield nodes


def test_nodes_join_are_lost_come_back_and_end_together(pair: Pair) -> None:
    head, node = start(pair, 0), start(pair, 1)
    head.wait_for("whole: ", START_S)

    begun = time.monotonic()
    node.kill(signal.SIGKILL)
    lost = head.wait_for("lost: ", 120)
    assert "node 1" in lost
    assert pair.addresses[1] in lost
    assert time.monotonic() - begun < 9
    pair.wait_until_empty(1, 15)

    seen = len(head.output())
    back = start(pair, 1)
    head.wait_for("whole again", START_S, seen)

    twin = start(pair, 1)
    assert twin.wait(300) == 2
    assert "NODE_RANK 1 is taken by" in twin.output()

    seen = len(head.output())
    os.kill(find(pair, 1, "/raylet"), signal.SIGKILL)
    assert "Ray does not run there" in head.wait_for("lost: ", 120, seen)
    (pair.folder / "count").touch()
    head.wait_for("whole again", START_S, seen)
    assert head.wait_for("alive: ", 300, seen) == "alive: 2"

    back.kill(signal.SIGTERM)
    assert "node 1" in head.wait_for("stop: ", 120)
    assert (back.wait(300), head.wait(300)) == (3, 3)
    assert "ended with exit code 3; so does this one" in back.output()
    for rank in (0, 1):
        pair.wait_until_empty(rank, 15)
    assert list(pair.folder.glob("ppo-*")) == []


def test_node_0_killed_takes_all_along() -> None:
    with open_pair("loopback") as pair:
        head, node = start(pair, 0), start(pair, 1)
        head.wait_for("whole: ", START_S)
        head.kill(signal.SIGKILL)
        assert node.wait(300) == 3
        assert "node 0 (127.0.0.2:" in node.output()
        for rank in (0, 1):
            pair.wait_until_empty(rank, 15)


def test_other_settings_end_both_nodes(pair: Pair) -> None:
    head, node = start(pair, 0), start(pair, 1, "actor.optim.lr=3e-5")
    assert (head.wait(START_S), node.wait(300)) == (2, 2)
    for process in (head, node):
        assert "was started with other settings: actor.optim.lr." in process.output()
    for rank in (0, 1):
        pair.wait_until_empty(rank, 15)
