"""The memory that `ppo plan` counts for eight short runs, against what they took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.memory_peaks import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_counts_are_within_15_percent_of_measured_peaks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/engine/memory_peaks.py", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(CASES), done.stderr
    off = [
        f"{one['case']}: counted {one['counted'] / one['measured'] - 1:+.1%}"
        for one in found
        if not 0.85 <= one["counted"] / one["measured"] <= 1.15
    ]
    assert off == []
