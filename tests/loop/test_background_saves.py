"""Runs whose checkpoints take long to write: training goes on, and a kill loses nothing whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.loop.runs import SMALL, assert_same_run, environment, metrics, train, wait_for

# Writes as ever, then holds the checkpoint of step 4 back; FULL lets the disk then be full.
SLOW_DISK = """
import os, sys, time
from pathlib import Path
from ppo_cli.engine.checkpoint import Snapshot

write = Snapshot.write

def slow(self, directory):
    write(self, directory)
    if "step_000004" in directory.name:
        (Path(os.environ["DESK"]) / "held").touch()
        end = time.monotonic() + float(os.environ["HOLD"])
        while time.monotonic() < end:
            time.sleep(0.05)
        if os.environ.get("FULL"):
            raise OSError(28, "No space left on device")

Snapshot.write = slow
from ppo_cli.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def start_slow(out: Path, *args: str, hold: float, **more: str) -> subprocess.Popen[str]:
    out.parent.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_DISK, "train", *args, "--output_dir", str(out)],
        env=environment() | {"DESK": str(out.parent), "HOLD": str(hold)} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def hidden(out: Path) -> list[str]:
    return sorted(name for name in os.listdir(out / "checkpoints") if name.startswith("."))


def wait_for_step(out: Path, process: subprocess.Popen[str], step: int) -> None:
    wait_for(out / "rollouts" / f"step_{step:06d}.jsonl", process)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    told: Any = process.communicate(timeout=200)[0]
    return process.returncode, told


def test_killed_while_writing_it_goes_on_from_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "killed" / "run"
    process = start_slow(out, *SMALL, hold=600)
    try:
        # Steps 5 and 6 are trained while step 4 is still being written.
        wait_for_step(out, process, 6)
        assert (out.parent / "held").exists()
        assert hidden(out) == [".unfinished-step_000004"]
        assert os.readlink(out / "checkpoints" / "latest") == "step_000002"
    finally:
        process.kill()
        process.communicate()
    assert "Going on after step 2" in train(out, *SMALL).stdout
    assert hidden(out) == []
    straight = tmp_path / "straight"
    train(straight, *SMALL)
    assert_same_run(straight, out)


def test_a_disk_that_is_full_is_told_while_training_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "full" / "run"
    code, told = finish(start_slow(out, *SMALL, hold=0.5, FULL="1"))
    assert code == 2
    assert "checkpoint of step 4 could not be written" in told and told.count("error: ") == 1
    assert "Traceback" not in told
    assert hidden(out) == []
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == ["step_000002"]


def test_the_end_of_a_run_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "short" / "run"
    short = (*SMALL, "--max_steps", "4")
    code, told = finish(start_slow(out, *short, hold=1.0))
    assert code == 0, told
    assert hidden(out) == [] and os.readlink(out / "checkpoints" / "latest") == "step_000004"
    assert os.readlink(out / "checkpoints" / "best") in ("step_000002", "step_000004")
    assert len(metrics(out)) >= 4
