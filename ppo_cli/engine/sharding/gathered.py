"""A model sharded by FSDP2: its gathers and reductions, and recovery when a pass is interrupted.

All ranks must join the same collectives in the same order. A rank that runs out of memory between
two of them replays the micro-batch with its shortest row (`micro_batches.run_within_memory`); the
collectives that it has joined already are counted here and skipped in the replay.

Uses private parts of FSDP2, tried with torch 2.13: `DefaultAllGather`, `DefaultReduceScatter`,
`_get_fsdp_state`, `_fsdp_param_groups`, `_sharded_param_data` and `_unsharded_param`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from ppo_cli.engine.models.policy import WeightsContext, Work
from ppo_cli.engine.ranks import explain_collective_errors
from ppo_cli.engine.sharding.host_memory import allocate_host


class Root(nn.Module):
    """The module that FSDP2 wraps: work runs inside its forward pass, with gathered weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Do the work; FSDP2 attaches its backward hooks to the returned tensors.

        Views are cloned: an in-place edit of a view would lose the hook.
        """
        return tuple(t.clone() if t._is_view() else t for t in work(*tensors))


class CountedGather(DefaultAllGather):
    """FSDP2's all-gather, which counts how often this rank has `joined` it in a micro-batch.

    In a replay (`ShardedModel.begin_replay`) the first `skips` calls fill the weights with zeros
    instead: the other ranks have completed those gathers already.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.joined = 0
        self.skips = 0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards of all ranks of the group."""
        if self.skips:
            self.skips -= 1
            output_tensor.zero_()
            return None
        with explain_collective_errors(self._rank):
            work = super().__call__(output_tensor, input_tensor, group, async_op)
        self.joined += 1
        return work


class CountedReduction(DefaultReduceScatter):
    """FSDP2's reduce-scatter of a module and the all-reduce between replicas after it, counted.

    FSDP2 has no hook that replaces this all-reduce. To skip it, the module is set to need none
    until as many reductions have begun; `allocate` is called for two buffers per reduction.
    """

    def __init__(self, rank: int, module: FSDPModule, *, copies: bool) -> None:
        self._rank = rank
        self._module = module
        self.joined = 0
        self.all_reduced = 0
        self.skips = 0
        self._skipped_buffers = 0
        # Replicas exist only in a mesh with more than one group.
        if copies:
            module.set_all_reduce_hook(self._note_all_reduce)

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate a buffer, and count down the all-reduces to skip."""
        # FSDP2 allocates right before it decides on the all-reduce.
        buffer = super().allocate(*args, **kwargs)
        if self._skipped_buffers:
            self._skipped_buffers -= 1
            self.skip_all_reduce()
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Add up the gradients of all ranks of the group; each rank gets its shard."""
        if self.skips:
            self.skips -= 1
            output_tensor.zero_()
            return None
        with explain_collective_errors(self._rank):
            work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        self.joined += 1
        return work

    def begin_micro_batch(self) -> None:
        """Start counting for a new micro-batch."""
        self.joined = self.all_reduced = self.skips = self._skipped_buffers = 0
        self._module.set_requires_all_reduce(True, recurse=False)

    def begin_replay(self) -> None:
        """Skip the reductions that were counted."""
        # Each reduction allocates an input and an output buffer.
        self.skips, self._skipped_buffers = self.joined, 2 * self.all_reduced

    def skip_all_reduce(self) -> None:
        """Disable the module's next all-reduce if this rank has joined it already."""
        self._module.set_requires_all_reduce(not self._skipped_buffers, recurse=False)

    def _note_all_reduce(self, reduced: Tensor) -> None:
        self.all_reduced += 1


class ShardedModel(WeightsContext):
    """Runs work in a sharded model, and leaves the model sharded even after an error.

    While awake, a model that `stays_whole` gathers its weights once, and the ranks reduce their
    gradients once, in the backward pass that `sync_gradients` announces. A frozen model can keep
    its shards in host memory between uses; they are copied to `device` once per use.
    """

    def __init__(
        self, root: FSDPModule, stays_whole: bool, device: torch.device | None = None
    ) -> None:
        self._root = root
        self._stays_whole = stays_whole
        self._device = device
        self._inside = False
        self._homes: list[tuple[Any, Tensor]] = []  # parameters of FSDP2, their pieces there
        if device is not None:
            # The shards' home is host memory, pinned for a GPU.
            parameters = [p for group, _ in self._collectives() for p in group.fsdp_params]
            homes = [p._sharded_param_data for p in parameters]
            if device.type != "cpu":
                places = allocate_host(homes, pinned=device.type == "cuda")
                homes = [place.copy_(home) for place, home in zip(places, homes, strict=True)]
            self._homes = list(zip(parameters, homes, strict=True))
            self._place_pieces(torch.device("cpu"))

    def __call__(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather the weights, do the work, free the weights."""
        if self._inside:  # a reference that shares the weights, called inside the policy's work
            return work(*tensors)
        if self._homes and not self._depth:
            with self.awake():
                return self(work, *tensors)
        # Nested work of a reference runs in the same forward pass.
        self._inside = True
        try:
            outputs: tuple[Tensor, ...] = self._root(work, *tensors)  # type: ignore[operator]
        except BaseException:
            self.reset()
            raise
        finally:
            self._inside = False
        return outputs

    def _wake(self) -> None:
        """Keep gathered weights (`stays_whole`) and shards from host memory."""
        if self._device is not None:
            self._place_pieces(self._device)
        if self._stays_whole:
            self._root.set_reshard_after_forward(False)

    def _rest(self) -> None:
        """Free them."""
        if self._stays_whole:
            self._root.set_reshard_after_forward(True)
            for module in sharded_modules(self._root):
                module.reshard()
        self._place_pieces(torch.device("cpu"))

    def _place_pieces(self, device: torch.device) -> None:
        """Set a frozen model's shards to those in host memory, or to copies on a device."""
        for parameter, home in self._homes:
            # FSDP2 keeps a flat shard and a view of it in the parameter's shape.
            piece = home.to(device, non_blocking=True)
            local = parameter.sharded_param._local_tensor
            parameter._sharded_param_data = piece  # flat, with its padding
            parameter.sharded_param._local_tensor = piece.as_strided(local.shape, local.stride())

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward pass reduces the gradients of the ranks."""
        if self._stays_whole:
            # Without reduction, gathered weights stay for the next backward pass.
            self._root.set_requires_gradient_sync(now)
            self._root.set_reshard_after_backward(now)
            for _, reduction in self._collectives() if now else ():
                reduction.skip_all_reduce()

    def begin_micro_batch(self) -> None:
        """Start counting the collectives of a micro-batch."""
        for group, reduction in self._collectives():
            # Weights that are gathered now would have to be gathered again after `reset`.
            group._all_gather_comm.joined = int(group.is_unsharded)
            group._all_gather_comm.skips = 0
            reduction.begin_micro_batch()

    def begin_replay(self) -> None:
        """Let the next pass skip the collectives that this rank has already joined."""
        for group, reduction in self._collectives():
            group._all_gather_comm.skips = group._all_gather_comm.joined
            reduction.begin_replay()
            reduction.skip_all_reduce()

    def _collectives(self) -> Iterator[tuple[Any, CountedReduction]]:
        for module in sharded_modules(self._root):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield group, group._reduce_scatter_comm  # type: ignore[misc]

    def reset(self) -> None:
        """Reshard the model after an interrupted pass; unreduced gradients are lost."""
        if self._root._get_fsdp_state()._is_root is None:  # never used: there is no state yet
            return
        self._root.reset_iter_state()
        # It keeps gradients of gathered weights that FSDP2 has not reduced yet.
        for module in sharded_modules(self._root):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def sharded_modules(root: Any) -> Sequence[FSDPModule]:
    """Return the modules that FSDP2 gathers one by one."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]
