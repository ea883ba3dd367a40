"""Attention on the CPU as matrix products: of rows that lie end to end, and of one new token.

Legend: L tokens, h heads, d size of a head, n tokens and m that they look at, k heads of keys, q
queries of all heads that share a key, R rows, C columns of a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

STEP = 32  # lengths are rounded up to multiples: oneDNN writes code for each shape that it meets


def attend_last_token(
    query_Rh1d: Tensor,
    key_RkCd: Tensor,
    value_RkCd: Tensor,
    mask_R11C: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Attend from one new token per row, with the heads that share a key as tokens of one head.

    transformers would copy the keys for each of these heads.
    """
    # (R, h, 1, d) -> (R, k, q, d): query heads become tokens of their key's head.
    query_Rkqd = query_Rh1d.unflatten(1, (key_RkCd.shape[1], -1)).squeeze(3)
    out_Rkqd = scaled_dot_product_attention(
        query_Rkqd, key_RkCd, value_RkCd, mask_R11C,
        dropout_p=options.get("dropout", 0.0), scale=options.get("scaling"),
    )  # fmt: skip
    out_R1hd: Tensor = out_Rkqd.flatten(1, 2)[:, None]
    return out_R1hd


@dataclass(frozen=True)
class RowSpan:
    """Where a row's tokens are: its `own_tokens`, and the tokens of a lead row that it continues.

    `wide` and `wide_lead` extend them to a few standard lengths; the extra tokens are masked.
    """

    own_tokens: slice
    wide: slice
    lead: slice
    wide_lead: slice

    @classmethod
    def from_ends(cls, ends: Sequence[int], at: int, lead: int, shared: int) -> RowSpan:
        """Build the span of row `at`, which continues the first `shared` tokens of row `lead`."""

        def widened(start: int, length: int) -> slice:
            return slice(start, min(start + -(-length // STEP) * STEP, ends[-1]))

        # Slices of the row itself, and of the prefix that it shares.
        start, first = ends[at], ends[lead]
        return cls(
            slice(start, ends[at + 1]), widened(start, ends[at + 1] - start),
            slice(first, first + shared), widened(first, shared),
        )  # fmt: skip

    def select(self, states_kLd: Tensor) -> Tensor:
        """Return the keys or values that this row attends to, shared tokens first."""
        own_knd = states_kLd[:, self.wide]
        if self.lead.start == self.lead.stop:
            return own_knd
        return torch.cat((states_kLd[:, self.wide_lead], own_knd), dim=1)

    def add(self, total_kLd: Tensor, part_kmd: Tensor) -> None:
        """Add the gradients of the selected tokens to those of all tokens."""
        leads = self.wide_lead.stop - self.wide_lead.start
        shared, own_length = (at.stop - at.start for at in (self.lead, self.own_tokens))
        total_kLd[:, self.lead] += part_kmd[:, :shared]
        total_kLd[:, self.own_tokens] += part_kmd[:, leads : leads + own_length]

    def scores(self, query_kqd: Tensor, key_kmd: Tensor) -> Tensor:
        """Return q k^T, with -inf for later tokens and for padding."""
        # A causal mask, with the unused tokens of the shared prefix masked too.
        count = self.wide.stop - self.wide.start
        mask_nm = query_kqd.new_full((count, count), -torch.inf).triu_(1)
        leads = key_kmd.shape[1] - count
        if leads:
            blind_l = query_kqd.new_zeros(leads)
            blind_l[self.lead.stop - self.lead.start :] = -torch.inf
            mask_nm = torch.cat((blind_l.expand(count, leads), mask_nm), dim=1)
        mask_qm = mask_nm.repeat(query_kqd.shape[1] // count, 1)
        return torch.baddbmm(mask_qm, query_kqd, key_kmd.mT)


class RowAttention(torch.autograd.Function):
    """Attention to each row alone as matrix products: softmax(q k^T) v, with q already scaled.

    Keys and values may have fewer heads (k) than queries (h). The backward pass recomputes the
    probabilities, so that only the inputs are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, query_hLd: Tensor, key_kLd: Tensor, value_kLd: Tensor, spans: Sequence[RowSpan]
    ) -> Tensor:
        """Return the attended values: (tokens, heads, size of a value)."""
        # Inputs only; `spans` are Python objects.
        ctx.save_for_backward(query_hLd, key_kLd, value_kLd)
        ctx.spans = spans
        heads, tokens, _ = query_hLd.shape
        out_Lhd = query_hLd.new_empty((tokens, heads, value_kLd.shape[-1]))
        # Row by row; outputs of padded queries are dropped.
        for span in spans:
            query_kqd = _by_key(query_hLd[:, span.wide], len(key_kLd))
            p_kqm = span.scores(query_kqd, span.select(key_kLd)).softmax(-1)
            out_hnd = (p_kqm @ span.select(value_kLd)).unflatten(1, (heads // len(key_kLd), -1))
            own_length = span.own_tokens.stop - span.own_tokens.start
            out_Lhd[span.own_tokens] = out_hnd.flatten(0, 1)[:, :own_length].transpose(0, 1)
        return out_Lhd

    @staticmethod
    def backward(ctx: Any, grad_Lhd: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        query_hLd, key_kLd, value_kLd = ctx.saved_tensors
        keys = len(key_kLd)
        repeats = len(query_hLd) // keys
        grads = (torch.empty_like(query_hLd), *map(torch.zeros_like, (key_kLd, value_kLd)))
        # Recompute the probabilities, then the gradients of v, scores, q and k.
        for span in ctx.spans:
            own_length = span.own_tokens.stop - span.own_tokens.start
            query_kqd = _by_key(query_hLd[:, span.wide], keys)
            # Queries beyond the row belong to other rows: their gradients are zero here.
            padding = span.wide.stop - span.own_tokens.stop
            grad_nhd = pad(grad_Lhd[span.own_tokens], (0, 0, 0, 0, 0, padding))
            grad_kqd = _by_key(grad_nhd.transpose(0, 1), keys)
            key_kmd, value_kmd = span.select(key_kLd), span.select(value_kLd)
            scores_kqm = span.scores(query_kqd, key_kmd).requires_grad_()
            with torch.enable_grad():
                p_kqm = scores_kqm.softmax(-1)
            span.add(grads[2], p_kqm.detach().mT @ grad_kqd)
            (ds_kqm,) = torch.autograd.grad(p_kqm, scores_kqm, grad_kqd @ value_kmd.mT)
            out_hnd = (ds_kqm @ key_kmd).unflatten(1, (repeats, -1)).flatten(0, 1)
            grads[0][:, span.own_tokens] = out_hnd[:, :own_length]
            span.add(grads[1], ds_kqm.mT @ query_kqd)
        return *grads, None


def _by_key(states_hnd: Tensor, keys: int) -> Tensor:
    """Concatenate the queries of all heads that share a key: (k, q, d)."""
    states_krnd: Tensor = states_hnd.unflatten(0, (keys, -1))
    return states_krnd.flatten(1, 2)
