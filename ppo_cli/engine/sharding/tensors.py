"""Gather sharded tensors, and scatter whole tensors from the first rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ppo_cli.engine.ranks import Ranks


def gather_copy(tensor: Tensor) -> Tensor:
    """Return a whole copy on the CPU of a tensor that may be sharded; all ranks call."""
    gathered = gather_tensor(tensor)
    # A whole tensor on the CPU may be the live one: copy it.
    piece = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_live = gathered.device.type == "cpu" and gathered.data_ptr() == piece.data_ptr()
    return gathered.clone() if is_live else gathered.cpu()


@torch.no_grad()
def gather_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole tensor on its device, or the tensor itself if it is not sharded.

    With a `dtype`, shards are cast before they are sent: the same numbers in fewer bytes.
    """
    pieces: Any = tensor.detach().to(dtype or tensor.dtype)
    if not isinstance(tensor, DTensor):
        return pieces  # type: ignore[no-any-return]
    device = tensor.device_mesh.device_type
    if pieces.device.type != device:  # pieces in host memory
        pieces = pieces.to(device)
    gathered: Tensor = pieces.full_tensor()
    return gathered


@torch.no_grad()
def scatter_from_rank0(target: Tensor, full: Tensor | None, ranks: Ranks) -> None:
    """Copy the first rank's whole tensor into a tensor that may be sharded; all ranks call.

    Raises ValueError on all ranks when the shapes differ.
    """
    fits = full is not None and full.shape == target.shape
    if ranks.alone:
        if full is None or not fits:
            raise ValueError(_misfit(target))
        target.copy_(full)
        return
    assert ranks.mesh is not None
    device = torch.device(ranks.mesh.device_type)
    # Only the first rank knows the shape that was read.
    agreed = torch.tensor([int(fits)], device=device)
    dist.broadcast(agreed, 0)
    if not agreed.item():
        raise ValueError(_misfit(target))
    received = torch.empty(target.shape, dtype=target.dtype, device=device)
    if full is not None and ranks.rank == 0:
        received.copy_(full)
    dist.broadcast(received, 0)
    if isinstance(target, DTensor):
        target.to_local().copy_(own_piece(received, target))
    else:
        target.copy_(received)


def own_piece(piece: Tensor, target: DTensor) -> Tensor:
    """Return this rank's shard of a whole tensor, laid out like `target`."""
    mesh, coordinate = target.device_mesh, target.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = [
        (isinstance(placement, _StridedShard), placement.dim, coordinate[axis], mesh.size(axis))
        for axis, placement in enumerate(target.placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    # A strided shard (tensor parallelism under FSDP2, private in torch 2.13) cuts the other shards.
    for _, dim, index, count in sorted(cuts, key=lambda cut: cut[0]):
        pieces = piece.chunk(count, dim)
        empty = piece.narrow(dim, 0, 0)
        piece = pieces[index] if index < len(pieces) else empty
    return piece


def _misfit(target: Tensor) -> str:
    return f"no whole tensor of shape {tuple(target.shape)} was given"
