"""When Ray, the driver or a rank is lost: it is said within seconds, and all of it ends."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.atomic import is_running
from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.ray_process import RayProcess
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import gather_objects, join_ranks
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import Interrupted, PpoError, UserError, WorkerLost
from ppo_cli.planning.placement import Placement
from ppo_cli.processes.reaper import descendants
from tests.cluster.conftest import local_ray
from tests.cluster.test_workers import Hosted
from tests.engine.packed_steps import MIXED, make_batch, scored, settings

pytestmark = pytest.mark.slow
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


def part(ray: RayProcess, name: str) -> int:
    """Return the process of a part of Ray."""
    for pid in descendants(ray.pid):
        with suppress(OSError):  # a worker that has just ended
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise AssertionError(f"{name} does not run")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[RayProcess]:
    """A Ray that the cluster under test has not started."""
    with local_ray(tmp_path / "foreign.log", variables={}) as ray:  # reached as other nodes do
        yield ray


def test_a_joined_cluster_is_waited_for_used_left_and_lost(
    foreign: RayProcess, tmp_path: Path
) -> None:
    address = foreign.await_address(300)
    notes: list[str] = []
    with pytest.raises(WorkerLost, match="After 1 s still waiting for 2 nodes; the cluster has 1"):
        Cluster(TWO_NODES, tmp_path, worker_timeout=240, node_timeout=1, address=address)
    with pytest.raises(Interrupted, match="SIGINT"):
        Cluster(
            TWO_NODES, tmp_path, worker_timeout=240, node_timeout=240, address=address,
            tell=notes.append, stop_requested=lambda: "SIGINT",
        )  # fmt: skip
    first = Cluster(ONE_NODE, tmp_path, worker_timeout=240, node_timeout=240, address=address)
    worker = Hosted(first, Sleeper, role="thing 0").call("sleep", 0)
    polite = [
        Hosted(first, partial(Polite, tmp_path / f"closed-{i}"), role=f"polite {i}")
        for i in range(2)
    ]
    os.kill(polite[0].member.pid, signal.SIGKILL)
    first.close([host.member for host in polite])
    assert (tmp_path / "closed-1").exists()  # though the one before it was dead
    until = time.monotonic() + 240  # Ray tells of an end just before the process is gone
    while is_running(worker) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(worker)
    assert is_running(part(foreign, "raylet"))  # not ours, so it goes on

    second = Cluster(ONE_NODE, tmp_path, worker_timeout=240, node_timeout=240, address=address)
    try:
        thing = Hosted(second, Sleeper, role="thing 0")
        threading.Timer(0.2, os.kill, (part(foreign, "gcs_server"), signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(WorkerLost, match="does not answer"):
            thing.call("sleep", 900)
        assert time.monotonic() - started < 240
    finally:
        second.close()


NCCL = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nFailed to CUDA calloc 10485760 bytes: Cuda failure 2 'out of "
    "memory'"
)


class Rank:
    """A learner that may fail in its next update."""

    def meet(self, rank: int, point: str) -> None:
        ranks = join_ranks(rank, 2, init_method=point, device=torch.device("cpu"), timeout_s=600.0)
        tokenizer = load_tokenizer(str(model_folder("embedded")))
        self._learner = Learner(settings(), tokenizer, ranks, total_steps=1)
        batch = make_batch(MIXED, 0)
        parts = gather_objects(ranks, self._learner.annotate(batch))
        self._minibatch = MiniBatch(scored(merge_annotations(batch, parts), 0), True, True)

    def step(self, fails: str = "") -> None:
        if fails == "collective":
            dist.all_gather_single = fail_at(5, dist.DistBackendError(NCCL))  # type: ignore[assignment]
        elif fails == "sleep":
            dist.all_gather_single = call_at(5, lambda: time.sleep(600))  # type: ignore[assignment]
        elif fails == "stop":
            dist.all_gather_single = call_at(5, lambda: os.kill(os.getpid(), signal.SIGSTOP))  # type: ignore[assignment]
        elif fails == "optimizer":
            Optimizer.apply = fail_at(1, torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore[method-assign]
        self._learner.step(self._minibatch)

    def pid(self) -> int:
        return os.getpid()


def fail_at(call: int, error: Exception) -> Any:
    """Stand for `all_gather_single`, or the optimizer's step, until a call of it."""

    def fail() -> None:
        raise error

    return call_at(call, fail)


def call_at(call: int, fault: Callable[[], None]) -> Any:
    """Stand for `all_gather_single`; one call of it has a fault."""
    calls = 0
    gather = dist.all_gather_single

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            fault()
        return gather(*args, **kwargs)

    return called


LIMIT_S = 15.0


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("sleep", r'\(at ".*test_ray_lost.py", line \d+ in <lambda>\)'),
        pytest.param("stop", "stopped", marks=pytest.mark.weekly),
    ],
)
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(
    address: str, tmp_path: Path, fault: str, place: str
) -> None:
    cluster = Cluster(
        Placement(1, 0, (0, 1), ((2,),), ()), tmp_path, address=address,
        worker_timeout=LIMIT_S, node_timeout=240,
    )  # fmt: skip
    try:
        ranks = cluster.start([cluster.seat(f"learner rank {rank}", []) for rank in range(2)])
        build = [cluster.ask(rank, "start", "build", Rank) for rank in ranks]
        point = f"file://{tmp_path}/meet"
        meet = [cluster.ask(m, "meet", "call", rank, point) for rank, m in enumerate(ranks)]
        cluster.waits.collect([*build, *meet], 200)
        steps = zip(ranks, ("", fault), strict=True)
        with pytest.raises(WorkerLost) as caught:
            cluster.waits.collect([cluster.ask(rank, "step", "call", how) for rank, how in steps])
    finally:
        cluster.close()
    hung, _, others = str(caught.value).partition(" has not answered `step` for 15 s")
    assert hung.startswith("Learner rank 1") and re.search(place, hung), caught.value
    assert "learner rank 0" in others.partition(";")[0], caught.value


@pytest.mark.parametrize(
    ("fails", "kind", "fragment"),
    [
        ("collective", WorkerLost, r"rank 1 ran out of memory inside of a collective"),
        pytest.param(
            "optimizer",
            UserError,
            r"optimizer step of the actor on learner rank 1 ran out of memory.*lora_rank=16",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_all_ranks_end_within_a_minute(
    address: str, tmp_path: Path, fails: str, kind: type[PpoError], fragment: str
) -> None:
    cluster = Cluster(
        Placement(1, 0, (0, 1), ((2,),), ()), tmp_path, address=address,
        worker_timeout=400, node_timeout=240,
    )  # fmt: skip
    try:
        ranks = [cluster.host(Rank, role=f"learner rank {rank}") for rank in range(2)]
        point = f"file://{tmp_path}/meet"
        cluster.waits.collect(
            [cluster.ask(member, "meet", "call", rank, point) for rank, member in enumerate(ranks)]
        )
        pids = cluster.call(ranks, "pid")
        started = time.monotonic()
        steps = zip(ranks, ("", fails), strict=True)
        with pytest.raises(kind, match=fragment):
            cluster.waits.collect([cluster.ask(rank, "step", "call", how) for rank, how in steps])
    finally:
        cluster.close()
    while any(map(is_running, pids)) and time.monotonic() - started < 60:
        time.sleep(0.2)
    assert not any(map(is_running, pids))
    print(f"all ended {time.monotonic() - started:.1f} s after the step began")
