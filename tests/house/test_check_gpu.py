"""scripts/check_gpu, with a stand-in for Python that notes what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

STAND_IN = """#!/bin/sh
echo "[$CUDA_VISIBLE_DEVICES] $*" >>"$(dirname "$0")/asked"
case "$*" in *doctor*) echo "a product differs"; exit 2 ;; esac
echo passed
"""


def check(
    root: Path, folder: Path, *args: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script; what it printed, and what the stand-in was asked to run."""
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    command = [root / "scripts" / "check_gpu", "--python", python, "--out", folder / "out", *args]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    log = folder / "asked"
    return done, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(("args", "mark"), [((), "gpu"), (("--cpu",), "slow")])
def test_it_goes_on_after_a_failure_and_keeps_what_was_printed(
    args: tuple[str, ...], mark: str, root: Path, tmp_path: Path
) -> None:
    done, log = check(root, tmp_path, *args)
    steps = [line for line in log if "doctor" in line or "pytest" in line]
    assert "doctor --self-test" in steps[0] and f"pytest -v -m {mark} tests/gpu" in steps[1]
    visible = "[]" if args else "[0]"
    assert all(line.startswith(visible) for line in steps)
    assert done.returncode == 1 and done.stderr.strip() == "Failed: self_test"
    out = tmp_path / "out"
    assert (out / "self_test.txt").read_text() == "a product differs\n"
    assert (out / "tests.txt").read_text() == "passed\n"
    assert {path.name for path in out.iterdir()} >= {"machine.txt", "figures.jsonl"}


def test_nothing_begins_when_the_time_is_up(root: Path, tmp_path: Path) -> None:
    done, log = check(root, tmp_path, "--minutes", "0")
    assert done.returncode == 1 and done.stderr.strip() == "Failed: self_test tests"
    assert not [line for line in log if "doctor" in line or "pytest" in line]


def test_unknown_words_are_refused(root: Path, tmp_path: Path) -> None:
    done, log = check(root, tmp_path, "--fast")
    assert done.returncode == 2 and "not '--fast'" in done.stderr and not log
