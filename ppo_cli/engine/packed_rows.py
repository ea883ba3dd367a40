"""Rows that lie end to end in one: where each begins, and attention that stays inside of it.

In the place of an attention mask goes the list of ends: each row is then attended to by itself,
and the work grows with the rows, not with the square of what they hold together. A row may go on
from the first tokens of another: the prompt of several responses is then computed once, but for
attention (the idea of PrefixGrouper, arXiv 2506.05433).
Legend: B rows, L the tokens that lie there, h heads, d size of a head.
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
    """Rows in the order in which they lie; positions begin again with each.

    `rows_113B` has a 0 and the end of each row; whose first tokens come before it; how many.
    It is on the CPU, where it is read.
    """

    positions_1L: Tensor
    rows_113B: Tensor

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        leads: Sequence[int] | None = None,
        shared: Sequence[int] | None = None,
    ) -> PackedRows:
        """Rows that add so many tokens to the first `shared` ones of the rows `leads`."""
        leads, shared = leads or range(len(lengths)), shared or [0] * len(lengths)
        pairs = zip(shared, lengths, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in pairs])
        rows = torch.tensor([[0, *accumulate(lengths)], [0, *leads], [0, *shared]], dtype=ENDS)
        return cls(positions[None].to(device), rows[None, None])

    def arguments(self, packing: Packing | None) -> dict[str, Tensor]:
        """What a backbone is told beside the ids."""
        if packing is None:
            raise ValueError("packed rows for a model that does not take them")
        told = {"position_ids": self.positions_1L}
        return told | ({"attention_mask": self.rows_113B} if packing is Packing.BY_ROWS else {})


def attend_by_rows(
    module: nn.Module,
    query_1hLd: Tensor,
    key_1hLd: Tensor,
    value_1hLd: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """SDPA; given `rows_113B` for a mask, causal within each row and blind beyond it."""
    if attention_mask is None or attention_mask.dtype != ENDS:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1hLd, key_1hLd, value_1hLd, attention_mask, **options
        )
        return found
    for more in ("sliding_window", "position_bias"):
        if options.get(more) is not None:
            raise ValueError(f"rows are attended to plainly, without a {more}")
    states = (query_1hLd, key_1hLd, value_1hLd)
    ends, leads, shared = attention_mask[0, 0]
    if _has_kernel(query_1hLd, value_1hLd) and not shared.any():
        return _attend_at_once(*states, ends, options.get("scaling")), None
    rows = zip(
        *(_whole_rows(s, ends.diff().tolist(), leads[1:].tolist(), shared[1:].tolist())
          for s in states),
        strict=True,
    )  # fmt: skip
    out = [sdpa_attention_forward(module, *row, None, **options)[0] for row in rows]
    return torch.cat([o[:, p:] for o, p in zip(out, shared[1:].tolist(), strict=True)], 1), None


def _whole_rows(
    states_1hLd: Tensor, lengths: Sequence[int], leads: Sequence[int], shared: Sequence[int]
) -> list[Tensor]:
    """The states of each row by itself, with the tokens that it shares in front."""
    # Split, not sliced: the gradient of a slice would be as long as all rows.
    own = states_1hLd.split(lengths, dim=2)
    return [
        torch.cat((own[lead][:, :, :count], row), dim=2) if count else row
        for row, lead, count in zip(own, leads, shared, strict=True)
    ]


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
