"""Tensor parallelism: split layers over neighbouring ranks by the plan of the model's family.

Embeddings, norms and the output head are not split: every neighbour computes the same values and
the same gradients with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ppo_cli.errors import ModelError

# Names of transformers' `base_model_tp_plan` -> how the weights are split: by columns or rows.
COLUMNS: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
}
ROWS: dict[str, ParallelStyle] = {
    "rowwise": RowwiseParallel(),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
}
NORM = "replicated_with_grad_allreduce"
# A norm over one head: whole weights, heads on different ranks, so its gradient is summed.
STYLES = {**COLUMNS, **ROWS, NORM: SequenceParallel(sequence_dim=2, use_local_output=True)}
KEPT_WHOLE = ("embedding_rowwise", "embedding_colwise")


def plan_tensor_parallel(model: Any, backbone: nn.Module, size: int) -> dict[str, str]:
    """Return module name inside the backbone -> style of its split over `size` ranks.

    Raises ModelError for a model that cannot be split over so many ranks.
    """
    config = model.config.get_text_config()
    published = config.base_model_tp_plan or {}
    names = [name for name, _ in backbone.named_modules()]
    names += [name for name, _ in backbone.named_parameters()]
    # The published plan has patterns; embeddings of it are not split here.
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


def parallelize_modules(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the modules in `plan` inside `module`; every rank must hold the same whole weights."""
    for name, style in plan.items():
        for part, how in _list_parts_to_split(module.get_submodule(name), style):
            trained = {parameter: p.requires_grad for parameter, p in part.named_parameters()}
            parallelize_module(part, mesh, how, src_data_rank=None)
            # torch 2.13 makes the parameters of norms trainable, also of frozen ones.
            for parameter, p in part.named_parameters():
                p.requires_grad_(trained[parameter])


def _list_parts_to_split(module: nn.Module, style: str) -> list[tuple[nn.Module, ParallelStyle]]:
    """Return the modules to split, each with its style.

    That is the layer, or with LoRA its base layer and the adapter matrices of the split side (B for
    colwise, A for rowwise).
    """
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        return [(module, STYLES[style])]
    parts = [(base, STYLES[style])]
    # Columns of the layer are columns of B, rows of the layer are rows of A.
    beside = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
    if beside is not None:
        parts += [(part, STYLES[style]) for part in getattr(module, beside).values()]
    return parts


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _check_sizes(config: Any, backbone: nn.Module, plan: Mapping[str, str], size: int) -> None:
    """Raise ModelError unless each rank gets whole heads and an equal share of each split layer."""
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
        if style not in STYLES:
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
