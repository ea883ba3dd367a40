"""What the memory plan counts, against the peaks of real runs of the one-process engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.memory_peaks import CASES

ROOT = Path(__file__).parents[2]
WITHIN = 0.15


@pytest.mark.slow
@pytest.mark.weekly
def test_counts_are_within_15_percent_of_measured_peaks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tests/engine/memory_peaks.py", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    peaks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(peaks) == len(CASES), done.stderr
    shares = {peak["case"]: peak["counted"] / peak["measured"] - 1 for peak in peaks}
    assert {case: share for case, share in shares.items() if abs(share) > WITHIN} == {}
