"""Packing: rows end to end without padding, for the models of which that is true.

`pack` tries it on each model before a run, and refuses those that look beyond a row's borders
or count positions in their own way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ppo_cli.engine.device import Compute
from ppo_cli.engine.micro_batches import Budget, is_out_of_memory
from ppo_cli.engine.models import Policy, ValueModel, plan_layers
from ppo_cli.engine.packed_rows import BY_ROWS, PackedRows, Packing
from ppo_cli.engine.ranks import Ranks, together
from ppo_cli.errors import ModelError, first_line

Loaded = TypeVar("Loaded", Policy, ValueModel)

MASKED_TOKENS = 4096  # of a micro-batch whose attention is masked: all pairs are computed
TRIED = (9, 1, 7)  # lengths of the rows of the trial
# Share of a state's norm by which it may move when other rows do, and when its own row is alone.
# Experts get other numbers of tokens with other rows, which moves the last bits of bfloat16.
LIMITS = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 1e-1)}


def pack(loaded: Loaded, path: str, compute: Compute, ranks: Ranks) -> Loaded:
    """The model with packing on; all ranks call.

    Raises ModelError for a model that packed rows would change.
    """
    packed: Loaded = replace(loaded, packing=_choose(loaded.model))
    wrong = _try(packed, compute)

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
    return Budget(tokens, rows, packed=None not in kinds)


def _choose(model: Any) -> Packing:
    """Attend by rows where attention is plain; else leave it to masks, which windows need too."""
    config = model.config
    if config._attn_implementation == "sdpa" and _is_plain(config):
        config._attn_implementation = BY_ROWS
    return Packing.BY_ROWS if config._attn_implementation == BY_ROWS else Packing.MASKED


def _is_plain(config: Any) -> bool:
    """Whether every token of every layer attends to all before it."""
    try:
        _, slides = plan_layers(config)
    except ModelError:
        return False
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return not slides and kinds == {"full_attention"}


@torch.no_grad()
def _try(loaded: Policy | ValueModel, compute: Compute) -> str:
    """What is wrong with packed rows, or nothing: some rows together, others before them, alone."""
    size = loaded.model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids_1L, other_1L = torch.randint(size, (2, 1, sum(TRIED)), generator=generator)
    other_1L[:, -TRIED[-1] :] = ids_1L[:, -TRIED[-1] :]
    packed = PackedRows.of(TRIED, compute.device)

    def last_row(ids_1L: Tensor, packed: PackedRows | None) -> Tensor:
        with compute.autocast():
            (found_1LH,) = loaded.run(
                lambda ids: (loaded.hidden_BLH(ids, packed),), ids_1L.to(compute.device)
            )
        return found_1LH[0, -TRIED[-1] :].float()

    try:
        with loaded.awake():
            seen, beside_others = last_row(ids_1L, packed), last_row(other_1L, packed)
            alone = last_row(ids_1L[:, -TRIED[-1] :], None)
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


def _distance(one_LH: Tensor, other_LH: Tensor) -> float:
    """How far the states of a token are apart at most, as a share of their norm."""
    gap_L = (one_LH - other_LH).norm(dim=-1) / other_LH.norm(dim=-1)
    return float(gap_L.max())
