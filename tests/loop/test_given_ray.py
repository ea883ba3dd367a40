"""One start on a Ray that is there already: two nodes begun by hand, one driver, whole ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import Pair, Started, open_pair

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's nodes are tried on Linux"),
    # Two minutes on a busy machine, most of them Ray's own start.
    pytest.mark.skipif(not os.environ.get("PPO_KILLS"), reason="set PPO_KILLS to run this"),
]
START_S = 120.0
# What `ray start` is told on each machine; it stays in front, so that it ends with the test.
QUIET = ("--block", "--disable-usage-stats", "--dashboard-agent-listen-port", "0")
SIZE = ("--num-cpus", "3", "--num-gpus", "0", "--object-store-memory", "150000000")
LINE = (
    "train", "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4",
    "--max_steps", "3", "--nnodes", "2", "--num_workers", "2", "--num_samplers", "1",
    "trainer.val_before_train=false", "data.val_files=[]",
)  # fmt: skip


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as nodes:
        yield nodes


def start_ray(pair: Pair, rank: int) -> Started:
    head, node_options = (
        f"{pair.addresses[0]}:{pair.port}",
        ("--node-ip-address", pair.addresses[rank]),
    )
    role = ("--head", "--port", str(pair.port), "--include-dashboard", "false")
    role = role if rank == 0 else ("--address", head)
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *role,
        *node_options,
        *QUIET,
        *SIZE,
    ]
    # On loopback addresses Ray would join no nodes without being told to.
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    return pair.start(rank, command, variables)


def test_one_start_trains_on_two_nodes_that_ray_has(pair: Pair) -> None:
    start_ray(pair, 0).wait_for("Ray runtime started", START_S)
    start_ray(pair, 1).wait_for("Ray runtime started", START_S)
    out = pair.folder / "run"
    driver = [sys.executable, "-m", "ppo_cli", *LINE, "--output_dir", str(out)]
    # A user who starts it once has none of the variables of a run of several starts.
    absent = dict.fromkeys(("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), "")
    variables = {"RAY_ADDRESS": f"{pair.addresses[0]}:{pair.port}", "RAY_AUTH_MODE": "disabled"}
    run = pair.start(0, driver, {**absent, **variables})
    run.wait_for(" 1/3 ", 300)
    for rank in (0, 1):
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pair.remaining(rank)]
        # A learner rank on each node; the sampler is on one of them.
        assert any(line.startswith(b"ray::Worker") for line in lines), rank
    assert run.wait(300) == 0, run.output()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "policy_loss" in row] == [1, 2, 3]
    assert "Traceback" not in run.output()
