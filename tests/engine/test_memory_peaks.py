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


def measure(folder: Path, cases: list[int]) -> dict[int, tuple[int, int]]:
    """Bytes counted and bytes measured, by the number of the case."""
    done = subprocess.run(
        [sys.executable, "tests/engine/memory_peaks.py", str(folder), *map(str, cases)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    measured_cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(measured_cases) == len(cases), done.stderr
    pairs = ((case["counted"], case["measured"]) for case in measured_cases)
    return dict(zip(cases, pairs, strict=True))


@pytest.mark.slow
def test_counts_are_within_15_percent_of_measured_peaks(tmp_path: Path) -> None:
    peaks = measure(tmp_path, list(range(len(CASES))))
    off = {
        str(CASES[n]): counted / peak - 1
        for n, (counted, peak) in peaks.items()
        if abs(counted - peak) > WITHIN * peak
    }
    assert off == {}
