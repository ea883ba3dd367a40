"""Attention for packed rows, registered with transformers as `sdpa_by_rows`.

Packed rows are concatenated without padding. Their boundaries are passed in place of an attention
mask; each row is attended to alone, so the cost grows with the rows and not with the square of
their total length. A row can continue the first tokens of another: a prompt with several responses
is then computed once, except for attention (the idea of PrefixGrouper, arXiv 2506.05433).
Legend: B rows, L tokens, h heads, d size of a head, k heads of keys, R rows of a cache, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppo_cli.engine.cpu.products import use_blas, using_onednn
from ppo_cli.engine.cpu.row_products import RowAttention, RowSpan, attend_last_token
from ppo_cli.engine.device import pin, send

# Up to this row length, measured on CPUs with AVX-512, float32 products by oneDNN are faster than
# SDPA's kernel, and float32 is faster than half precision.
LONGEST = 512


BY_ROWS = "sdpa_by_rows"  # the name of this attention in a model's config


# The dtype that marks a tensor of row boundaries: real masks are bool or floating point.
ENDS = torch.int32


AMPERE = (8, 0)  # the first compute capability that has the kernel of `varlen_attn`


class Packing(Enum):
    """How attention is kept within packed rows."""

    BY_ROWS = "by rows"  # `attend_by_rows` gets the boundaries of the rows
    MASKED = "masked"  # transformers builds a mask from positions that restart with each row


@dataclass(frozen=True)
class PackedRows:
    """The boundaries of packed rows, in order; positions restart with each row.

    `rows_113B` has three lines, each with a leading 0: the end of each row, the lead row that it
    continues, and how many tokens of the lead come before it. It is on the CPU, where it is read.
    """

    positions_1L: Tensor
    rows_113B: Tensor

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        leads: Sequence[int] | None = None,
        shared: Sequence[int] | None = None,
    ) -> PackedRows:
        """Build boundaries of rows that add `lengths` tokens to the first `shared` of `leads`."""
        leads, shared = leads or range(len(lengths)), shared or [0] * len(lengths)
        pairs = zip(shared, lengths, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in pairs])
        rows = torch.tensor([[0, *accumulate(lengths)], [0, *leads], [0, *shared]], dtype=ENDS)
        # Pinned, because the GPU kernel copies the ends in each layer.
        return cls(send(positions[None], device), pin(rows[None, None], device))

    def arguments(self, packing: Packing | None) -> dict[str, Tensor]:
        """Return the backbone's keyword arguments for packed rows."""
        if packing is None:
            raise ValueError("packed rows for a model that does not take them")
        kwargs = {"position_ids": self.positions_1L}
        return kwargs | ({"attention_mask": self.rows_113B} if packing is Packing.BY_ROWS else {})


def attend_by_rows(
    module: nn.Module,
    query_1hLd: Tensor,
    key_1hLd: Tensor,
    value_1hLd: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as SDPA does; with `rows_113B` as the mask, causally within each packed row.

    Five routes: padded rows by SDPA (on the CPU one new token through shared keys), half precision
    on the CPU in float32, all packed rows by one GPU kernel, short rows on the CPU as matrix
    products, and otherwise row by row through SDPA.
    """
    # Route 1: an ordinary mask, so rows are padded or a cache is read.
    if attention_mask is None or attention_mask.dtype != ENDS:
        # One new token per row makes many small products, for which oneDNN is slow.
        with use_blas() if query_1hLd.shape[2] == 1 else nullcontext():
            shares = _shares_keys(query_1hLd, key_1hLd, attention_mask)
            if shares and options.get("position_bias") is None:
                return attend_last_token(
                    query_1hLd, key_1hLd, value_1hLd, attention_mask, options
                ), None
            attended: tuple[Tensor, None] = sdpa_attention_forward(
                module, query_1hLd, key_1hLd, value_1hLd, attention_mask, **options
            )
        return attended
    for option in ("sliding_window", "position_bias"):
        if options.get(option) is not None:
            raise ValueError(f"rows are attended to plainly, without a {option}")
    states = (query_1hLd, key_1hLd, value_1hLd)
    # From here on the mask holds the boundaries of packed rows.
    ends, leads, shared = attention_mask[0, 0]
    # Route 2: short rows in half precision on the CPU are faster in float32.
    if _prefers_float32(query_1hLd, ends, shared):
        with torch.autocast("cpu", enabled=False):
            query, key, value = (s.float() for s in states)
            return attend_by_rows(module, query, key, value, attention_mask, **options)
    # Route 3: one GPU kernel for all rows, if no row continues another.
    if _has_kernel(query_1hLd, value_1hLd) and not shared.any():
        return _attend_varlen(*states, ends, options.get("scaling")), None
    # Route 4: short float32 rows on the CPU as matrix products.
    if _prefers_products(query_1hLd, ends, shared) and not options.get("dropout"):
        size = query_1hLd.shape[-1]
        scaled_hLd = query_1hLd[0] * (options.get("scaling") or size**-0.5)
        bounds = ends.tolist()
        lead_rows = enumerate(zip(leads[1:].tolist(), shared[1:].tolist(), strict=True))
        spans = [RowSpan.from_ends(bounds, at, *row) for at, row in lead_rows]
        out_Lhd: Tensor = RowAttention.apply(scaled_hLd, key_1hLd[0], value_1hLd[0], spans)  # type: ignore[no-untyped-call]
        return out_Lhd[None], None
    # Route 5: SDPA on each row, with the tokens that it shares in front; their outputs are dropped.
    rows = zip(
        *(_split_rows(s, ends.diff().tolist(), leads[1:].tolist(), shared[1:].tolist())
          for s in states),
        strict=True,
    )  # fmt: skip
    out = [sdpa_attention_forward(module, *row, None, **options)[0] for row in rows]
    return torch.cat([o[:, p:] for o, p in zip(out, shared[1:].tolist(), strict=True)], 1), None


def _shares_keys(query_RhLd: Tensor, key_RkCd: Tensor, mask: Tensor | None) -> bool:
    """Whether this is a single token per row on the CPU, with fewer key heads than query heads."""
    _, heads, tokens, _ = query_RhLd.shape
    shares = heads > key_RkCd.shape[1] and (mask is None or mask.shape[1] == 1)
    return tokens == 1 and shares and query_RhLd.device.type == "cpu"


def _split_rows(
    states_1hLd: Tensor, lengths: Sequence[int], leads: Sequence[int], shared: Sequence[int]
) -> list[Tensor]:
    """Return the states of each row, with the tokens that it shares in front."""
    # Split and not sliced: the gradient of each slice would be as long as all rows.
    rows = states_1hLd.split(lengths, dim=2)
    return [
        torch.cat((rows[lead][:, :, :count], row), dim=2) if count else row
        for row, lead, count in zip(rows, leads, shared, strict=True)
    ]


def _prefers_float32(query_1hLd: Tensor, ends: Tensor, shared: Tensor) -> bool:
    """Whether SDPA on the CPU, mainly its backward pass, is faster in float32 here."""
    return (
        query_1hLd.device.type == "cpu"
        and _dtype(query_1hLd) != torch.float32
        and longest_row(ends, shared) <= LONGEST
    )


def _prefers_products(query_1hLd: Tensor, ends: Tensor, shared: Tensor) -> bool:
    """Whether `RowAttention` is faster: short rows in float32, with products by oneDNN."""
    return (
        query_1hLd.device.type == "cpu"
        and _dtype(query_1hLd) == torch.float32
        and using_onednn()
        and longest_row(ends, shared) <= LONGEST
    )


def longest_row(ends: Tensor, shared: Tensor) -> int:
    """Return the length of the longest row, shared tokens included."""
    return int((ends.diff() + shared[1:]).max())


def _has_kernel(query_1hLd: Tensor, value_1hLd: Tensor) -> bool:
    """Whether one GPU kernel can attend to all rows: half precision and a supported head size."""
    size = query_1hLd.shape[-1]
    return (
        value_1hLd.shape[-1] == size
        and _dtype(query_1hLd) in (torch.bfloat16, torch.float16)
        and has_packed_kernel(query_1hLd.device)
        and size % 8 == 0
        and size <= 256
    )


def has_packed_kernel(device: torch.device) -> bool:
    """Whether a device has the kernel for packed rows: a GPU from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def _attend_varlen(
    query_1hLd: Tensor, key_1hLd: Tensor, value_1hLd: Tensor, ends: Tensor, scaling: float | None
) -> Tensor:
    """Attend to all packed rows with torch's variable-length kernel."""
    # Imported on use: only GPUs have the kernel.
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (
        states[0].transpose(0, 1).to(_dtype(query_1hLd))
        for states in (query_1hLd, key_1hLd, value_1hLd)
    )
    longest = int(ends.diff().max())
    at = ends.to(query.device, non_blocking=True)
    out: Any = varlen_attn(
        query, key, value, at, at, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=True,
    )  # fmt: skip
    batched: Tensor = out[None]
    return batched


def _dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which SDPA would compute these states."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


AttentionInterface.register(BY_ROWS, attend_by_rows)
AttentionMaskInterface.register(BY_ROWS, sdpa_mask)
