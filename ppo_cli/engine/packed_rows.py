"""Rows that lie end to end in one: where each begins, and attention that stays inside of it.

In the place of an attention mask goes the list of ends: each row is then attended to by itself,
and the work grows with the rows, not with the square of what they hold together.
Legend: B rows, L their tokens together, Q tokens of one row, h heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BY_ROWS = "sdpa_by_rows"  # a model's attention that takes ends of rows for a mask
ENDS = torch.int32  # real masks are bool or floating
AMPERE = (8, 0)


class Packing(Enum):
    """How a model is kept from looking beyond the borders of packed rows."""

    BY_ROWS = "by rows"  # `attend_by_rows`, told where they end
    MASKED = "masked"  # transformers masks all pairs, told by positions that begin again


@dataclass(frozen=True)
class PackedRows:
    """Rows in the order in which they lie; positions begin again with each."""

    positions_1L: Tensor
    ends_111B: Tensor  # 0, then the end of each row; on the CPU, where they are read

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedRows:
        """Rows of these lengths."""
        positions = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor([0, *accumulate(lengths)], dtype=ENDS)
        return cls(positions[None].to(device), ends[None, None, None])

    def arguments(self, packing: Packing | None) -> dict[str, Tensor]:
        """What a backbone is told beside the ids."""
        if packing is None:
            raise ValueError("packed rows for a model that does not take them")
        told = {"position_ids": self.positions_1L}
        return told | ({"attention_mask": self.ends_111B} if packing is Packing.BY_ROWS else {})


def attend_by_rows(
    module: nn.Module,
    query_1hLd: Tensor,
    key_1hLd: Tensor,
    value_1hLd: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA; given ends of rows for a mask, causal within each row and blind beyond it."""
    if attention_mask is None or attention_mask.dtype != ENDS:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1hLd, key_1hLd, value_1hLd, attention_mask, **options
        )
        return found
    for more in ("sliding_window", "position_bias"):
        if options.get(more) is not None:
            raise ValueError(f"rows are attended to plainly, without a {more}")
    states = (query_1hLd, key_1hLd, value_1hLd)
    if _has_kernel(query_1hLd, value_1hLd):
        return _attend_at_once(*states, attention_mask.flatten(), options.get("scaling")), None
    # Split, not sliced: the gradient of a slice would be as long as all rows.
    lengths = attention_mask.flatten().diff().tolist()
    rows = [
        sdpa_attention_forward(module, *row, None, **options)[0]
        for row in zip(*(s.split(lengths, dim=2) for s in states), strict=True)
    ]
    return torch.cat(rows, dim=1), None


def _has_kernel(query_1hLd: Tensor, value_1hLd: Tensor) -> bool:
    """Whether one kernel can do all rows: half precision on a GPU that is not too old."""
    size = query_1hLd.shape[-1]
    return (
        query_1hLd.is_cuda
        and value_1hLd.shape[-1] == size
        and _dtype(query_1hLd) in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query_1hLd.device) >= AMPERE
        and size % 8 == 0
        and size <= 256
    )


def _attend_at_once(
    query_1hLd: Tensor, key_1hLd: Tensor, value_1hLd: Tensor, ends: Tensor, scaling: float | None
) -> Tensor:
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
    whole: Tensor = out[None]
    return whole


def _dtype(states: Tensor) -> torch.dtype:
    """What SDPA would compute these states in."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


AttentionInterface.register(BY_ROWS, attend_by_rows)
AttentionMaskInterface.register(BY_ROWS, sdpa_mask)
