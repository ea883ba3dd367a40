"""What the log of a worker that does not answer says of it."""

from __future__ import annotations

import os
from pathlib import Path

from ppo_cli.cluster import worker_process
from ppo_cli.cluster.worker_process import find_late_frame


def test_the_frame_of_a_late_call_is_found_under_many_deep_threads(tmp_path: Path) -> None:
    frames = "".join(f'  File "/site-packages/deep.py", line {n} in wait\n' for n in range(99))
    others = "".join(f"Thread 0x{n:016x} (most recent call first):\n{frames}" for n in range(1, 60))
    ours = '  File "/own.py", line 7 in hook\n  File "/worker_process.py", line 1 in _try\n'
    log = tmp_path / "learner-1.log"
    mark = worker_process._mark(os.getpid())
    log.write_text(
        f"{mark} 2026-01-01\nTimeout (0:00:54)!\nThread 0x0 (most recent call first):\n"
        f"{ours}{others}"
    )
    assert log.stat().st_size > worker_process.BYTES
    assert find_late_frame(log, os.getpid()) == '"/own.py", line 7 in hook'
    with log.open("a") as file:
        file.write(f"{worker_process.WENT_ON}\n")
    assert find_late_frame(log, os.getpid()) == ""
