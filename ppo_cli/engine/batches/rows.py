"""Micro-batches: rows of a batch as the model's input, padded or packed, and their outputs.

Only response tokens get logits; prompt positions do not. In a packed micro-batch all rows are
concatenated into one (`models/attention.py` keeps them apart), and a prompt with several responses
can appear once.
Legend: B rows, L tokens, T response tokens, N response tokens of all rows, X any axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.algo.batch import Batch, TrainBatch
from ppo_cli.engine.device import send
from ppo_cli.engine.models.attention import PackedRows


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch on the compute device, cut to the longest of them.

    `targets_N` are the ids of the response tokens, row by row. Positions are indices and not
    masks: indexing with a mask makes the host wait until the device has counted it.
    With `packed` the ids are one row, the concatenation of all rows. An `idle` micro-batch exists
    only because other ranks have work in this turn: its row is computed but counts for nothing.
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

    def gather_states(self, states_BLX: Tensor) -> Tensor:
        """Return the states at the position before each response token, row by row: (N, …)."""
        # Rows share the last token of a prompt: the gradient adds up in the same order always.
        return states_BLX.flatten(0, 1).index_select(0, self.source_N)

    def scatter(self, values_N: Tensor) -> Tensor:
        """Scatter values of response tokens into rows, with zeros elsewhere: (B, T)."""
        places = torch.zeros(len(self.row_B) * self.width, device=values_N.device)
        return places.index_copy(0, self.place_N, values_N.float()).view(-1, self.width)

    def select(self, tensor_BT: Tensor) -> Tensor:
        """Return these rows of a response tensor of the whole batch, cut to the same width."""
        return send(tensor_BT[self.row_B][:, : self.width], self.input_ids_BL.device)

    def loss_mask_BT(self, batch: TrainBatch) -> Tensor:
        """Return the mask of response tokens that enter a loss; all False when idle."""
        mask_BT = self.select(batch.loss_mask_BT)
        return torch.zeros_like(mask_BT) if self.idle else mask_BT


def build_micro_batch(
    batch: Batch,
    rows: Sequence[int],
    device: torch.device,
    *,
    packed: bool = False,
    shared: bool = False,
) -> MicroBatch:
    """Build a micro-batch from rows of a batch, with the least padding, or none if `packed`.

    With `shared`, a prompt of several packed rows appears once, before the first of them.
    Without rows, returns an idle micro-batch of the shortest row.
    """
    idle = not rows
    if idle:
        rows = [int((batch.prompt_len_B + batch.response_len_B).argmin())]
    # Ids and positions of padded rows; log-probs are read one position before each token.
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
        # With shared prompts, row b continues the prompt of row `lead_B[b]`.
        lead_B = torch.arange(len(rows))
        if shared:
            first: dict[bytes, int] = {}
            prompts = row_prompts(ids_BL, prompt_len_B)
            lead_B = torch.tensor([first.setdefault(p, at) for at, p in enumerate(prompts)])
        # Of each row the tokens that it does not share are kept, and all rows are concatenated.
        shared_B = torch.where(lead_B == torch.arange(len(rows)), 0, prompt_len_B)
        own_B = length_B - shared_B
        ends = PackedRows.from_lengths(own_B.tolist(), device, lead_B.tolist(), shared_B.tolist())
        at_L = torch.arange(length)[None, :]
        ids_BL = ids_BL[(at_L >= shared_B[:, None]) & (at_L < length_B[:, None])][None]
        # A shared prompt token belongs to several rows.
        start_B = own_B.cumsum(0) - own_B
        count_BL = torch.ones(ids_BL.shape)
        for lead, count in zip(lead_B.tolist(), shared_B.tolist(), strict=True):
            count_BL[0, start_B[lead] : start_B[lead] + count] += 1
        # The first response token is predicted at the end of the lead's prompt.
        position_BT += (start_B - shared_B)[:, None]
        position_BT[:, 0] = start_B[lead_B] + prompt_len_B - 1
    else:
        position_BT += torch.arange(len(rows))[:, None] * length
    return MicroBatch(
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
    """Return the ids of each row's prompt as bytes, to compare prompts."""
    rows = zip(ids_BL.numpy(), prompt_len_B.tolist(), strict=True)
    return [ids_L[:length].tobytes() for ids_L, length in rows]


def row_lengths(batch: Batch) -> list[int]:
    """Return the number of prompt and response tokens of each row."""
    lengths: list[int] = (batch.prompt_len_B + batch.response_len_B).tolist()
    return lengths
