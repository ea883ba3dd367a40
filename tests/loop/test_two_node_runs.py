"""`ppo train` on two machines: the same line on each, or once on a Ray that is there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_cli.cluster import addresses
from tests.cluster.namespaces import Pair, Started, open_pair
from tests.loop.runs import ROOT, command, environment, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's nodes are tried on Linux"),
]
# Minutes on a busy machine, for those who change cluster/.
THOROUGH = pytest.mark.skipif(not os.environ.get("PPO_KILLS"), reason="set PPO_KILLS to run this")
RUN = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--save_freq", "2", "--test_freq", "0", "--max_response_length", "8",
    "data.val_max_samples=16", "--num_workers", "2",
)  # fmt: skip
LONG_S = 600.0
# Options of `ray start` on each machine; `--block` lets it end with the test.
RAY_OPTIONS = (
    "--block", "--disable-usage-stats", "--dashboard-agent-listen-port", "0", "--num-cpus", "3",
    "--num-gpus", "0", "--object-store-memory", "150000000",
)  # fmt: skip


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as nodes:
        yield nodes
        for rank in (0, 1):
            nodes.wait_until_empty(rank, 120)


def start(pair: Pair, rank: int, *flags: str, **variables: str) -> Started:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ppo_cli", "train", *RUN, *flags]
    command += ["--output_dir", str(pair.folder / "run")]
    return pair.start(rank, command, environ | variables)


def start_both(pair: Pair, steps: int, *flags: str) -> tuple[Started, Started]:
    """Start a run on both nodes, and return once it has taken three steps."""
    head, node = (start(pair, rank, "--max_steps", str(steps), *flags) for rank in (0, 1))
    head.wait_for(f" 3/{steps} ", LONG_S)
    return head, node


def find(pair: Pair, rank: int, name: bytes) -> list[int]:
    """Return the processes of a node whose program or title begins or ends so."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pair.remaining(rank)}
    return [
        pid
        for pid, line in lines.items()
        if line.startswith(name) or line.split(b"\0")[0].endswith(name)
    ]


def test_a_node_is_killed_comes_back_and_both_end_well(pair: Pair) -> None:
    # Ray on the killed node is gone after some three seconds: the run must not end before.
    head, node = start_both(pair, 32)
    node.kill()
    lost = head.wait_for("node 1", 300, after=len(head.output()))
    assert pair.names[1] == "" or "host-b" in lost
    pair.wait_until_empty(1, 120)
    returned = start(pair, 1, "--max_steps", "32")
    assert head.wait(LONG_S) == 0, head.output()
    assert returned.wait(300) == 0, returned.output()
    output = head.output()
    assert "Starting again (1 of 3) from step" in output and "Traceback" not in output
    assert [line["step"] for line in metrics(pair.folder / "run")] == [*range(33)]


@THOROUGH
def test_a_node_that_stays_away_ends_the_run_resumably(pair: Pair) -> None:
    # Long enough for a busy machine to start two nodes in, and then waited for once.
    head, node = start_both(pair, 200, "--node_timeout", "60")
    node.kill()
    assert head.wait(LONG_S) == 3, head.output()
    output = head.output()
    assert "node 1" in output and "Go on with:" in output and "Traceback" not in output
    checkpoints = pair.folder / "run" / "checkpoints"
    assert (checkpoints / "latest" / "state" / "run.json").is_file()
    assert not list(checkpoints.glob(".unfinished*"))


@THOROUGH
def test_ray_lost_on_a_node_is_started_again_a_twin_refused_and_a_signal_ends_both(
    pair: Pair,
) -> None:
    head, node = start_both(pair, 200)
    (raylet,) = find(pair, 1, b"/raylet")
    os.kill(raylet, signal.SIGKILL)
    head.wait_for("Starting again (1 of 3) from step", 300)
    seen = len(head.output())
    head.wait_for("/200 ", LONG_S, after=seen)
    assert "lost its raylet" in node.output()
    twin = start(pair, 1, "--max_steps", "200")
    assert twin.wait(300) == 2 and "NODE_RANK 1 is used by" in twin.output()
    node.kill(signal.SIGTERM)
    assert (node.wait(300), head.wait(300)) == (3, 3)
    assert "ended with exit code 3; so does this one" in node.output()
    assert "node 1" in head.output() and "was asked to stop" in head.output()
    assert list(pair.folder.glob("ppo-*")) == []


@THOROUGH
def test_node_0_killed_ends_the_others(pair: Pair) -> None:
    head, node = start_both(pair, 200)
    head.kill()
    assert node.wait(300) == 3
    assert f"node 0 ({pair.addresses[0]}:" in node.output()


@THOROUGH
def test_other_settings_end_both_nodes(pair: Pair) -> None:
    head, node = start(pair, 0), start(pair, 1, "actor.optim.lr=3e-5")
    assert (head.wait(300), node.wait(300)) == (2, 2)
    for process in (head, node):
        assert "was started with other settings: actor.optim.lr." in process.output()


@THOROUGH
def test_one_start_trains_on_two_nodes_that_ray_has(pair: Pair) -> None:
    address = f"{pair.addresses[0]}:{pair.port}"
    # On loopback addresses Ray would join no nodes without being told to.
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    head = ("--head", "--port", str(pair.port), "--include-dashboard", "false")
    for rank, role in enumerate((head, ("--address", address))):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *RAY_OPTIONS]
        command += ["--node-ip-address", pair.addresses[rank]]
        pair.start(rank, command, variables).wait_for("Ray runtime started", 120)
    # A user who starts it once has none of the variables of a run of several starts.
    absent = dict.fromkeys(("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), "")
    joined = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    run = start(pair, 0, "--max_steps", "3", "--nnodes", "2", **absent, **joined)
    run.wait_for(" 1/3 ", LONG_S)
    # A learner rank on each node; the sampler is on one of them.
    assert find(pair, 0, b"ray::Worker") and find(pair, 1, b"ray::Worker")
    assert run.wait(300) == 0, run.output()
    steps = [line["step"] for line in metrics(pair.folder / "run") if "policy_loss" in line]
    assert steps == [1, 2, 3] and "Traceback" not in run.output()
    pair.end()  # Ray stays until it is ended


@pytest.mark.weekly
def test_two_nodes_of_one_machine_find_each_other_on_its_loopback(tmp_path: Path) -> None:
    port = str(addresses.free_port("127.0.0.1"))
    environ = environment() | {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    line = command(tmp_path / "run", *RUN, "--max_steps", "1")
    nodes = [subprocess.Popen(line, env=environ | {"NODE_RANK": rank}) for rank in ("1", "0")]
    try:
        assert [node.wait(LONG_S) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    assert metrics(tmp_path / "run")[-1]["step"] == 1
