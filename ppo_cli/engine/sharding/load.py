"""Load a model onto all ranks: the first rank reads it, FSDP2 shards it over all.

Only the first rank ever holds a complete model, and only while loading. The others build the
architecture without weights; layer by layer, weights are broadcast and sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ppo_cli.config.schema.algorithm import Sharding
from ppo_cli.engine.cpu.runtime import return_freed_memory
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from ppo_cli.engine.ranks import Ranks, gather_objects, run_on_all_ranks
from ppo_cli.engine.sharding.gathered import (
    CountedGather,
    CountedReduction,
    Root,
    ShardedModel,
    sharded_modules,
)
from ppo_cli.engine.sharding.host_memory import OffloadedModel
from ppo_cli.engine.sharding.tensor_parallel import parallelize_modules, plan_tensor_parallel
from ppo_cli.errors import ModelError


@dataclass
class ExtractedWeights:
    """The weights of a model whose tensors were replaced by placeholders on the meta device.

    `names` maps each placeholder to its tensor's name. `weights` is filled on the first rank only;
    a parameter is dropped when it has been distributed.
    """

    names: dict[Tensor, str] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def distribute(self, module: nn.Module, device: torch.device) -> None:
        """Broadcast the first rank's weights into a part of the model; all ranks call."""
        received: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or tensor not in self.names:
                        continue
                    if tensor not in received:
                        received[tensor] = self._broadcast_weight(tensor, device)
                    tensors[name] = received[tensor]  # type: ignore[assignment]

    def _broadcast_weight(self, placeholder: Tensor, device: torch.device) -> Tensor:
        """Return a placeholder's tensor on `device`, broadcast from the first rank; all ranks call.

        The first rank then drops its copy of a parameter.
        """
        name, is_parameter = self.names[placeholder], isinstance(placeholder, nn.Parameter)
        weights = self.weights.pop(name, None) if is_parameter else self.weights.get(name)
        sent = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=device)
        if weights is not None:
            sent.copy_(weights)
        dist.broadcast(sent, 0)
        if is_parameter:
            return nn.Parameter(sent, requires_grad=placeholder.requires_grad)
        return sent


def extract_weights(model: nn.Module, ranks: Ranks, path: str) -> ExtractedWeights:
    """Replace all parameters and buffers of a model by placeholders; all ranks call.

    Only the first rank keeps the weights. Tensors that it shares become shared on all ranks: its
    files decide whether the output head is tied. Raises ModelError on all ranks when the ranks'
    models differ.
    """
    # Every place in the model that holds a tensor, with the dict that holds it.
    places = [
        (f"{prefix}.{name}", tensors, name)
        for prefix, part in model.named_modules()
        for tensors in (part._parameters, part._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    first: dict[Tensor | None, str] = {}  # the first name of each tensor
    owners = {place: first.setdefault(tensors[name], place) for place, tensors, name in places}
    owners = gather_objects(ranks, owners)[0]
    extracted = ExtractedWeights()
    placeholders: dict[str, Tensor] = {}
    for place, tensors, name in places:
        owner, tensor = owners.get(place, place), tensors[name]
        assert tensor is not None
        if owner not in placeholders:
            placeholders[owner] = _placeholder(tensor)
            extracted.names[placeholders[owner]] = owner
            if ranks.rank == 0:
                extracted.weights[owner] = tensor.detach()
        tensors[name] = placeholders[owner]
    # The other nodes may have another folder under the same path.
    layout = [(name, tuple(t.shape), str(t.dtype)) for t, name in extracted.names.items()]
    if any(other != layout for other in gather_objects(ranks, layout)):
        raise ModelError(
            f"{path} holds another model on some nodes than on the first: give all nodes the "
            "same folder."
        )
    return extracted


def _placeholder(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


# This logger warns about layouts that FSDP2 itself creates for tensor-parallel weights.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

Loaded = TypeVar("Loaded", Policy, ValueModel)


def load_sharded(
    load: Callable[..., Loaded],
    path: str,
    ranks: Ranks,
    sharding: Sharding,
    compute: Compute,
    *,
    gradient_checkpointing: bool = False,
    compiles: bool = False,
    offload_between_uses: bool = False,
    prepare: Callable[[Loaded], Loaded] = lambda loaded: loaded,
    **options: Any,
) -> Loaded:
    """Load a model with `load` (`load_policy`, `load_value_model`) onto all ranks; all call.

    The first rank reads the weights, the others build the model `empty`; an error on one rank is
    raised on all. `prepare` changes the model on every rank before it is sharded. With
    `offload_between_uses`, a frozen model's shards are in host memory while it is not awake.
    """
    if not ranks.alone:
        return_freed_memory()
    loaded = run_on_all_ranks(ranks, lambda: prepare(load(path, empty=ranks.rank != 0, **options)))
    # In training mode dropout is random, so log-probs of two passes could not be compared. The
    # modules of an adapter start in that mode.
    loaded.model.eval()
    if compiles:
        # Imported on use: torch's compiler takes a second.
        from ppo_cli.engine.models.compiled import compile_blocks

        run_on_all_ranks(ranks, lambda: compile_blocks(loaded.model))
    if gradient_checkpointing:
        run_on_all_ranks(ranks, lambda: checkpoint_blocks(loaded.model))
    if not ranks.alone:
        return _cut(loaded, path, ranks, sharding, compute, offload_between_uses)
    if sharding.param_offload and compute.device.type != "cpu":
        return replace(loaded, weights_context=OffloadedModel(loaded.model, compute.device))
    loaded.model.to(compute.device)
    return loaded


def _cut(
    loaded: Loaded,
    path: str,
    ranks: Ranks,
    sharding: Sharding,
    compute: Compute,
    offload_between_uses: bool,
) -> Loaded:
    """Shard a model layer by layer, so that at most one complete layer is added to the shards."""
    assert ranks.mesh is not None
    model, tensor_size = loaded.model, ranks.tensor_size
    plan = run_on_all_ranks(
        ranks,
        lambda: (
            plan_tensor_parallel(model, loaded.backbone, tensor_size) if tensor_size > 1 else {}
        ),
    )
    # Attributes that come with the files: a model without weights has only their defaults.
    from_files = ("generation_config", "all_tied_weights_keys", "_weight_conversions")
    values = gather_objects(ranks, [getattr(model, name, None) for name in from_files])[0]
    for name, value in zip(from_files, values, strict=True):
        setattr(model, name, value)
    # From here on the model has placeholders, filled per layer just before it is sharded.
    weights = extract_weights(model, ranks, path)
    mesh = ranks.mesh
    pinned = compute.device.type == "cuda"
    shard = partial(
        fully_shard,
        mesh=mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"],
        reshard_after_forward=True,
        # FSDP2 would copy a shard for each gather; frozen weights are copied once per use instead.
        offload_policy=(
            CPUOffloadPolicy(pinned)
            if sharding.param_offload and not offload_between_uses
            else OffloadPolicy()
        ),
    )
    precision = _precision(compute)
    for prefix, layer in _layers(loaded):
        weights.distribute(layer, compute.device)
        inside = {
            name.removeprefix(f"{prefix}."): style
            for name, style in plan.items()
            if name.startswith(f"{prefix}.")
        }
        parallelize_modules(layer, inside, mesh["tensor"])
        shard(layer, mp_policy=precision)
    embedding: Any = loaded.model.get_input_embeddings()
    if isinstance(loaded, ValueModel) and embedding.weight.requires_grad:
        # The root module stays gathered during a pass. A policy needs that for its head; a critic
        # does not, so its embedding becomes a separate unit, unless it is frozen.
        weights.distribute(embedding, compute.device)
        shard(embedding, mp_policy=precision)
    # All that is left (norms, heads, the policy's embedding) belongs to the root.
    root: Any = Root(model)
    weights.distribute(root, compute.device)
    if isinstance(loaded, ValueModel) and compute.dtype != torch.float32:  # its head stays so
        shard(loaded.head, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    shard(root, mp_policy=precision)
    copies = mesh["replicate"].size() > 1
    for module in sharded_modules(root):
        module.set_custom_all_gather(CountedGather(ranks.rank))
        module.set_custom_reduce_scatter(CountedReduction(ranks.rank, module, copies=copies))
        # Losses are normalised by counts of the whole mini-batch, so gradients are summed.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return_freed_memory()
    device = compute.device if offload_between_uses else None
    return replace(loaded, weights_context=ShardedModel(root, sharding.stays_whole, device))


def _layers(loaded: Policy | ValueModel) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of the backbone with their names inside it."""
    kinds = set(getattr(loaded.backbone, "_no_split_modules", None) or ())
    return [(n, m) for n, m in loaded.backbone.named_modules() if type(m).__name__ in kinds]


def _precision(compute: Compute) -> MixedPrecisionPolicy:
    if compute.dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
