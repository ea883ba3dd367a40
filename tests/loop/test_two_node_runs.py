"""`ppo train` on two machines, started by the same line on each: they end as one, and survive."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import Pair, Started, open_pair
from tests.loop.runs import ROOT, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="Ray's nodes are tried on Linux"),
]
RUN = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_steps", "8", "--save_freq", "2", "--test_freq", "-1", "--max_response_length", "8",
    "data.val_max_samples=16", "--num_workers", "2",
)  # fmt: skip
LONG_S = 600.0


@pytest.fixture
def pair() -> Iterator[Pair]:
    with open_pair() as nodes:
        yield nodes


def start(pair: Pair, rank: int, out: Path, *flags: str) -> Started:
    line = [sys.executable, "-m", "ppo_cli", "train", *RUN, *flags, "--output_dir", str(out)]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    surroundings = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return pair.start(rank, line, surroundings)


def test_a_node_is_killed_comes_back_and_both_end_well(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # Ray on the killed node is gone after some three seconds: the run must not end before.
    head, node = (start(pair, rank, out, "--max_steps", "32") for rank in (0, 1))
    head.wait_for(" 3/32 ", LONG_S)
    node.kill()
    lost = head.wait_for("node 1", 300, after=len(head.output()))
    assert pair.names[1] == "" or "host-b" in lost
    pair.wait_until_empty(1, 120)
    returned = start(pair, 1, out, "--max_steps", "32")
    assert head.wait(LONG_S) == 0, head.output()
    assert returned.wait(300) == 0, returned.output()
    output = head.output()
    assert "Starting again (1 of 3) from step" in output and "Traceback" not in output
    assert [line["step"] for line in metrics(out)] == [*range(33)]
    for rank in (0, 1):
        pair.wait_until_empty(rank, 120)


@pytest.mark.skipif(not os.environ.get("PPO_KILLS"), reason="set PPO_KILLS to run this")
def test_a_node_that_stays_away_ends_the_run_resumably(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "run"
    # Long enough for a busy machine to start two nodes in, and then waited for once.
    longer = ("--node_timeout", "60", "--max_steps", "200")
    head, node = (start(pair, rank, out, *longer) for rank in (0, 1))
    head.wait_for(" 3/200 ", LONG_S)
    node.kill()
    assert head.wait(LONG_S) == 3, head.output()
    output = head.output()
    assert "node 1" in output and "Go on with:" in output and "Traceback" not in output
    assert (out / "checkpoints" / "latest" / "state" / "run.json").is_file()
    assert not list((out / "checkpoints").glob(".unfinished*"))
    pair.wait_until_empty(0, 120)
