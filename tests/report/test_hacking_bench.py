"""The bench of exploits, shortened: the policy learns two, and three honest runs stay silent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_alarm_comes_before_the_harm_and_not_in_honest_runs(tmp_path: Path) -> None:
    runs = ("length", "keywords", "right function grpo", "format function grpo", "right judge rloo")
    words = [sys.executable, "benchmarks/hacking.py", "--out", str(tmp_path), "--seeds", "1"]
    picture = tmp_path / "runs.svg"
    bench = subprocess.run(
        [*words, "--draw", str(picture), "--only", *runs],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert bench.returncode == 0, bench.stdout + bench.stderr
    expected = "alarm: before the harm in 2 of 2 learned exploits, false in 0 of 3 honest runs"
    assert expected in bench.stdout
    assert picture.read_text().count("<polyline") == 2 * len(runs)
