"""Speed on one GPU: tokens a second and MFU, of padded and packed rows."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests.loop.runs import ROOT

LINE = re.compile(r"(padded|packed) (annotate|step) +(\d+) tokens/s +MFU +([\d.]+)%")


@pytest.mark.timeout(300)
def test_both_verbs_keep_the_device_busy(
    on_gpu: bool, variables: dict[str, str], figure: Any
) -> None:
    """A random Qwen2.5-0.5B on a GPU; a tiny model on the CPU, of a measured peak."""
    size = ("--rows", "64", "--turns", "2") if on_gpu else ("--small", "--turns", "1")
    done = subprocess.run(
        [sys.executable, "benchmarks/engine_speed.py", *size],
        env=variables, cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    speeds = LINE.findall(done.stdout)
    assert [speed[:2] for speed in speeds] == [
        (layout, verb) for layout in ("padded", "packed") for verb in ("annotate", "step")
    ]
    for layout, verb, tokens, mfu in speeds:
        figure(f"{layout} {verb}: tokens/s", int(tokens))
        figure(f"{layout} {verb}: MFU in %", float(mfu))
        # More than the peak would be a mistake in counting; next to nothing, a device that waits.
        assert 0.2 < float(mfu) < 100
