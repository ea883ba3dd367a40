"""Threads that wait: asleep beside other work, spinning alone, and never fewer of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_cli.engine.threads import cpu_quota, crowded

linux_only = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="torch brings libgomp on Linux only"
)
# On two CPUs at most: prints what it finds as JSON, once it sleeps or its watch is off. The last
# number is its CPU seconds for products with pauses between them, in which a thread may spin.
TWO_CPUS = "import os\nos.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])\n"
PROBE = f"""{TWO_CPUS}
import json, time, torch
from ppo_cli.engine.threads import Waiting
torch.set_num_threads(2)
waiting, end = Waiting(), time.monotonic() + 60
sums = torch.randn(256, 256)
while waiting.watches and not waiting.asleep and time.monotonic() < end:
    sums @ sums
time.sleep(0.2)
before = time.process_time()
for _ in range(150):
    sums @ sums
    time.sleep(0.003)
seconds = time.process_time() - before
print(json.dumps([waiting.watches, waiting.asleep, torch.get_num_threads(), seconds]))
waiting.close()
"""
BUSY = f"{TWO_CPUS}\nimport time\nend = time.monotonic() + 100\nwhile time.monotonic() < end: pass"


def test_crowded_is_slow_to_change_its_mind() -> None:
    assert not crowded(2, 0.2, 2, False) and crowded(2, 0.3, 2, False)
    assert crowded(2, 0.2, 2, True) and not crowded(2, 0.1, 2, True)
    assert not crowded(8, 7.0, 16, False) and crowded(8, 9.0, 16, False)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "400000 200000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
    ids=["no groups", "no limit", "own limit", "limit above", "version 1", "version 1, no limit"],
)
def test_the_cpu_quota_is_the_smallest(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


def probe(root: Path, **variables: str) -> tuple[bool, bool, int, float]:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | variables
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, cwd=root,
        env=environment, check=True,
    )  # fmt: skip
    watches, asleep, threads, seconds = json.loads(done.stdout)
    return watches, asleep, threads, seconds


@linux_only
@pytest.mark.slow
def test_waiting_threads_sleep_beside_other_work() -> None:
    root = Path(__file__).parents[2]
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    try:
        watches, asleep, threads, seconds = probe(root)
        assert watches and asleep and threads == 2
        spun = probe(root, GOMP_SPINCOUNT="300000")
        assert spun[:3] == (False, False, 2)  # who chose how to wait is left alone
        assert seconds < 0.6 * spun[3]
    finally:
        for process in others:
            process.kill()
            process.wait()
