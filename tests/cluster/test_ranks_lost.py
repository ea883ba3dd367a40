"""A rank that runs out of memory where no other can turn back: all of them end, and soon.

The ranks meet by gloo, each in a worker of a real Ray: one that is left in a collective waits there
until it is ended, as one of NCCL does.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo_cli.algo.batch import merge_annotations
from ppo_cli.atomic import is_running
from ppo_cli.cluster.members import Cluster
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.placement import Placement
from ppo_cli.engine.base import MiniBatch
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.ranks import gather_objects, join_ranks
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.errors import PpoError, UserError, WorkerLost
from tests.engine.packed_steps import MIXED, make_batch, scored, settings

pytestmark = pytest.mark.slow
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
        elif fails == "optimizer":
            Optimizer.apply = fail_at(1, torch.OutOfMemoryError("CUDA out of memory"))  # type: ignore[method-assign]
        self._learner.step(self._minibatch)

    def pid(self) -> int:
        return os.getpid()


def fail_at(call: int, error: Exception) -> Any:
    """Stand for `all_gather_single`, or the optimizer's step, until a call of it."""
    calls = 0
    gather = dist.all_gather_single

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return gather(*args, **kwargs)

    return called


@pytest.mark.parametrize(
    ("fails", "kind", "fragment"),
    [
        ("collective", WorkerLost, r"rank 1 ran out of memory inside of a collective"),
        (
            "optimizer",
            UserError,
            r"optimizer step of the actor on learner rank 1 ran out of memory.*lora_rank=16",
        ),
    ],
)
def test_all_ranks_end_within_a_minute(
    address: str, tmp_path: Path, fails: str, kind: type[PpoError], fragment: str
) -> None:
    cluster = Cluster(
        Placement(1, 0, (0, 1), ((2,),), ()), tmp_path, address=address,
        worker_timeout=200, node_timeout=90,
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
