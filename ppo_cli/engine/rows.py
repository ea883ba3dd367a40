"""Rows of a batch as a model takes them: padded, or end to end in one, and what is read of them.

Only response tokens meet the vocabulary: prompt positions cost no logits. Where rows lie end to
end, the list of their ends goes in the place of an attention mask: each row is then attended to by
itself, and the work grows with the rows, not with the square of what they hold together. A row may
go on from the first tokens of another: the prompt of several responses is then computed once, but
for attention (the idea of PrefixGrouper, arXiv 2506.05433).
Legend: B rows, L tokens, T response tokens, N response tokens of all rows, H hidden size, h heads,
d size of a head; of attention by products n tokens and m that they look at, k heads of keys, q
queries of all heads that share a key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ppo_cli.algo.batch import Batch, TrainBatch
from ppo_cli.engine.device import pin, products_by_blas, send, using_onednn

# Tokens of a row on the CPU up to which products of float32 by oneDNN are faster than SDPA's
# kernel, and float32 faster than half precision.
LONGEST = 512
STEP = 32  # lengths are rounded up to multiples: oneDNN writes code for each shape that it meets
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
        # Pinned, as the kernel of GPUs takes the ends in each layer.
        return cls(send(positions[None], device), pin(rows[None, None], device))

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
        # A token that looks back makes many small products, for which oneDNN is slow.
        with products_by_blas() if query_1hLd.shape[2] == 1 else nullcontext():
            shares = _shares_keys(query_1hLd, key_1hLd, attention_mask)
            if shares and options.get("position_bias") is None:
                return _look_back(query_1hLd, key_1hLd, value_1hLd, attention_mask, options), None
            found: tuple[Tensor, None] = sdpa_attention_forward(
                module, query_1hLd, key_1hLd, value_1hLd, attention_mask, **options
            )
        return found
    for more in ("sliding_window", "position_bias"):
        if options.get(more) is not None:
            raise ValueError(f"rows are attended to plainly, without a {more}")
    states = (query_1hLd, key_1hLd, value_1hLd)
    ends, leads, shared = attention_mask[0, 0]
    if _is_slow_in_half(query_1hLd, ends, shared):
        with torch.autocast("cpu", enabled=False):
            query, key, value = (s.float() for s in states)
            return attend_by_rows(module, query, key, value, attention_mask, **options)
    if _has_kernel(query_1hLd, value_1hLd) and not shared.any():
        return _attend_at_once(*states, ends, options.get("scaling")), None
    if _suits_products(query_1hLd, ends, shared) and not options.get("dropout"):
        size = query_1hLd.shape[-1]
        scaled_hLd = query_1hLd[0] * (options.get("scaling") or size**-0.5)
        bounds = ends.tolist()
        told = enumerate(zip(leads[1:].tolist(), shared[1:].tolist(), strict=True))
        spans = [Span.of(bounds, at, *row) for at, row in told]
        out_Lhd: Tensor = RowProducts.apply(scaled_hLd, key_1hLd[0], value_1hLd[0], spans)  # type: ignore[no-untyped-call]
        return out_Lhd[None], None
    rows = zip(
        *(_whole_rows(s, ends.diff().tolist(), leads[1:].tolist(), shared[1:].tolist())
          for s in states),
        strict=True,
    )  # fmt: skip
    out = [sdpa_attention_forward(module, *row, None, **options)[0] for row in rows]
    return torch.cat([o[:, p:] for o, p in zip(out, shared[1:].tolist(), strict=True)], 1), None


def _shares_keys(query_RhLd: Tensor, key_RkCd: Tensor, mask: Tensor | None) -> bool:
    """Whether each row has one token whose heads share keys and mask, on the CPU."""
    _, heads, tokens, _ = query_RhLd.shape
    shares = heads > key_RkCd.shape[1] and (mask is None or mask.shape[1] == 1)
    return tokens == 1 and shares and query_RhLd.device.type == "cpu"


def _look_back(
    query_Rh1d: Tensor,
    key_RkCd: Tensor,
    value_RkCd: Tensor,
    mask_R11C: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Heads that share a key as tokens of one head: transformers would copy the keys for each."""
    query_Rkqd = query_Rh1d.unflatten(1, (key_RkCd.shape[1], -1)).squeeze(3)
    out_Rkqd = scaled_dot_product_attention(
        query_Rkqd, key_RkCd, value_RkCd, mask_R11C,
        dropout_p=options.get("dropout", 0.0), scale=options.get("scaling"),
    )  # fmt: skip
    out_R1hd: Tensor = out_Rkqd.flatten(1, 2)[:, None]
    return out_R1hd


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


def _is_slow_in_half(query_1hLd: Tensor, ends: Tensor, shared: Tensor) -> bool:
    """Whether SDPA's kernel on the CPU, its backward pass above all, is faster in float32."""
    return (
        query_1hLd.device.type == "cpu"
        and _dtype(query_1hLd) != torch.float32
        and _longest(ends, shared) <= LONGEST
    )


def _suits_products(query_1hLd: Tensor, ends: Tensor, shared: Tensor) -> bool:
    """Whether `RowProducts` is the faster way: short rows in float32 that oneDNN multiplies."""
    return (
        query_1hLd.device.type == "cpu"
        and _dtype(query_1hLd) == torch.float32
        and using_onednn()
        and _longest(ends, shared) <= LONGEST
    )


def _longest(ends: Tensor, shared: Tensor) -> int:
    """Tokens of the longest row, those included that it shares with another."""
    return int((ends.diff() + shared[1:]).max())


@dataclass(frozen=True)
class Span:
    """The tokens of a row among all: its `own`, and those of another row that it goes on from.

    `wide` and `wide_lead` go on beyond them, so that few lengths occur; what lies there is masked.
    """

    own: slice
    wide: slice
    lead: slice
    wide_lead: slice

    @classmethod
    def of(cls, ends: Sequence[int], at: int, lead: int, shared: int) -> Span:
        """Row `at` of rows with these ends, which goes on from so many tokens of row `lead`."""

        def widened(start: int, length: int) -> slice:
            return slice(start, min(start + -(-length // STEP) * STEP, ends[-1]))

        start, first = ends[at], ends[lead]
        return cls(
            slice(start, ends[at + 1]), widened(start, ends[at + 1] - start),
            slice(first, first + shared), widened(first, shared),
        )  # fmt: skip

    def seen(self, states_kLd: Tensor) -> Tensor:
        """Of keys or values: what this row looks at."""
        own_knd = states_kLd[:, self.wide]
        if self.lead.start == self.lead.stop:
            return own_knd
        return torch.cat((states_kLd[:, self.wide_lead], own_knd), dim=1)

    def add(self, total_kLd: Tensor, part_kmd: Tensor) -> None:
        """Add gradients of what was `seen` to those of all tokens."""
        leads = self.wide_lead.stop - self.wide_lead.start
        shared, own = (at.stop - at.start for at in (self.lead, self.own))
        total_kLd[:, self.lead] += part_kmd[:, :shared]
        total_kLd[:, self.own] += part_kmd[:, leads : leads + own]

    def probabilities(self, query_kqd: Tensor, key_kmd: Tensor) -> Tensor:
        """softmax(q k^T), each query blind to what comes after it."""
        count = self.wide.stop - self.wide.start
        mask_nm = query_kqd.new_full((count, count), -torch.inf).triu_(1)
        leads = key_kmd.shape[1] - count
        if leads:
            blind_l = query_kqd.new_zeros(leads)
            blind_l[self.lead.stop - self.lead.start :] = -torch.inf
            mask_nm = torch.cat((blind_l.expand(count, leads), mask_nm), dim=1)
        mask_qm = mask_nm.repeat(query_kqd.shape[1] // count, 1)
        return torch.baddbmm(mask_qm, query_kqd, key_kmd.mT).softmax(-1)


class RowProducts(torch.autograd.Function):
    """Attention of each row by itself as matrix products: softmax(q k^T) v, q scaled already.

    Keys and values may have fewer heads (k) than queries (h). Probabilities are computed again in
    the backward pass, so that nothing is kept but what autograd holds anyway.
    """

    @staticmethod
    def forward(
        ctx: Any, query_hLd: Tensor, key_kLd: Tensor, value_kLd: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """(tokens, heads, size of a value)."""
        ctx.save_for_backward(query_hLd, key_kLd, value_kLd)
        ctx.spans = spans
        heads, tokens, _ = query_hLd.shape
        out_Lhd = query_hLd.new_empty((tokens, heads, value_kLd.shape[-1]))
        for span in spans:
            query_kqd = _by_key(query_hLd[:, span.wide], len(key_kLd))
            p_kqm = span.probabilities(query_kqd, span.seen(key_kLd))
            found_hnd = (p_kqm @ span.seen(value_kLd)).unflatten(1, (heads // len(key_kLd), -1))
            own = span.own.stop - span.own.start
            out_Lhd[span.own] = found_hnd.flatten(0, 1)[:, :own].transpose(0, 1)
        return out_Lhd

    @staticmethod
    def backward(ctx: Any, grad_Lhd: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        query_hLd, key_kLd, value_kLd = ctx.saved_tensors
        keys = len(key_kLd)
        repeats = len(query_hLd) // keys
        grads = (torch.empty_like(query_hLd), *map(torch.zeros_like, (key_kLd, value_kLd)))
        for span in ctx.spans:
            own = span.own.stop - span.own.start
            query_kqd = _by_key(query_hLd[:, span.wide], keys)
            grad_kqd = _by_key(grad_Lhd[span.wide].transpose(0, 1), keys)
            key_kmd, value_kmd = span.seen(key_kLd), span.seen(value_kLd)
            p_kqm = span.probabilities(query_kqd, key_kmd)
            p_kqm.unflatten(1, (repeats, -1))[:, :, own:] = 0.0
            span.add(grads[2], p_kqm.mT @ grad_kqd)
            ds_kqm = torch._softmax_backward_data(grad_kqd @ value_kmd.mT, p_kqm, -1, p_kqm.dtype)
            found_hnd = (ds_kqm @ key_kmd).unflatten(1, (repeats, -1)).flatten(0, 1)
            grads[0][:, span.own] = found_hnd[:, :own]
            span.add(grads[1], ds_kqm.mT @ query_kqd)
        return *grads, None


def _by_key(states_hnd: Tensor, keys: int) -> Tensor:
    """Queries of all heads that share a key, one after the other: (k, q, d)."""
    states_krnd: Tensor = states_hnd.unflatten(0, (keys, -1))
    return states_krnd.flatten(1, 2)


def _has_kernel(query_1hLd: Tensor, value_1hLd: Tensor) -> bool:
    """Whether one kernel can do all rows: half precision, and a device that has it."""
    size = query_1hLd.shape[-1]
    return (
        value_1hLd.shape[-1] == size
        and _dtype(query_1hLd) in (torch.bfloat16, torch.float16)
        and has_packed_kernel(query_1hLd.device)
        and size % 8 == 0
        and size <= 256
    )


def has_packed_kernel(device: torch.device) -> bool:
    """Whether a device has the kernel: a GPU that is not too old."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


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


@dataclass(frozen=True)
class Slice:
    """Rows of a batch on the compute device, cut to their longest row.

    `targets_N` are the ids of the response tokens, rows after rows. Their places are indices,
    not masks: for a mask the host would wait until the device has counted it.
    With `packed` the ids are one row, in which the rows lie end to end. An `idle`
    slice is there only because other ranks have work in this turn: its row is computed like
    any other, and counts for nothing.
    """

    row_B: Tensor  # on the CPU
    input_ids_BL: Tensor
    source_N: Tensor  # in the flattened ids, where a token's log-prob and value are read
    place_N: Tensor  # of the response tokens among rows of responses, flattened
    targets_N: Tensor
    width: int
    count_BL: Tensor  # rows that each token belongs to: several of a shared prompt, none of padding
    idle: bool = False
    packed: PackedRows | None = None

    def pick(self, states_BLX: Tensor) -> Tensor:
        """Values at the positions before each response token, rows after rows: (N, …)."""
        # Rows share the last token of a prompt: the gradient adds up in the same order always.
        return states_BLX.flatten(0, 1).index_select(0, self.source_N)

    def spread(self, values_N: Tensor) -> Tensor:
        """Put values of response tokens into rows, zero elsewhere: (B, T)."""
        places = torch.zeros(len(self.row_B) * self.width, device=values_N.device)
        return places.index_copy(0, self.place_N, values_N.float()).view(-1, self.width)

    def take(self, tensor_BT: Tensor) -> Tensor:
        """The same rows of a whole-batch response tensor, cut to the same width."""
        return send(tensor_BT[self.row_B][:, : self.width], self.input_ids_BL.device)

    def loss_mask_BT(self, batch: TrainBatch) -> Tensor:
        """The response tokens of these rows that enter a loss; none when idle."""
        mask_BT = self.take(batch.loss_mask_BT)
        return torch.zeros_like(mask_BT) if self.idle else mask_BT


def cut_slice(
    batch: Batch,
    rows: Sequence[int],
    device: torch.device,
    *,
    packed: bool = False,
    shared: bool = False,
) -> Slice:
    """Take rows of a batch, without the padding that they do not need, or `packed` without any.

    With `shared`, too, a prompt of several packed rows lies there once, before the first of them.
    No rows give an idle slice of the shortest row.
    """
    idle = not rows
    if idle:
        rows = [int((batch.prompt_len_B + batch.response_len_B).argmin())]
    row_B = torch.as_tensor(rows)
    prompt_len_B = batch.prompt_len_B[row_B]
    response_len_B = batch.response_len_B[row_B]
    length_B = prompt_len_B + response_len_B
    length = int(length_B.max())
    width = int(response_len_B.max())
    position_BT = prompt_len_B[:, None] - 1 + torch.arange(width)[None, :]
    ids_BL = batch.input_ids_BL[row_B, :length]
    mask_BT = batch.response_mask_BT[row_B, :width]
    targets_N = ids_BL.gather(1, (position_BT + 1).clamp(max=length - 1))[mask_BT]
    ends = None
    count_BL = (torch.arange(length)[None, :] < length_B[:, None]).float()
    if packed:
        lead_B = torch.arange(len(rows))
        if shared:
            first: dict[bytes, int] = {}
            prompts = row_prompts(ids_BL, prompt_len_B)
            lead_B = torch.tensor([first.setdefault(p, at) for at, p in enumerate(prompts)])
        shared_B = torch.where(lead_B == torch.arange(len(rows)), 0, prompt_len_B)
        own_B = length_B - shared_B
        ends = PackedRows.of(own_B.tolist(), device, lead_B.tolist(), shared_B.tolist())
        at_L = torch.arange(length)[None, :]
        ids_BL = ids_BL[(at_L >= shared_B[:, None]) & (at_L < length_B[:, None])][None]
        start_B = own_B.cumsum(0) - own_B
        count_BL = torch.ones(ids_BL.shape)
        for lead, count in zip(lead_B.tolist(), shared_B.tolist(), strict=True):
            count_BL[0, start_B[lead] : start_B[lead] + count] += 1
        position_BT += (start_B - shared_B)[:, None]
        position_BT[:, 0] = start_B[lead_B] + prompt_len_B - 1
    else:
        position_BT += torch.arange(len(rows))[:, None] * length
    return Slice(
        row_B=row_B,
        input_ids_BL=send(ids_BL, device),
        source_N=send(position_BT[mask_BT], device),
        place_N=send(mask_BT.flatten().nonzero()[:, 0], device),
        targets_N=send(targets_N, device),
        width=width,
        count_BL=send(count_BL * (not idle), device),
        idle=idle,
        packed=ends,
    )


def row_prompts(ids_BL: Tensor, prompt_len_B: Tensor) -> list[bytes]:
    """The ids of each row's prompt, to tell which rows have the same."""
    rows = zip(ids_BL.numpy(), prompt_len_B.tolist(), strict=True)
    return [ids_L[:length].tobytes() for ids_L, length in rows]


def row_lengths(batch: Batch) -> list[int]:
    """Prompt and response tokens of each row."""
    lengths: list[int] = (batch.prompt_len_B + batch.response_len_B).tolist()
    return lengths
