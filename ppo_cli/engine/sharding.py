"""Load a model over ranks: read by the first, held in pieces by all (FSDP2).

Only the first rank ever holds a whole model, and only while it loads. The others build the
architecture without weights; layer by layer, weights are sent to all and cut to pieces.

With tensor parallelism, layers are split over neighbouring ranks by the plan that their family
publishes. Embeddings, norms and the output head stay whole: every neighbour computes the same with
them and arrives at the same gradient.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from ppo_cli.config.algorithm_schema import Sharding
from ppo_cli.engine.device import M_MMAP_THRESHOLD, Compute
from ppo_cli.engine.gathered import CountedGather, CountedReduction, Gathered, Root, sharded_modules
from ppo_cli.engine.host_memory import Hosted
from ppo_cli.engine.lean_layers import checkpoint_blocks
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.ranks import Ranks, gather_objects, together
from ppo_cli.errors import ModelError


@dataclass
class Taken:
    """The weights of a model whose tensors are now placeholders on the meta device.

    `names` knows what each placeholder stands for. `whole` has weights on the first rank only;
    a parameter that has been given back is forgotten.
    """

    names: dict[Tensor, str] = field(default_factory=dict)
    whole: dict[str, Tensor] = field(default_factory=dict)

    def give(self, module: nn.Module, ranks: Ranks, device: torch.device) -> None:
        """Put the first rank's weights into a part of the model on every rank; all call."""
        given: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is None or tensor not in self.names:
                        continue
                    if tensor not in given:
                        given[tensor] = self._send(tensor, ranks, device)
                    held[name] = given[tensor]  # type: ignore[assignment]

    def _send(self, placeholder: Tensor, ranks: Ranks, device: torch.device) -> Tensor:
        name, is_parameter = self.names[placeholder], isinstance(placeholder, nn.Parameter)
        whole = self.whole.pop(name, None) if is_parameter else self.whole.get(name)
        sent = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=device)
        if whole is not None:
            sent.copy_(whole)
        dist.broadcast(sent, 0)
        if is_parameter:
            return nn.Parameter(sent, requires_grad=placeholder.requires_grad)
        return sent


def take_weights(model: nn.Module, ranks: Ranks, path: str) -> Taken:
    """Take all parameters and buffers out of a model; shared ones stay shared; all ranks call.

    Only the first rank keeps the weights, and what it shares is shared on all ranks: its files
    decide whether an output head is tied. Raises ModelError, on all ranks, when the models of the
    ranks differ.
    """
    places = [
        (f"{prefix}.{name}", held, name)
        for prefix, part in model.named_modules()
        for held in (part._parameters, part._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    first: dict[Tensor | None, str] = {}  # the first name of each tensor
    owners = {place: first.setdefault(held[name], place) for place, held, name in places}
    owners = gather_objects(ranks, owners)[0]
    taken = Taken()
    placeholders: dict[str, Tensor] = {}
    for place, held, name in places:
        owner, tensor = owners.get(place, place), held[name]
        assert tensor is not None
        if owner not in placeholders:
            placeholders[owner] = _placeholder(tensor)
            taken.names[placeholders[owner]] = owner
            if ranks.rank == 0:
                taken.whole[owner] = tensor.detach()
        held[name] = placeholders[owner]
    layout = [(name, tuple(t.shape), str(t.dtype)) for t, name in taken.names.items()]
    if any(other != layout for other in gather_objects(ranks, layout)):
        raise ModelError(
            f"{path} holds another model on some nodes than on the first: give all nodes the "
            "same folder."
        )
    return taken


def _placeholder(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


LARGE_BLOCK = 1_000_000  # bytes

# It advises against layouts that FSDP2 itself makes of tensor-parallel weights.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

Loaded = TypeVar("Loaded", Policy, ValueModel)


def load_spread(
    load: Callable[..., Loaded],
    path: str,
    ranks: Ranks,
    sharding: Sharding,
    compute: Compute,
    *,
    gradient_checkpointing: bool = False,
    brought_once: bool = False,
    prepare: Callable[[Loaded], Loaded] = lambda loaded: loaded,
    **options: Any,
) -> Loaded:
    """Call `load` (`load_policy`, `load_value_model`) for all ranks; all of them call.

    The first rank reads the weights, the others build the model `empty`; an error on one is
    raised on all. `prepare` changes the model before it is cut, on every rank. Pieces of a frozen
    model that is `brought_once` wait in host memory while it is not awake.
    """
    if not ranks.alone:
        _return_freed_memory()
    loaded = together(ranks, lambda: prepare(load(path, empty=ranks.rank != 0, **options)))
    # A model in training mode draws at random; log-probs that are compared would then come from
    # different functions. The modules of an adapter begin in that mode.
    loaded.model.eval()
    if gradient_checkpointing:
        together(ranks, lambda: checkpoint_blocks(loaded.model))
    if not ranks.alone:
        return _cut(loaded, path, ranks, sharding, compute, brought_once)
    if sharding.param_offload and compute.device.type != "cpu":
        return replace(loaded, around=Hosted(loaded.model, compute.device))
    loaded.model.to(compute.device)
    return loaded


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be in pieces, as a fresh copy on the CPU; all ranks call."""
    whole = whole_tensor(tensor)
    piece = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_live = whole.device.type == "cpu" and whole.data_ptr() == piece.data_ptr()
    return whole.clone() if is_live else whole.cpu()


@torch.no_grad()
def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole of a tensor where it was put together, or itself if it is in one piece.

    With a `dtype`, pieces are cast before they travel: the same numbers in fewer bytes.
    """
    pieces: Any = tensor.detach().to(dtype or tensor.dtype)
    if not isinstance(tensor, DTensor):
        return pieces  # type: ignore[no-any-return]
    device = tensor.device_mesh.device_type
    if pieces.device.type != device:  # pieces in host memory
        pieces = pieces.to(device)
    whole: Tensor = pieces.full_tensor()
    return whole


@torch.no_grad()
def fill_from_rank0(target: Tensor, full: Tensor | None, ranks: Ranks) -> None:
    """Put a whole tensor that the first rank has into one that may be in pieces; all call.

    Raises ValueError, on all ranks, when the shapes differ.
    """
    fits = full is not None and full.shape == target.shape
    if ranks.alone:
        if full is None or not fits:
            raise ValueError(_misfit(target))
        target.copy_(full)
        return
    assert ranks.mesh is not None
    device = torch.device(ranks.mesh.device_type)
    agreed = torch.tensor([int(fits)], device=device)
    dist.broadcast(agreed, 0)
    if not agreed.item():
        raise ValueError(_misfit(target))
    whole = torch.empty(target.shape, dtype=target.dtype, device=device)
    if full is not None and ranks.rank == 0:
        whole.copy_(full)
    dist.broadcast(whole, 0)
    if isinstance(target, DTensor):
        target.to_local().copy_(_own_piece(whole, target))
    else:
        target.copy_(whole)


def _cut(
    loaded: Loaded,
    path: str,
    ranks: Ranks,
    sharding: Sharding,
    compute: Compute,
    brought_once: bool,
) -> Loaded:
    """Cut a model to pieces, layer by layer, so that at most one layer more is held whole."""
    assert ranks.mesh is not None
    model, tensor_size = loaded.model, ranks.tensor_size
    plan = together(
        ranks, lambda: plan_split(model, loaded.backbone, tensor_size) if tensor_size > 1 else {}
    )
    # They come with the files: a model without weights has only default ones.
    from_files = ("generation_config", "all_tied_weights_keys", "_weight_conversions")
    values = gather_objects(ranks, [getattr(model, name, None) for name in from_files])[0]
    for name, value in zip(from_files, values, strict=True):
        setattr(model, name, value)
    weights = take_weights(model, ranks, path)
    mesh = ranks.mesh
    pinned = compute.device.type == "cuda"
    shard = partial(
        fully_shard,
        mesh=mesh["shard"] if mesh["replicate"].size() == 1 else mesh["replicate", "shard"],
        reshard_after_forward=True,
        # FSDP2 would bring a piece for each gather: weights that no step changes can do better.
        offload_policy=(
            CPUOffloadPolicy(pinned)
            if sharding.param_offload and not brought_once
            else OffloadPolicy()
        ),
    )
    precision = _precision(compute)
    for prefix, layer in _layers(loaded):
        weights.give(layer, ranks, compute.device)
        inside = {
            name.removeprefix(f"{prefix}."): style
            for name, style in plan.items()
            if name.startswith(f"{prefix}.")
        }
        split_modules(layer, inside, mesh["tensor"])
        shard(layer, mp_policy=precision)
    embedding: Any = loaded.model.get_input_embeddings()
    if isinstance(loaded, ValueModel) and embedding.weight.requires_grad:
        # The root is whole for all of a pass: a policy's for its head, a critic's for nothing.
        # A frozen embedding has no backward pass, before which FSDP2 would gather it for nobody.
        weights.give(embedding, ranks, compute.device)
        shard(embedding, mp_policy=precision)
    root: Any = Root(model)
    weights.give(root, ranks, compute.device)
    if isinstance(loaded, ValueModel) and compute.dtype != torch.float32:  # its head stays so
        shard(loaded.head, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    shard(root, mp_policy=precision)
    copies = mesh["replicate"].size() > 1
    for module in sharded_modules(root):
        module.set_custom_all_gather(CountedGather(ranks.rank))
        module.set_custom_reduce_scatter(CountedReduction(ranks.rank, module, copies=copies))
        # Losses are normalised by what all ranks hold together: gradients add up.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _return_freed_memory()
    device = compute.device if brought_once else None
    return replace(loaded, around=Gathered(root, sharding.stays_whole, device))


def _layers(loaded: Policy | ValueModel) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of the backbone, named as inside it."""
    kinds = set(getattr(loaded.backbone, "_no_split_modules", None) or ())
    return [(n, m) for n, m in loaded.backbone.named_modules() if type(m).__name__ in kinds]


def _precision(compute: Compute) -> MixedPrecisionPolicy:
    if compute.dtype == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=compute.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _return_freed_memory() -> None:
    """Have the C library give large freed blocks back to the system, now and from now on.

    Weights are gathered and let go layer by layer; kept for reuse and cut up by what comes
    between, such blocks cost half as much memory again as is in use.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        gc.collect()
        library.malloc_trim(0)


def _own_piece(whole: Tensor, target: DTensor) -> Tensor:
    """This rank's part of a whole tensor, laid out as `target` is."""
    mesh, coordinate = target.device_mesh, target.device_mesh.get_coordinate()
    assert coordinate is not None
    cuts = [
        (isinstance(placement, _StridedShard), placement.dim, coordinate[axis], mesh.size(axis))
        for axis, placement in enumerate(target.placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    # A strided cut is one through pieces that the other cuts have made.
    for _, dim, index, count in sorted(cuts, key=lambda cut: cut[0]):
        pieces = whole.chunk(count, dim)
        empty = whole.narrow(dim, 0, 0)
        whole = pieces[index] if index < len(pieces) else empty
    return whole


def _misfit(target: Tensor) -> str:
    return f"no whole tensor of shape {tuple(target.shape)} was given"


COLUMNS = ("colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
NORM = "replicated_with_grad_allreduce"
KEPT_WHOLE = ("embedding_rowwise", "embedding_colwise")


def plan_split(model: Any, backbone: nn.Module, size: int) -> dict[str, str]:
    """Module name inside the backbone -> how it is split over `size` ranks.

    Raises ModelError for a model that cannot be split so.
    """
    config = model.config.get_text_config()
    published = config.base_model_tp_plan or {}
    names = [name for name, _ in backbone.named_modules()]
    names += [name for name, _ in backbone.named_parameters()]
    plan = {
        name: style
        for pattern, style in published.items()
        if style not in KEPT_WHOLE
        for name in names
        if _matches(pattern, name)
    }
    if not plan:
        raise ModelError(
            f"--tensor_parallel_size {size}: {_family(config)} does not say how its layers are "
            "split. Leave it at 1, or take another --model."
        )
    _check_sizes(config, backbone, plan, size)
    return plan


def split_modules(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split what `plan` names inside `module`; every rank must hold the same weights whole."""
    for name, style in plan.items():
        for part, how in _parts(module.get_submodule(name), style):
            trained = {parameter: p.requires_grad for parameter, p in part.named_parameters()}
            parallelize_module(part, mesh, how, src_data_rank=None)
            # torch makes parameters of norms that are trained, also of frozen ones.
            for parameter, p in part.named_parameters():
                p.requires_grad_(trained[parameter])


def _parts(module: nn.Module, style: str) -> list[tuple[nn.Module, ParallelStyle]]:
    """A layer and its style; a low-rank adapter beside it is split where the layer is."""
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        return [(module, _style(style))]
    found = [(base, _style(style))]
    # Columns of the layer are columns of B, rows of the layer are rows of A.
    beside = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    if beside is not None:
        found += [(part, _style(style)) for part in getattr(module, beside).values()]
    return found


def _style(name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "colwise_gather_output":
        return ColwiseParallel(output_layouts=Replicate())
    if name == "rowwise":
        return RowwiseParallel()
    if name == "rowwise_split_input":
        return RowwiseParallel(input_layouts=Replicate())
    # A norm over one head, weights whole, heads spread: its gradient is summed over the ranks.
    return SequenceParallel(sequence_dim=2, use_local_output=True)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _check_sizes(config: Any, backbone: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Every rank must get whole heads and an equal share of each split layer."""
    heads = config.num_attention_heads
    for what, count in (
        ("attention heads", heads),
        ("key-value heads", getattr(config, "num_key_value_heads", None) or heads),
    ):
        if count % size:
            raise ModelError(
                f"--tensor_parallel_size {size} does not divide the {count} {what} of "
                f"{_family(config)}: take a divisor of {count}."
            )
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name, style in plan.items():
        if style not in (*COLUMNS, *ROWS, NORM):
            raise ModelError(
                f"--tensor_parallel_size {size}: {_family(config)} splits {name} in a way that "
                f"is not known here ({style}). Leave it at 1, or take another --model."
            )
        module = backbone.get_submodule(name)
        weight: Any = getattr(module, "base_layer", module).weight
        if style == NORM:
            if weight.numel() != head_size:
                raise ModelError(
                    f"--tensor_parallel_size {size}: {_family(config)} normalises all heads "
                    f"together ({name}), which cannot be split. Leave it at 1, or take another "
                    "--model."
                )
        elif weight.shape[0 if style in COLUMNS else 1] % size:
            shape = " x ".join(str(n) for n in weight.shape)
            raise ModelError(
                f"--tensor_parallel_size {size} does not divide {name} ({shape}) of "
                f"{_family(config)}: take another size."
            )


def _family(config: Any) -> str:
    return f"this {config.model_type} model"
