"""Ranks alone; several of them meet in test_sharding.py."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ppo_cli.engine.ranks import (
    ALONE,
    Ranks,
    gather_objects,
    join_ranks,
    run_on_all_ranks,
    sum_over_ranks,
)


def test_alone_talks_to_nobody() -> None:
    assert ALONE.alone and ALONE.reports_results and ALONE.data_size == 1 and ALONE.data_rank == 0
    assert gather_objects(ALONE, "x") == ["x"]
    assert sum_over_ranks(ALONE, 2.5) == 2.5 and math.isnan(sum_over_ranks(ALONE, math.nan))
    assert run_on_all_ranks(ALONE, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_on_all_ranks(ALONE, lambda: 1 // 0)


def test_tensor_parallel_neighbours_share_rows_and_one_speaks() -> None:
    ranks = [Ranks(rank=rank, size=8, tensor_size=2) for rank in range(8)]
    assert [r.data_rank for r in ranks] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {r.data_size for r in ranks} == {4}
    assert [r.reports_results for r in ranks] == [True, False] * 4


def test_waits_count_since_they_were_last_asked_for() -> None:
    ranks = Ranks(waits_s=[0.25, 0.5])
    assert (ranks.pop_wait_seconds(), ranks.pop_wait_seconds()) == (0.75, 0.0)


@pytest.mark.parametrize(("size", "tensor", "shard"), [(3, 2, -1), (4, 2, 4), (4, 1, 3)])
def test_sizes_that_do_not_divide_are_refused(
    size: int, tensor: int, shard: int, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{size} ranks cannot be"):
        join_ranks(
            0, size, init_method=f"file://{tmp_path}/meet", device=torch.device("cpu"),
            tensor_size=tensor, shard_size=shard, timeout_s=1.0,
        )  # fmt: skip
