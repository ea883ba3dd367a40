"""How a model is run: its attention kernel, and packed or padded rows.

A family is declared exact in a mode (`config/models/attention.py`). On a GPU rows are packed by
themselves only if the self-test has proven the kernel for packed rows there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ppo_cli.config.models.attention import MASKED, PACKED, SDPA
from ppo_cli.config.schema.run import Model
from ppo_cli.engine.batches.micro_batches import Budget
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.models.attention import BY_ROWS, PackedRows, Packing, attend_by_rows
from ppo_cli.engine.ranks import Ranks, gather_objects
from ppo_cli.errors import ModelError, first_line
from ppo_cli.machine.device_record import is_proven

Loaded = TypeVar("Loaded", Policy, ValueModel)

# Tokens of a micro-batch with masked attention, which computes all pairs of tokens.
MASKED_TOKENS = 4096
TRIED = (9, 1, 7)  # lengths of the rows of the comparison
# Largest allowed difference of a gradient, as a share of its norm.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass(frozen=True)
class RunMode:
    """A model's attention kernel, and whether its rows may be packed."""

    kernel: str
    packed: bool


def choose_run_mode(path: str, config: Any, settings: Model) -> tuple[RunMode, list[str]]:
    """Return how a model with this config is run, and remarks about slower modes.

    Raises ModelError if `model.packing` asks for packed rows in a family that is not exact there.
    """
    # Code that comes with a model computes something else under the same name.
    is_known = type(config).__module__.startswith("transformers.")
    family = config.model_type if is_known else ""
    kernel = settings.attn_implementation or ("sdpa" if family in SDPA else "eager")
    if settings.packing:
        if family not in PACKED | MASKED:
            raise ModelError(
                f"{path} cannot be trained on packed rows: this is not known to be exact for "
                f"{config.model_type} models. Leave model.packing out, or take another model."
            )
        return RunMode(kernel, packed=True), []
    plain = kernel == "sdpa" and family in PACKED and is_plain(config)
    mode = RunMode(kernel, packed=plain and settings.packing is None)
    remarks = []
    if settings.attn_implementation is None and kernel == "eager":
        remarks.append(
            f"Attention of {path} is eager: sdpa is not known to be exact for {config.model_type} "
            "models (model.attn_implementation)."
        )
    if settings.packing is None and not plain:
        remarks.append(f"Rows of {path} are padded: packing does not suit its attention.")
    return mode, remarks


def enable_packing(
    loaded: Loaded,
    path: str,
    compute: Compute,
    ranks: Ranks,
    setting: bool | None = True,
    shares: bool = True,
) -> Loaded:
    """Return the model with packing on, if this device's kernel is exact; all ranks call.

    Otherwise the model is returned unchanged, or ModelError is raised when the `setting` is True.
    When it is unset (None), a GPU needs a self-test that has passed. With `shares` a prompt is
    computed once for all its rows.
    """
    attention = loaded.model.config._attn_implementation
    packing = choose_attention(loaded.model)
    packed: Loaded = replace(
        loaded, packing=packing, shares_prompts=shares and packing is Packing.BY_ROWS
    )
    wrong = _try_gradients(packed, compute)
    if setting is None and compute.device.type == "cuda" and not is_proven("packed_attention"):
        wrong = wrong or "the self-test has not passed for it"
    # All ranks must agree: they plan the same micro-batches.
    if not any(gather_objects(ranks, wrong)):
        return packed
    if setting:
        raise ModelError(
            f"{path} cannot be trained on packed rows: {wrong or 'see the other ranks'}. Leave "
            "model.packing off (model.packing=false), or take another model."
        )
    loaded.model.config._attn_implementation = attention
    return loaded


def build_budget(tokens: int, rows: int | None, *models: Policy | ValueModel) -> Budget:
    """Return the micro-batch budget that these models share; packed if all of them are."""
    # All models of a micro-batch take the same rows.
    kinds = [model.packing for model in models]
    if Packing.MASKED in kinds:
        tokens = min(tokens, MASKED_TOKENS)
    packed = None not in kinds
    shared = packed and rows is None and all(model.shares_prompts for model in models)
    return Budget(tokens, rows, packed=packed, shared=shared)


def choose_attention(model: Any) -> Packing:
    """Set the model's attention for packed rows: by rows if it is plain, else with masks.

    Sliding windows and chunks need masks.
    """
    config = model.config
    if config._attn_implementation == "sdpa" and is_plain(config):
        config._attn_implementation = BY_ROWS
    return Packing.BY_ROWS if config._attn_implementation == BY_ROWS else Packing.MASKED


def is_plain(config: Any) -> bool:
    """Whether in every layer each token attends to all tokens before it."""
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return layers == {DynamicLayer} and kinds == {"full_attention"}


def _try_gradients(loaded: Policy | ValueModel, compute: Compute) -> str:
    """Return what is wrong with the gradients of attention by rows, or "".

    On a GPU all rows go through a kernel that nothing else here uses. It is tried on random
    states with the model's head sizes, because the model itself may be sharded.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    if loaded.packing is not Packing.BY_ROWS or compute.device.type == "cpu":
        return ""
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return compare_gradients(heads, keys, size, compute)


def compare_gradients(heads: int, keys: int, size: int, compute: Compute) -> str:
    """Compare packed attention with attention to each row alone; returns "" if gradients match."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // keys, True  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn((1, count, sum(TRIED), size), generator=generator)
        .to(compute.device, compute.dtype)
        .requires_grad_()
        for count in (heads, keys, keys)
    ]
    # The same random weights on both outputs give comparable gradients.
    ends = PackedRows.from_lengths(TRIED, compute.device).rows_113B
    try:
        together_1Lhd, _ = attend_by_rows(module, states[0], states[1], states[2], ends)
        split = zip(*(s.split(TRIED, dim=2) for s in states), strict=True)
        alone = [sdpa_attention_forward(module, *row, None)[0] for row in split]
        weight = torch.randn(together_1Lhd.shape, generator=generator).to(together_1Lhd)
        # Gradients of queries, keys and values for both.
        packed_grads, single_grads = (
            torch.autograd.grad((out * weight).sum(), states)
            for out in (together_1Lhd, torch.cat(alone, dim=1))
        )
    except Exception as error:  # of a kernel that does not suit the device
        return f"attention by rows fails on this device ({first_line(error)})"
    gaps = [
        (a.float() - b.float()).norm() / b.float().norm()
        for a, b in zip(packed_grads, single_grads, strict=True)
    ]
    if not max(gaps) <= LIMITS[compute.dtype]:
        return "attention by rows has other gradients on this device"
    return ""
