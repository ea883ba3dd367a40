"""Which part of a whole tensor each of four ranks holds, worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppo_cli.engine.sharding.tensors import own_piece

# FSDP is the first axis of the mesh, tensor parallelism the second: ranks (0, 0) to (1, 1). Where
# both cut rows, tensor parallelism has cut first, and FSDP cuts what it has left.
STRIDED = (_StridedShard(0, split_factor=2), Shard(0))
WHOLE = range(3)


@pytest.mark.parametrize(
    ("placements", "size", "rows", "columns"),
    [
        (STRIDED, 8, ([0, 1], [4, 5], [2, 3], [6, 7]), [WHOLE] * 4),
        (STRIDED, 7, ([0, 1], [4, 5], [2, 3], [6]), [WHOLE] * 4),
        (STRIDED, 3, ([0], [2], [1], []), [WHOLE] * 4),
        ((Shard(0), Shard(0)), 8, ([0, 1], [2, 3], [4, 5], [6, 7]), [WHOLE] * 4),
        ((Shard(0), Shard(1)), 5, ([0, 1, 2], [0, 1, 2], [3, 4], [3, 4]), [[0, 1], [2]] * 2),
        ((Shard(0), Replicate()), 4, ([0, 1], [0, 1], [2, 3], [2, 3]), [WHOLE] * 4),
        ((Replicate(), Shard(0)), 4, ([0, 1], [2, 3], [0, 1], [2, 3]), [WHOLE] * 4),
        ((Replicate(), Replicate()), 2, [[0, 1]] * 4, [WHOLE] * 4),
    ],
)
def test_the_piece_of_each_rank(
    placements: tuple[Placement, ...],
    size: int,
    rows: list[list[int]],
    columns: list[list[int]],
) -> None:
    full = torch.arange(3.0 * size).view(size, 3)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
        expected = full[list(rows[rank])][:, list(columns[rank])]
        target = DTensor.from_local(
            expected, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        piece = own_piece(full, target)
        dist.destroy_process_group()
        assert torch.equal(piece, expected), rank
