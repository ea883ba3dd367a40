"""Threads: their number within the CPU quota, and how long one spins for the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_cli.machine.processor import count_cores, count_physical_cores, cpu_quota

# CPU seconds of products with pauses between them, in which a waiting thread may spin.
PROBE = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from ppo_cli.cli.app import main
main(["presets"])
import json, time, torch
torch.set_num_threads(2)
sums = torch.randn(256, 256)
sums @ sums
before = time.process_time()
for _ in range(150):
    sums @ sums
    time.sleep(0.003)
print(json.dumps([os.environ.get("GOMP_SPINCOUNT"), time.process_time() - before]))
"""


def version_1(groups: str, quota_us: int) -> dict[str, str]:
    return {
        "proc/self/cgroup": groups, "sys/fs/cgroup/cpu/cpu.cfs_quota_us": f"{quota_us}\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no groups"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None,
            id="no limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5,
            id="a limit of the group",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
             "sys/fs/cgroup/a/cpu.max": "400000 200000\n"}, 2.0,
            id="a limit above",
        ),
        pytest.param(
            version_1("4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n", 300000), 3.0, id="version 1"
        ),
        pytest.param(version_1("4:cpu:/\n", -1), None, id="version 1, no limit"),
    ],
)  # fmt: skip
def test_the_cpu_quota_is_the_smallest(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("fact", "count"), [("core id\t\t: 0\nphysical id\t: 0", 1), ("bogomips\t: 9", None)]
)
def test_hyper_threads_are_one_core(tmp_path: Path, fact: str, count: int | None) -> None:
    (tmp_path / "proc").mkdir()
    blocks = (f"processor\t: {n}\nflags\t\t: fpu ht\n{fact}" for n in range(4096))
    (tmp_path / "proc/cpuinfo").write_text("\n\n".join(blocks))
    assert count_physical_cores(tmp_path) == (count or count_cores())


def probe(**variables: str) -> tuple[str | None, float]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[2], env=environment | variables, check=True,
    )  # fmt: skip
    rounds, seconds = json.loads(done.stdout.splitlines()[-1])
    return rounds, seconds


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has libgomp on Linux only")
def test_a_waiting_thread_sleeps_soon_unless_the_user_says_otherwise() -> None:
    rounds, seconds = probe()
    chosen, spun = probe(GOMP_SPINCOUNT="300000")
    assert (rounds, chosen) == ("10000", "300000")
    assert probe(OMP_WAIT_POLICY="PASSIVE")[0] is None
    if len(os.sched_getaffinity(0)) > 1:
        assert seconds < 0.8 * spun
