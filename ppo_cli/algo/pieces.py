"""The pieces of responses: which token belongs to which, and their rewards.

A piece is a run of tokens that was scored by itself: a sentence, a line, a turn. Every token
belongs to one. What follows the last end (a separator, the end token) belongs to the last piece: as
a piece of its own it would earn nothing, always lie below the mean, and be punished until the
format breaks. A response without placed rewards is one piece. A piece scored 0 is a piece.

Legend as in advantages.py; K pieces, numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def number_pieces(ends: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return the piece of each token, int64 (B, T), from the index of each piece's last token.

    Ends may be in any order; pieces that end at one token are one piece.
    """
    position_T = torch.arange(width)
    # The piece of a token is the number of ends before it, the last end left out.
    rows = [
        torch.searchsorted(torch.tensor(sorted(set(row))[:-1], dtype=torch.int64), position_T)
        for row in ends
    ]
    return torch.stack(rows) if rows else torch.zeros((0, width), dtype=torch.int64)


def last_of_pieces(mask_BT: Tensor, piece_BT: Tensor) -> Tensor:
    """Return which tokens are the last under the mask of their piece, bool (B, T)."""
    position_BT = torch.arange(mask_BT.shape[1]).expand(mask_BT.shape)
    last_BK = torch.full((len(mask_BT), int(piece_BT.max()) + 1), -1)
    last_BK.scatter_reduce_(1, piece_BT, torch.where(mask_BT, position_BT, -1), "amax")
    return mask_BT & (position_BT == last_BK.gather(1, piece_BT))


def share_among_pieces(rest_B: Tensor, mask_BT: Tensor, piece_BT: Tensor) -> Tensor:
    """Return a reward of the whole response in equal shares at the last token of each piece.

    At the end it would be a reward, or a penalty, of the last piece.
    """
    ends_BT = last_of_pieces(mask_BT, piece_BT)
    return torch.where(ends_BT, (rest_B / ends_BT.sum(1).clamp_min(1))[:, None], 0.0)


def sum_pieces(
    token_rewards_BT: Tensor, mask_BT: Tensor, piece_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the reward of each piece, 0 where it was not written, and which were, both (B, K)."""
    shape = len(mask_BT), int(piece_BT.max()) + 1 if piece_BT.numel() else 0
    kept_BT = torch.where(mask_BT, token_rewards_BT, 0.0)
    rewards_BK = kept_BT.new_zeros(shape).scatter_add_(1, piece_BT, kept_BT)
    tokens_BK = torch.zeros(shape, dtype=torch.int64).scatter_add_(1, piece_BT, mask_BT.long())
    return rewards_BK, tokens_BK > 0
