"""Packing: rows end to end without padding, for the models of which that is true.

`pack` tries it on each model before a run. Models that look beyond a row's borders or count
positions in their own way are trained on padded rows, or refused where packing was asked for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ppo_cli.engine.device import Compute
from ppo_cli.engine.micro_batches import Budget
from ppo_cli.engine.models import Policy, ValueModel
from ppo_cli.engine.ranks import Ranks, gather_objects, together
from ppo_cli.engine.rows import BY_ROWS, PackedRows, Packing, attend_by_rows
from ppo_cli.errors import ModelError, first_line, is_out_of_memory

Loaded = TypeVar("Loaded", Policy, ValueModel)

MASKED_TOKENS = 4096  # of a micro-batch whose attention is masked: all pairs are computed
TRIED = (9, 1, 7)  # lengths of the rows of the trial
SHARED = 4  # tokens of the first that the last of them goes on from, where prompts are shared
# Share of a state's norm by which it may move when other rows do, and when its own row is alone.
# Experts get other numbers of tokens with other rows, which moves the last bits of bfloat16.
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 1e-1)}


def pack(
    loaded: Loaded,
    path: str,
    compute: Compute,
    ranks: Ranks,
    asked: bool | None = True,
    shares: bool | None = None,
) -> Loaded:
    """The model with packing on; all ranks call.

    A model that packed rows would change comes back as it was, or raises ModelError where
    packing was `asked` for. Not asked, models whose attention needs a mask stay padded too:
    a mask of all pairs costs more than padding. `shares` asks for a prompt to be computed once
    for all its rows; None is for where that was measured to be faster, the CPU.
    """
    attention = loaded.model.config._attn_implementation
    packing = choose_attention(loaded.model)
    shares = compute.device.type == "cpu" if shares is None else shares
    packed: Loaded = replace(
        loaded, packing=packing, shares_prompts=shares and packing is Packing.BY_ROWS
    )
    if asked is None and packed.packing is Packing.MASKED:
        return loaded
    wrong = _try(packed, compute) or _try_gradients(packed, compute)
    if asked is None:
        if not any(gather_objects(ranks, wrong)):
            return packed
        loaded.model.config._attn_implementation = attention
        return loaded

    def tell() -> None:
        if wrong:
            raise ModelError(
                f"{path} cannot be trained on packed rows: {wrong}. Leave model.packing off "
                "(model.packing=false), or take another model."
            )

    together(ranks, tell)
    return packed


def micro_batch_budget(tokens: int, rows: int | None, *models: Policy | ValueModel) -> Budget:
    """The budget of micro-batches that these models share: packed if they are."""
    kinds = [model.packing for model in models]
    if Packing.MASKED in kinds:
        tokens = min(tokens, MASKED_TOKENS)
    packed = None not in kinds
    shared = packed and rows is None and all(model.shares_prompts for model in models)
    return Budget(tokens, rows, packed=packed, shared=shared)


def choose_attention(model: Any) -> Packing:
    """Attend by rows where attention is plain; else leave it to masks, which windows need too."""
    config = model.config
    if config._attn_implementation == "sdpa" and _is_plain(config):
        config._attn_implementation = BY_ROWS
    return Packing.BY_ROWS if config._attn_implementation == BY_ROWS else Packing.MASKED


def _is_plain(config: Any) -> bool:
    """Whether every token of every layer attends to all before it."""
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return layers == {DynamicLayer} and kinds == {"full_attention"}


@torch.no_grad()
def _try(loaded: Policy | ValueModel, compute: Compute) -> str:
    """What is wrong with packed rows, or nothing: some rows together, others before them, alone."""
    return _try_last_row(loaded, compute, 0) or (
        _try_last_row(loaded, compute, SHARED) if loaded.shares_prompts else ""
    )


def _try_last_row(loaded: Policy | ValueModel, compute: Compute, shared: int) -> str:
    size = loaded.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids_1L, other_1L = torch.randint(size, (2, 1, sum(TRIED)), generator=generator)
    own = TRIED[-1]
    other_1L[:, :shared], other_1L[:, -own:] = ids_1L[:, :shared], ids_1L[:, -own:]
    whole_1L = torch.cat((ids_1L[:, :shared], ids_1L[:, -own:]), dim=1)
    packed = PackedRows.of(TRIED, compute.device, (0, 1, 0 if shared else 2), (0, 0, shared))

    def last_row(ids_1L: Tensor, packed: PackedRows | None) -> Tensor:
        with compute.autocast():
            (found_1LH,) = loaded.run(
                lambda ids: (loaded.hidden_BLH(ids, packed),), ids_1L.to(compute.device)
            )
        return found_1LH[0, -own:].float()

    try:
        with loaded.awake():
            seen, beside_others = last_row(ids_1L, packed), last_row(other_1L, packed)
            alone = last_row(whole_1L, None)
    except Exception as error:  # a model's own code may raise anything at what it does not know
        if is_out_of_memory(error):
            raise
        loaded.forget()
        return f"it does not take them ({first_line(error)})"
    leak, gap = LIMITS[compute.dtype]
    if not _distance(seen, beside_others) <= leak:
        return "its tokens would see those of other rows"
    if not _distance(seen, alone) <= gap:
        return "it would place them differently than rows of their own"
    return ""


def _try_gradients(loaded: Policy | ValueModel, compute: Compute) -> str:
    """What is wrong with the gradients of attention by rows, or nothing.

    A GPU does all rows by a kernel that nothing else here uses. It is tried on random states,
    as the model itself may be in pieces.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    if loaded.packing is not Packing.BY_ROWS or compute.device.type == "cpu":
        return ""
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return compare_gradients(heads, keys, size, compute)


def compare_gradients(heads: int, keys: int, size: int, compute: Compute) -> str:
    """Attend to rows of random states end to end, and to each alone; "" where both agree."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // keys, True  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn((1, count, sum(TRIED), size), generator=generator)
        .to(compute.device, compute.dtype)
        .requires_grad_()
        for count in (heads, keys, keys)
    ]
    ends = PackedRows.of(TRIED, compute.device).rows_113B
    try:
        together_1Lhd, _ = attend_by_rows(module, states[0], states[1], states[2], ends)
        split = zip(*(s.split(TRIED, dim=2) for s in states), strict=True)
        alone = [sdpa_attention_forward(module, *row, None)[0] for row in split]
        weight = torch.randn(together_1Lhd.shape, generator=generator).to(together_1Lhd)
        found, wanted = (
            torch.autograd.grad((out * weight).sum(), states)
            for out in (together_1Lhd, torch.cat(alone, dim=1))
        )
    except Exception as error:  # of a kernel that does not suit the device
        return f"attention by rows fails on this device ({first_line(error)})"
    _, limit = LIMITS[compute.dtype]
    gaps = [
        (a.float() - b.float()).norm() / b.float().norm()
        for a, b in zip(found, wanted, strict=True)
    ]
    if not max(gaps) <= limit:
        return "attention by rows has other gradients on this device"
    return ""


def _distance(one_LH: Tensor, other_LH: Tensor) -> float:
    """How far the states of a token are apart at most, as a share of their norm."""
    gap_L = (one_LH - other_LH).norm(dim=-1) / other_LH.norm(dim=-1)
    return float(gap_L.max())
