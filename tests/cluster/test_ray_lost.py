"""When Ray itself, or the driver, is lost: it is said within seconds, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
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
from ppo_cli.cluster.ray_session import HERE_ONLY, OwnRay
from ppo_cli.config.placement import Placement
from ppo_cli.errors import Interrupted, WorkerLost
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


def session_of(pid: int) -> dict[int, str]:
    """Processes of the same session that run, by id: name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            state, _, _, session = tail.split()[:4]
            if int(session) == pid and state != "Z":
                found[int(entry.name)] = head.partition("(")[2]
    return found


def await_end(session: int, seconds: float) -> dict[int, str]:
    until = time.monotonic() + seconds
    while session_of(session) and time.monotonic() < until:
        time.sleep(0.1)
    return session_of(session)


def kill_part(session: int, name: str) -> None:
    (pid,) = (pid for pid, known in session_of(session).items() if known == name)
    os.kill(pid, signal.SIGKILL)


def seconds_until_lost(work: Callable[[], object], match: str) -> float:
    started = time.monotonic()
    with pytest.raises(WorkerLost, match=match):
        work()
    return time.monotonic() - started


def test_a_lost_raylet_is_told_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ray = OwnRay(gpus=0, logs=tmp_path)
    try:
        ray.await_address(90, lambda: None)
        assert ray.trouble() is None
        kill_part(ray.pid, "raylet")
        until = time.monotonic() + 30
        while (told := ray.trouble()) is None:
            assert time.monotonic() < until
            time.sleep(0.1)
        assert "lost its raylet" in told
    finally:
        ray.close()
        ray.close()
    assert await_end(ray.pid, 3) == {}
    assert not ray.folder.exists()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A Ray that is not ours: process id and address."""
    folder = Path("/tmp") / f"ppo-test-{os.getpid()}"
    folder.mkdir()
    wish = {"folder": str(folder), "num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}
    with subprocess.Popen(
        [sys.executable, "-m", "ppo_cli.cluster.ray_session", json.dumps(wish)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True, cwd=ROOT,
    ) as head:  # fmt: skip
        assert head.stdin is not None and head.stdout is not None
        yield head.pid, json.loads(head.stdout.readline())["address"]
        head.stdin.close()
        head.wait(20)
    assert not folder.exists()


def test_a_joined_cluster_is_waited_for_used_left_and_lost(
    foreign: tuple[int, str], tmp_path: Path
) -> None:
    head, address = foreign
    told: list[str] = []
    with pytest.raises(WorkerLost, match="After 1 s still waiting for 2 nodes; the cluster has 1"):
        Cluster(TWO_NODES, tmp_path, worker_timeout=60, node_timeout=1, address=address)
    with pytest.raises(Interrupted, match="SIGINT"):
        Cluster(
            TWO_NODES, tmp_path, worker_timeout=60, node_timeout=60, address=address,
            tell=told.append, stop_requested=lambda: "SIGINT",
        )  # fmt: skip
    first = Cluster(ONE_NODE, tmp_path, worker_timeout=60, node_timeout=60, address=address)
    worker = Hosted(first, Sleeper, role="thing 0").call("sleep", 0)
    polite = [
        Hosted(first, partial(Polite, tmp_path / f"closed-{i}"), role=f"polite {i}")
        for i in range(2)
    ]
    os.kill(polite[0].member.pid, signal.SIGKILL)
    first.close([one.member for one in polite])
    assert (tmp_path / "closed-1").exists()  # though the one before it was dead
    until = time.monotonic() + 5  # Ray tells of an end just before the process is gone
    while worker in session_of(head) and time.monotonic() < until:
        time.sleep(0.1)
    assert worker not in session_of(head)
    assert "raylet" in session_of(head).values()  # not ours, so it goes on

    second = Cluster(ONE_NODE, tmp_path, worker_timeout=60, node_timeout=60, address=address)
    try:
        thing = Hosted(second, Sleeper, role="thing 0")
        threading.Timer(0.2, kill_part, (head, "gcs_server")).start()
        assert seconds_until_lost(lambda: thing.call("sleep", 60), "does not answer") < 20
    finally:
        second.close()


DRIVER = """
import signal, sys, time
from pathlib import Path
from ppo_cli.config.derived import Placement
from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.ray_session import OwnRay
from tests.cluster.test_ray_lost import ONE_NODE, Hosted, Sleeper

logs = Path(sys.argv[1])
ray = OwnRay(gpus=0, logs=logs)
address = ray.await_address(90, lambda: None)
cluster = Cluster(ONE_NODE, logs, address=address, worker_timeout=60, node_timeout=90)
handled = signal.getsignal(signal.SIGTERM)
assert handled == signal.SIG_DFL, handled
seen = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: seen.append(number))
thing = Hosted(cluster, Sleeper, role="thing 0")
pid = thing.call("sleep", 0)
print(ray.pid, ray.folder, flush=True)
while len(seen) < 2:
    time.sleep(0.05)
assert thing.call("sleep", 0.3) == pid
print("still there", flush=True)
thing.call("sleep", 60)
"""


def test_signals_of_the_terminal_spare_the_workers_and_a_dead_driver_leaves_nothing(
    tmp_path: Path,
) -> None:
    log = tmp_path / "driver.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, cwd=ROOT,
            env=os.environ | HERE_ONLY,
        ) as driver,
    ):  # fmt: skip
        assert driver.stdout is not None
        words = driver.stdout.readline().split()
        assert words, log.read_text()
        head, folder = int(words[0]), Path(words[1])
        os.killpg(driver.pid, signal.SIGINT)
        os.killpg(driver.pid, signal.SIGTERM)
        assert driver.stdout.readline() == "still there\n", log.read_text()
        names = set(session_of(head).values())
        assert {"raylet", "gcs_server"} <= names
        driver.kill()
        driver.wait(10)
    assert await_end(head, 8) == {}
    assert not folder.exists()
