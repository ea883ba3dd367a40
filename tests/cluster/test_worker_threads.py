"""CPU threads of Ray workers on GPUs: their share of the node's cores, or as many as are set.

The node says that it has GPUs; its workers see none, and need none for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ppo_cli.cluster.members import Cluster
from ppo_cli.cluster.worker_process import THREAD_VARIABLES
from ppo_cli.machine.processor import count_cores
from ppo_cli.planning.placement import Placement

GPUS = 2
PLACED = Placement(1, GPUS, (0, 1), (), ())


def count_threads() -> int:
    """Those of torch, in a worker."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(scope="module")
def address(start_ray: Callable[..., str]) -> Iterator[str]:
    """A Ray with GPUs, in place of the one of other files."""
    with pytest.MonkeyPatch.context() as patch:
        for name in THREAD_VARIABLES:  # of the driver: its workers must not take them
            patch.setenv(name, "7")
        yield start_ray(GPUS)


def threads_of(cluster: Cluster, *devices: int) -> int:
    (member,) = cluster.start([cluster.seat("thing", devices)])
    (threads,) = cluster.waits.collect([cluster.ask(member, "start", "run", count_threads)])
    cluster.dismiss(member)
    return int(threads)


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "one_gpu"), [(None, max(1, count_cores() // GPUS)), (1, 1)])
def test_gpus_bring_their_share_of_the_cores(
    address: str, tmp_path: Path, threads: int | None, one_gpu: int
) -> None:
    start = partial(
        Cluster, PLACED, tmp_path, address=address, worker_timeout=240, node_timeout=240
    )
    cluster = start(threads=threads)
    try:
        assert threads_of(cluster, 0) == one_gpu
        assert threads_of(cluster, 0, 1) == (threads or count_cores())
        assert threads_of(cluster) == (threads or 1)
    finally:
        cluster.close()
