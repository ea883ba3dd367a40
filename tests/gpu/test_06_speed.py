"""Speed on one GPU: tokens a second and MFU, of padded and packed rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

# Where there is no GPU: a CPU is always busy.
pytestmark = pytest.mark.weekly

LINE = re.compile(r"(padded|packed) (annotate|step) +(\d+) tokens/s +MFU +([\d.]+)%")


@pytest.mark.timeout(300)
def test_both_verbs_keep_the_device_busy(
    on_gpu: bool, run_program: Callable[..., str], figure: Any
) -> None:
    """A random Qwen2.5-0.5B on a GPU; a tiny model on the CPU, of a measured peak."""
    size = ("--rows", "64", "--turns", "2") if on_gpu else ("--small", "--turns", "1")
    out = run_program("benchmarks/engine_speed.py", *size)
    speeds = LINE.findall(out)
    assert [speed[:2] for speed in speeds] == [
        (layout, verb) for layout in ("padded", "packed") for verb in ("annotate", "step")
    ]
    for layout, verb, tokens, mfu in speeds:
        figure(f"{layout} {verb}: tokens/s", int(tokens))
        figure(f"{layout} {verb}: MFU in %", float(mfu))
        # More than the peak would be a mistake in counting; next to nothing, a device that waits.
        assert 0.2 < float(mfu) < 100
