"""Picks response positions out of hidden states, and puts token values back into rows.

Only response tokens meet the vocabulary: prompt positions cost no logits.
Legend: B rows, L tokens, T response tokens, N response tokens of all rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch

if TYPE_CHECKING:  # it brings all of transformers along
    from ppo_cli.engine.packed_rows import PackedRows


@dataclass(frozen=True, eq=False)
class Annotations:
    """What one rank found: its rows of the batch, and (R, T) tensors by name."""

    row_R: Tensor
    found: dict[str, Tensor]


def merge_annotations(batch: Batch, parts: Iterable[Annotations]) -> AnnotatedBatch:
    """Put the shares of all ranks into one annotated batch, beside what the sampler found."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, rows_RT in part.found.items():
            whole = found.setdefault(name, torch.zeros(batch.response_mask_BT.shape))
            whole[part.row_R] = rows_RT
    if "old_logprobs_BT" not in found and batch.sampler_entropy_BT is not None:
        found["old_logprobs_BT"] = batch.sampler_logprobs_BT
        found["entropy_BT"] = batch.sampler_entropy_BT
    return AnnotatedBatch(
        **{name: getattr(batch, name) for name in Batch.__dataclass_fields__},
        old_logprobs_BT=found["old_logprobs_BT"],
        entropy_BT=found["entropy_BT"],
        ref_logprobs_BT=found.get("ref_logprobs_BT"),
        full_kl_BT=found.get("full_kl_BT"),
        values_BT=found.get("values_BT"),
    )


@dataclass(frozen=True)
class Slice:
    """Rows of a batch on the compute device, cut to their longest row.

    `targets_N` are the ids of the response tokens, rows after rows.
    With `packed` the ids are one row, in which the rows lie end to end. An `idle`
    slice is there only because other ranks have work in this turn: its row is computed like
    any other, and counts for nothing.
    """

    row_B: Tensor
    input_ids_BL: Tensor
    response_mask_BT: Tensor
    position_BT: Tensor  # where the token's log-prob and value are read
    targets_N: Tensor
    width: int
    idle: bool = False
    packed: PackedRows | None = None

    def pick(self, states_BLX: Tensor) -> Tensor:
        """Values at the positions before each response token, rows after rows: (N, …)."""
        if self.packed is not None:
            # Rows share the last token of a prompt: the gradient adds up in the same order always.
            return states_BLX[0].index_select(0, self.position_BT[self.response_mask_BT])
        row_B1 = torch.arange(states_BLX.shape[0], device=states_BLX.device)[:, None]
        picked: Tensor = states_BLX[row_B1, self.position_BT][self.response_mask_BT]
        return picked

    def spread(self, values_N: Tensor) -> Tensor:
        """Put values of response tokens into rows, zero elsewhere: (B, T)."""
        rows = torch.zeros(self.response_mask_BT.shape, device=values_N.device)
        return rows.masked_scatter(self.response_mask_BT, values_N.float())

    def take(self, tensor_BT: Tensor) -> Tensor:
        """The same rows of a whole-batch response tensor, cut to the same width."""
        return tensor_BT[self.row_B][:, : self.width].to(self.input_ids_BL.device)

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
    if packed:
        from ppo_cli.engine.packed_rows import PackedRows

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
        position_BT += (start_B - shared_B)[:, None]
        position_BT[:, 0] = start_B[lead_B] + prompt_len_B - 1
    return Slice(
        row_B=row_B,
        input_ids_BL=ids_BL.to(device),
        response_mask_BT=mask_BT.to(device),
        position_BT=position_BT.clamp(max=ids_BL.shape[1] - 1).to(device),
        targets_N=targets_N.to(device),
        width=width,
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
