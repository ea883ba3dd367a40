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
    """Put the shares of all ranks into one annotated batch."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, rows_RT in part.found.items():
            whole = found.setdefault(name, torch.zeros(batch.response_mask_BT.shape))
            whole[part.row_R] = rows_RT
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

    With `packed` the ids are one row, in which the rows lie end to end. An `idle`
    slice is there only because other ranks have work in this turn: its row is computed like
    any other, and counts for nothing.
    """

    row_B: Tensor
    input_ids_BL: Tensor
    response_mask_BT: Tensor
    position_BT: Tensor  # where the token's log-prob and value are read
    width: int
    idle: bool = False
    packed: PackedRows | None = None

    def pick(self, states_BLX: Tensor) -> Tensor:
        """Values at the positions before each response token, rows after rows: (N, …)."""
        if self.packed is not None:
            return states_BLX[0, self._position_N()]
        row_B1 = torch.arange(states_BLX.shape[0], device=states_BLX.device)[:, None]
        picked: Tensor = states_BLX[row_B1, self.position_BT][self.response_mask_BT]
        return picked

    def targets_N(self) -> Tensor:
        """Ids of the response tokens, rows after rows."""
        if self.packed is not None:
            return self.input_ids_BL[0, self._position_N() + 1]
        row_B1 = torch.arange(self.input_ids_BL.shape[0], device=self.input_ids_BL.device)[:, None]
        last = self.input_ids_BL.shape[1] - 1
        ids_BT = self.input_ids_BL[row_B1, (self.position_BT + 1).clamp(max=last)]
        return ids_BT[self.response_mask_BT]

    def _position_N(self) -> Tensor:
        return self.position_BT[self.response_mask_BT]

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
    batch: Batch, rows: Sequence[int], device: torch.device, *, packed: bool = False
) -> Slice:
    """Take rows of a batch, without the padding that they do not need, or `packed` without any.

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
    ends = None
    if packed:
        from ppo_cli.engine.packed_rows import PackedRows

        ends = PackedRows.of(length_B.tolist(), device)
        ids_BL = ids_BL[torch.arange(length)[None, :] < length_B[:, None]][None]
        position_BT += (length_B.cumsum(0) - length_B)[:, None]
    return Slice(
        row_B=row_B,
        input_ids_BL=ids_BL.to(device),
        response_mask_BT=batch.response_mask_BT[row_B, :width].to(device),
        position_BT=position_BT.clamp(max=ids_BL.shape[1] - 1).to(device),
        width=width,
        idle=idle,
        packed=ends,
    )


def row_lengths(batch: Batch) -> list[int]:
    """Prompt and response tokens of each row."""
    lengths: list[int] = (batch.prompt_len_B + batch.response_len_B).tolist()
    return lengths
