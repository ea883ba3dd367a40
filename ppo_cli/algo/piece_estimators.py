"""Advantage estimators for rewards of pieces; algo/estimators.py declares each.

What a piece is, and the legend: pieces.py. A group is the responses to a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_cli.algo.advantages import centre_in_groups, group_rows
from ppo_cli.algo.pieces import sum_pieces
from ppo_cli.algo.tokens import masked_mean, masked_sum
from ppo_cli.moments import TINY


def piece_group(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    piece_BT: Tensor,
    group_B: Tensor,
    gamma_piece: float,
    norm_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Discounted scores from a piece on, minus their mean at that piece in the group.

    The score of a piece is its reward times the number of pieces: their mean is the score of the
    whole. Later pieces are discounted by `gamma_piece`, and nothing is within one. A piece that was
    not written has the score of the whole response, so that neither more nor fewer pieces pay. They
    are counted up to the most pieces of the batch, also where the group has fewer. With
    `norm_by_std` the advantages of the batch are divided by their root mean square over tokens. A
    group of one has mean 0. Returns are the discounted scores.
    """
    rewards_BK, written_BK = sum_pieces(token_rewards_BT, mask_BT, piece_BT)
    whole_B1 = rewards_BK.sum(1, keepdim=True)
    scores_BK = torch.where(written_BK, _score_pieces(rewards_BK, written_BK), whole_B1)
    to_go_BK = _discount(scores_BK, gamma_piece)
    centred_BK = torch.zeros_like(to_go_BK)
    for at in group_rows(mask_BT, group_B):
        mean_K = to_go_BK[at].mean(0) if len(at) > 1 else torch.zeros_like(to_go_BK[0])
        centred_BK[at] = _without_rounding(to_go_BK[at], mean_K)
    returns_BT = _spread(to_go_BK, mask_BT, piece_BT, False)
    return _spread(centred_BK, mask_BT, piece_BT, norm_by_std), returns_BT


def piece_batch(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    piece_BT: Tensor,
    gamma_piece: float,
    norm_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """`piece_group` with all responses of the batch as one group: for one response a prompt."""
    one_B = torch.zeros(len(mask_BT), dtype=torch.int64)
    return piece_group(token_rewards_BT, mask_BT, piece_BT, one_B, gamma_piece, norm_by_std)


def piece_grpo(
    token_rewards_BT: Tensor,
    mask_BT: Tensor,
    piece_BT: Tensor,
    group_B: Tensor,
    gamma_piece: float,
    norm_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """The advantage of `grpo` for the whole score, plus that of the piece among the group's pieces.

    From the score of a piece, as in `piece_group`, the mean over all pieces of the group is
    subtracted, whatever their place, so that pieces need not line up; later pieces are added with
    the discount `gamma_piece`. With `norm_by_std` these are divided by their root mean square over
    the tokens of the batch.
    """
    rewards_BK, written_BK = sum_pieces(token_rewards_BT, mask_BT, piece_BT)
    scores_BK = _score_pieces(rewards_BK, written_BK)
    centred_BK = torch.zeros_like(scores_BK)
    for at in group_rows(mask_BT, group_B):
        mean = masked_mean(scores_BK[at], written_BK[at])
        centred_BK[at] = torch.where(written_BK[at], _without_rounding(scores_BK[at], mean), 0.0)
    pieces_BT = _spread(_discount(centred_BK, gamma_piece), mask_BT, piece_BT, norm_by_std)
    whole_B = masked_sum(token_rewards_BT, mask_BT, 1)
    whole_B = centre_in_groups(whole_B, mask_BT, group_B, norm_by_std)
    advantages_BT = torch.where(mask_BT, pieces_BT + whole_B[:, None], 0.0)
    return advantages_BT, advantages_BT.clone()


def process_grpo(
    token_rewards_BT: Tensor, mask_BT: Tensor, piece_BT: Tensor, group_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Process supervision with GRPO (Shao 2024, arXiv 2402.03300, section 4.1.3).

    Rewards of pieces are normalised over all pieces of the group; the advantage of a token is the
    sum from its piece on. The deviation has divisor n - 1; a lone piece has mean 0, deviation 1.
    """
    rewards_BK, written_BK = sum_pieces(token_rewards_BT, mask_BT, piece_BT)
    normalised_BK = torch.zeros_like(rewards_BK)
    for at in group_rows(mask_BT, group_B):
        written = written_BK[at]
        rewards = rewards_BK[at][written]
        # Each piece as a row of its own: the group's mean and deviation are those of its pieces.
        rows = torch.ones((len(rewards), 1), dtype=torch.bool)
        same = torch.zeros(len(rewards), dtype=torch.int64)
        normalised = centre_in_groups(rewards, rows, same, norm_by_std=True)
        normalised_BK[at] = rewards_BK[at].masked_scatter(written, normalised)
    advantages_BT = _spread(_discount(normalised_BK, 1.0), mask_BT, piece_BT, False)
    return advantages_BT, advantages_BT.clone()


def _score_pieces(rewards_BK: Tensor, written_BK: Tensor) -> Tensor:
    """Return rewards times the number of pieces written: their mean is the score of the whole."""
    return rewards_BK * written_BK.sum(1, keepdim=True)


def _discount(rewards_BK: Tensor, gamma: float) -> Tensor:
    """Return sum over later pieces j of gamma^(j - k) r_j, the piece itself included, (B, K)."""
    to_go_BK = rewards_BK.clone()
    for k in reversed(range(rewards_BK.shape[1] - 1)):
        to_go_BK[:, k] += gamma * to_go_BK[:, k + 1]
    return to_go_BK


def _without_rounding(values: Tensor, mean: Tensor) -> Tensor:
    """Return values minus their mean, 0 where they differ from it by rounding alone."""
    centred = values - mean
    return torch.where(centred.abs() > TINY * mean.abs().clamp_min(1), centred, 0.0)


def _spread(values_BK: Tensor, mask_BT: Tensor, piece_BT: Tensor, unit: bool) -> Tensor:
    """Return the value of each token's piece (B, T); with `unit` divided by their RMS, if not 0."""
    spread_BT = torch.where(mask_BT, values_BK.gather(1, piece_BT), 0.0)
    if not unit:
        return spread_BT
    rms = masked_mean(spread_BT**2, mask_BT).sqrt()
    return spread_BT / torch.where(rms > 0, rms, 1.0)
