"""Runs whose checkpoints take long to write: training goes on, and nothing is lost unsaid."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.loop.runs import SMALL, hidden, start_slow, train, wait_for


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_while_training_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "full" / "run"
    process = start_slow(out, *SMALL, "--max_steps", "6", hold=0.5, FULL="1")
    output = process.communicate(timeout=800)[0]
    assert process.returncode == 2
    assert "checkpoint of step 4 could not be written" in output and output.count("error: ") == 1
    assert "Traceback" not in output
    assert hidden(out) == []
    assert sorted(p.name for p in (out / "checkpoints").glob("step_*")) == ["step_000002"]


@pytest.mark.slow
def test_stopped_while_writing_all_is_saved_when_it_says_so(tmp_path: Path) -> None:
    out = tmp_path / "stopped" / "run"
    process = start_slow(out, *SMALL, hold=1.0)
    wait_for(tmp_path / "stopped" / "held", process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=800)[0]
    assert process.returncode == 3, output
    saved = re.search(r"Everything up to step (\d) of 8 is saved", output)
    assert saved, output
    assert hidden(out) == []
    assert os.readlink(out / "checkpoints" / "latest") == f"step_00000{saved.group(1)}"
    assert (out / "checkpoints" / "step_000004" / "state" / "run.json").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_in_its_first_save_leaves_no_partial_checkpoint(
    tmp_path: Path,
) -> None:
    out, first = tmp_path / "killed" / "run", ("--save_freq", "4", "--max_steps", "4")
    process = start_slow(out, *SMALL, *first, hold=60.0)
    wait_for(tmp_path / "killed" / "held", process)
    process.kill()
    process.communicate()
    assert hidden(out) != []
    train(out, *SMALL, *first)
    assert (out / "checkpoints" / "step_000004").is_dir()
    assert (out / "earlier_1" / "metrics.jsonl").exists()
    assert list(out.rglob(".unfinished-*")) == []
