"""When Ray itself, or the driver, is lost: it is said within seconds, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.ray_process import LOCAL_ONLY
from ppo_cli.config.placement import Placement
from ppo_cli.errors import Interrupted, WorkerLost
from tests.cluster.conftest import MARK, MarkedRay, local_ray
from tests.cluster.test_workers import Hosted

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
ONE_NODE = Placement(1, 0, (0, 1), ((2,),), ())
TWO_NODES = Placement(2, 0, (0, 1), ((2,),), ())


class Sleeper:
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


class Polite(Sleeper):
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def close(self) -> None:
        self._mark.touch()


def seconds_until_lost(work: Callable[[], object], match: str) -> float:
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=match):
        work()
    return time.monotonic() - started


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[MarkedRay]:
    """A Ray that the cluster under test has not started."""
    with local_ray(tmp_path / "foreign.log", variables={}) as ray:  # reached as other nodes do
        yield ray


def test_a_joined_cluster_is_waited_for_used_left_and_lost(
    foreign: MarkedRay, tmp_path: Path
) -> None:
    address = foreign.process.await_address(90)
    notes: list[str] = []
    with pytest.raises(WorkerLost, match="After 1 s still waiting for 2 nodes; the cluster has 1"):
        Cluster(TWO_NODES, tmp_path, worker_timeout=60, node_timeout=1, address=address)
    with pytest.raises(Interrupted, match="SIGINT"):
        Cluster(
            TWO_NODES, tmp_path, worker_timeout=60, node_timeout=60, address=address,
            tell=notes.append, stop_requested=lambda: "SIGINT",
        )  # fmt: skip
    first = Cluster(ONE_NODE, tmp_path, worker_timeout=60, node_timeout=60, address=address)
    worker = Hosted(first, Sleeper, role="thing 0").call("sleep", 0)
    polite = [
        Hosted(first, partial(Polite, tmp_path / f"closed-{i}"), role=f"polite {i}")
        for i in range(2)
    ]
    os.kill(polite[0].member.pid, signal.SIGKILL)
    first.close([host.member for host in polite])
    assert (tmp_path / "closed-1").exists()  # though the one before it was dead
    until = time.monotonic() + 5  # Ray tells of an end just before the process is gone
    while worker in foreign.running() and time.monotonic() < until:
        time.sleep(0.1)
    assert worker not in foreign.running()
    assert "raylet" in foreign.running().values()  # not ours, so it goes on

    second = Cluster(ONE_NODE, tmp_path, worker_timeout=60, node_timeout=60, address=address)
    try:
        thing = Hosted(second, Sleeper, role="thing 0")
        threading.Timer(0.2, os.kill, (foreign.part("gcs_server"), signal.SIGKILL)).start()
        assert seconds_until_lost(lambda: thing.call("sleep", 60), "does not answer") < 20
    finally:
        second.close()


DRIVER = """
import signal, sys, time
from pathlib import Path
from ppo_cli.config.placement import Placement
from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.ray_process import RayOptions, RayProcess
from tests.cluster.test_ray_lost import ONE_NODE, Hosted, Sleeper

logs = Path(sys.argv[1])
ray = RayProcess(RayOptions(2, 0), log=logs / "ray.log")
address = ray.await_address(90, lambda: None)
cluster = Cluster(ONE_NODE, logs, address=address, worker_timeout=60, node_timeout=90)
handled = signal.getsignal(signal.SIGTERM)
assert handled == signal.SIG_DFL, handled
seen = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(number))
thing = Hosted(cluster, Sleeper, role="thing 0")
pid = thing.call("sleep", 0)
print(ray.folder, flush=True)
while len(seen) < 2:
    time.sleep(0.05)
assert thing.call("sleep", 0.3) == pid
print("still there", flush=True)
thing.call("sleep", 60)
"""


def test_signals_of_the_terminal_spare_the_workers_and_a_dead_driver_leaves_nothing(
    tmp_path: Path,
) -> None:
    log, ray = tmp_path / "driver.log", MarkedRay(str(tmp_path))
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, cwd=ROOT,
            env=os.environ | LOCAL_ONLY | {MARK: str(tmp_path)},
        ) as driver,
    ):  # fmt: skip
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, log.read_text()
        os.killpg(driver.pid, signal.SIGINT)
        os.killpg(driver.pid, signal.SIGTERM)
        assert driver.stdout.readline() == "still there\n", log.read_text()
        assert {"raylet", "gcs_server"} <= set(ray.running().values())
        driver.kill()
        driver.wait(10)
    assert ray.await_end(8) == {}
    assert not Path(line.strip()).exists()
