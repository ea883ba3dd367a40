"""CPU threads of Ray workers on GPUs: their share of the node's cores, or as many as are set.

The node says that it has GPUs; its workers see none, and need none for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.ray_session import OwnRay
from ppo_cli.config.machine.processor import count_cores
from ppo_cli.config.placement import Placement

GPUS = 2
PLACED = Placement(1, GPUS, (0, 1), (), ())


def count_threads() -> int:
    """Those of torch, in a worker."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray with GPUs, in place of the one of other files."""
    from ray._private import ray_constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        patch.setenv("OMP_NUM_THREADS", "7")  # of the driver: no concern of its workers
        ray = OwnRay(gpus=GPUS, logs=tmp_path_factory.mktemp("ray"))
        try:
            yield ray.await_address(120, lambda: None)
        finally:
            ray.close()


def threads_of(cluster: Cluster, *devices: int) -> int:
    (member,) = cluster.start([cluster.seat("thing", devices)])
    (threads,) = cluster.waits.collect([cluster.ask(member, "start", "run", count_threads)])
    cluster.dismiss(member)
    return int(threads)


@pytest.mark.parametrize(("asked", "one"), [(None, max(1, count_cores() // GPUS)), (1, 1)])
def test_gpus_bring_their_share_of_the_cores(
    address: str, tmp_path: Path, asked: int | None, one: int
) -> None:
    start = partial(Cluster, PLACED, tmp_path, address=address, worker_timeout=60, node_timeout=90)
    cluster = start(threads=asked)
    try:
        assert threads_of(cluster, 0) == one
        assert threads_of(cluster, 0, 1) == (asked or count_cores())
        assert threads_of(cluster) == (asked or 1)
    finally:
        cluster.close()
