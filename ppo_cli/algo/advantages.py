"""From token rewards to advantages: the formulas of the estimators, behind one call.

algo/estimators.py declares each; its parameters are its inputs, by name.

Legend: B sequences, T response tokens. Masks are bool, and True means that the token counts. A
mask may have holes (tokens that the policy did not write); returns are carried across them. A row
with an empty mask (its score failed) is left out of its group and of all statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.algo.pieces import last_of_pieces
from ppo_cli.algo.tokens import masked_sum, masked_whiten, require_finite, require_same_shape
from ppo_cli.errors import ConfigError
from ppo_cli.moments import TINY
from ppo_cli.plugins import call, is_own

_STD_EPS = 1e-6  # as in verl


def place_scores(scores_B: Tensor, response_len_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Put each row's score on its last token that counts; the rest is 0.

    The last token is the last True of the mask within the response length. A row without one
    gets no score, even if its score is NaN.
    """
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    counts_BT = mask_BT & (position_T < response_len_B[:, None])
    # The number of counting tokens from here to the end is 1 only at the last of them.
    later_BT = counts_BT.flip(1).cumsum(1).flip(1)
    return torch.where(counts_BT & (later_BT == 1), scores_B[:, None].float(), 0.0)


@torch.no_grad()
def compute_advantages(
    name: str, *, token_rewards_BT: Tensor, mask_BT: Tensor, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """Return (advantages_BT, returns_BT) of an estimator, 0 outside the mask, without gradient.

    The estimator takes those of ESTIMATOR_INPUTS that its parameters name. Rows of one group have
    the same number in `group_B`. Statistics are computed over all rows passed in, so call this on
    the whole rollout batch. Raises ValueError for shapes that differ; ConfigError for an unknown
    estimator, and for one of a package or file that returns other shapes, NaN or inf.
    """
    require_same_shape(token_rewards_BT=token_rewards_BT, mask_BT=mask_BT)
    formula = ESTIMATORS[name].formula
    inputs |= {"token_rewards_BT": token_rewards_BT, "mask_BT": mask_BT}
    returned: tuple[Tensor, Tensor] = call("estimators", formula, inputs)
    if is_own(formula):
        return returned
    label = f"The advantage estimator {name}"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ConfigError(f"{label} must return (advantages_BT, returns_BT).")
    require_finite(label, mask_BT, advantages_BT=returned[0], returns_BT=returned[1])
    advantages_BT, returns_BT = (torch.where(mask_BT, x_BT, 0.0) for x_BT in returned)
    return advantages_BT, returns_BT


def gae(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gamma: float,
    lam: float,
    whiten: bool = True,
    critic_lam: float | None = None,
    gamma_turn: float = 1.0,
    lam_alpha: float | None = None,
    piece_BT: Tensor | None = None,
    gamma_piece: float = 1.0,
    lam_piece: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman 2016, arXiv 1506.02438, eq. 11-16).

    With `lam_alpha` the advantages have `length_adaptive_lam` in place of `lam`. Returns are A + V
    before whitening, with the A of `critic_lam`, or of `lam` (decoupled GAE, VC-PPO, arXiv
    2503.01491): 1 makes them the rewards to come, without the bias of the values. Across a hole in
    the mask, where an environment wrote, the discount is gamma times `gamma_turn`; behind the last
    token of a piece it is gamma times `gamma_piece`. With `lam_piece` the lambda is that there and
    1 within a piece: a horizon in tokens would end within a piece of more than two or three.
    """
    require_same_shape(token_rewards_BT=token_rewards_BT, values_BT=values_BT, mask_BT=mask_BT)
    gammas_BT = torch.full_like(values_BT, gamma)
    gammas_BT[:, :-1][mask_BT[:, :-1] & ~mask_BT[:, 1:]] *= gamma_turn
    actor_lam: float | Tensor = lam
    if lam_alpha is not None:
        actor_lam = length_adaptive_lam(mask_BT, lam_alpha).to(token_rewards_BT.dtype)[:, None]
        critic_lam = lam if critic_lam is None else critic_lam
    if piece_BT is not None and (gamma_piece != 1 or lam_piece is not None):
        ends_BT = last_of_pieces(mask_BT, piece_BT)
        gammas_BT[ends_BT] *= gamma_piece
        if lam_piece is not None:
            actor_lam = torch.where(ends_BT, lam_piece, 1.0)
    advantages_BT = _sum_td_errors(token_rewards_BT, values_BT, mask_BT, gammas_BT, actor_lam)
    critic_BT = advantages_BT
    if critic_lam is not None:
        critic_BT = _sum_td_errors(token_rewards_BT, values_BT, mask_BT, gammas_BT, critic_lam)
    returns_BT = torch.where(mask_BT, critic_BT + values_BT, 0.0)
    return (masked_whiten(advantages_BT, mask_BT) if whiten else advantages_BT), returns_BT


def length_adaptive_lam(mask_BT: Tensor, alpha: float) -> Tensor:
    """Return lam_B = 1 - 1 / (alpha length), at least 0, in float64.

    Length-adaptive GAE (VAPO, arXiv 2504.05118). The length counts a row's tokens under the mask.
    The weights lam^k of GAE then add up to about alpha length, so that a reward at the end reaches
    the same share of a short and a long response.
    """
    return (1 - 1 / (alpha * mask_BT.sum(1).clamp_min(1).double())).clamp_min(0.0)


def _sum_td_errors(
    token_rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    gammas_BT: Tensor,
    lam: float | Tensor,
) -> Tensor:
    """Return A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t; (B, T).

    t+1 is the next token under the mask, gamma that of token t; 0 outside of the mask.
    """
    # State of the recursion, carried across tokens outside the mask.
    next_value_B = torch.zeros_like(values_BT[:, 0])
    advantage_B = torch.zeros_like(next_value_B)
    # Transposed, because reading a column of a wide tensor is slow.
    lams_BT = torch.as_tensor(lam, dtype=gammas_BT.dtype).expand(gammas_BT.shape)
    tensors = (token_rewards_BT, values_BT, mask_BT, gammas_BT, lams_BT)
    steps = [x.t().contiguous().unbind() for x in tensors]
    columns: list[Tensor] = []
    for reward_B, value_B, counts_B, gamma_B, lam_B in zip(*map(reversed, steps), strict=True):
        delta_B = reward_B + gamma_B * next_value_B - value_B
        advantage_B = torch.where(counts_B, delta_B + gamma_B * lam_B * advantage_B, advantage_B)
        next_value_B = torch.where(counts_B, value_B, next_value_B)
        columns.append(torch.where(counts_B, advantage_B, 0.0))
    return torch.stack(columns[::-1], 1)


def subtract_group_means(token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the mean reward of the group, as in grpo, from the last token of each response."""
    sums_B = masked_sum(token_rewards_BT, mask_BT, 1)
    minus_mean_B = centre_in_groups(sums_B, mask_BT, group_B) - sums_B
    length_B = torch.full_like(group_B, mask_BT.shape[1])
    return token_rewards_BT + place_scores(minus_mean_B, length_B, mask_BT)


def grpo(
    token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """(s - mean) / (std + 1e-6) within the group (Shao 2024, arXiv 2402.03300, section 4.1.2).

    Without `norm_by_std` only s - mean (Dr. GRPO, arXiv 2503.20783). std has divisor n - 1;
    a group of one has mean 0 and std 1.
    """
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    return _spread(centre_in_groups(scores_B, mask_BT, group_B, norm_by_std), mask_BT)


def centre_in_groups(
    scores_B: Tensor, mask_BT: Tensor, group_B: Tensor, norm_by_std: bool = False
) -> Tensor:
    """Return each score minus the mean of its group.

    With `norm_by_std` the difference is divided by the group's standard deviation. A group of one
    has mean 0 and deviation 1. Scores that differ only by rounding get 0: divided by their own
    deviation, errors would be as large as what is learned from (verl adds 1e-6 to it, TRL 1e-4).
    Rows with an empty mask get 0.
    """
    # One group at a time, because sizes differ.
    result_B = torch.zeros_like(scores_B)
    for at in group_rows(mask_BT, group_B):
        scores, mean, std = scores_B[at], _group_mean(scores_B[at]), torch.ones_like(scores_B[0])
        if len(at) > 1:
            std = scores.std()
            if std <= TINY * max(1.0, float(mean.abs())):
                continue
        result_B[at] = (scores - mean) / (std + _STD_EPS) if norm_by_std else scores - mean
    return result_B


def gdpo(
    parts_BK: Tensor,
    mask_BT: Tensor,
    group_B: Tensor,
    weights: Sequence[float] | None = None,
    norm_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Each of K reward parts normalised as in grpo, weighted, summed, whitened over all tokens.

    GDPO (Liu et al. 2026, arXiv 2601.05242, section 3): a part with a large spread does not
    dominate the others. Without `weights` each part has weight 1.
    """
    # Normalise each part within its group before they are added.
    sum_B = torch.zeros_like(parts_BK[:, 0])
    for k in range(parts_BK.shape[1]):
        weight = 1.0 if weights is None else weights[k]
        sum_B += weight * centre_in_groups(parts_BK[:, k], mask_BT, group_B, norm_by_std)
    whitened_BT = masked_whiten(sum_B[:, None].expand(mask_BT.shape), mask_BT)
    return whitened_BT, whitened_BT.clone()


def reinforce_plus_plus(
    token_rewards_BT: Tensor, mask_BT: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Discounted reward-to-go, whitened over the batch (REINFORCE++, arXiv 2501.03262)."""
    # From the last token to the first; tokens outside the mask pass the return on.
    returns_BT = torch.zeros_like(token_rewards_BT)
    return_B = torch.zeros_like(token_rewards_BT[:, 0])
    for t in reversed(range(token_rewards_BT.shape[1])):
        counts_B = mask_BT[:, t]
        return_B = torch.where(counts_B, token_rewards_BT[:, t] + gamma * return_B, return_B)
        returns_BT[:, t] = torch.where(counts_B, return_B, 0.0)
    return masked_whiten(returns_BT, mask_BT), returns_BT


def reinforce_plus_plus_baseline(
    token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Score minus group mean, whitened over all tokens of the batch (arXiv 2501.03262).

    A group of one has mean 0.
    """
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    centred_B = centre_in_groups(scores_B, mask_BT, group_B)
    whitened_BT = masked_whiten(centred_B[:, None].expand(mask_BT.shape), mask_BT)
    return whitened_BT, whitened_BT.clone()


def rloo(token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline, n / (n - 1) (s - mean) (Ahmadian 2024, arXiv 2402.14740, eq. 7).

    A group of one keeps its score; `rloo_vectorized` gives it 0.
    """
    # Written in the order of verl's formula, so that both give the same bits.
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    result_B = torch.zeros_like(scores_B)
    for at in group_rows(mask_BT, group_B):
        scores, n = scores_B[at], len(at)
        mean = _group_mean(scores)
        result_B[at] = scores * n / (n - 1) - mean * n / (n - 1) if n > 1 else scores
    return _spread(result_B, mask_BT)


def rloo_vectorized(
    token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline as in `rloo`, but a group of one gets advantage 0."""
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    result_B = torch.zeros_like(scores_B)
    for at in group_rows(mask_BT, group_B):
        scores, n = scores_B[at], len(at)
        if n > 1:
            result_B[at] = (n * scores - scores.sum()) / (n - 1)
    return _spread(result_B, mask_BT)


def remax(token_rewards_BT: Tensor, mask_BT: Tensor, baseline_B: Tensor) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the greedy response's score (Li 2024, arXiv 2310.10505, eq. 4).

    Undiscounted. Returns are the reward-to-go.
    """
    to_go_BT = sum_to_go(token_rewards_BT, mask_BT)
    return torch.where(mask_BT, to_go_BT - baseline_B[:, None], 0.0), to_go_BT


def sum_to_go(token_rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum of the rewards from each token on; 0 outside the mask."""
    kept_BT = torch.where(mask_BT, token_rewards_BT, 0.0)
    return torch.where(mask_BT, kept_BT.flip(1).cumsum(1).flip(1), 0.0)


def opo(token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Score minus the group's length-weighted mean score (Hao 2025, arXiv 2505.23585).

    The baseline of least variance if the gradient norm grows with the length. A group of one has
    baseline 0.
    """
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    len_B = mask_BT.sum(1)
    result_B = torch.zeros_like(scores_B)
    for at in group_rows(mask_BT, group_B):
        scores, lens = scores_B[at], len_B[at]
        if len(at) > 1:
            # Clamped, because rounding can move the mean outside the range of the scores.
            baseline = (lens * scores).sum() / lens.sum()
            result_B[at] = scores - baseline.clamp(scores.min(), scores.max())
        else:
            result_B[at] = scores
    return _spread(result_B, mask_BT)


def gpg(token_rewards_BT: Tensor, mask_BT: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor]:
    """Score minus group mean, times rows / rows with a score other than 0 (GPG, arXiv 2504.02546).

    The factor compensates for rows with score 0, as in the paper. A group of one has mean 0.
    """
    scores_B = masked_sum(token_rewards_BT, mask_BT, 1)
    factor = int(mask_BT.any(1).sum()) / max(int((scores_B != 0).sum()), 1)
    return _spread(centre_in_groups(scores_B, mask_BT, group_B) * factor, mask_BT)


def group_rows(mask_BT: Tensor, group_B: Tensor) -> list[Tensor]:
    """Return the row indices of each group, in row order, without rows with an empty mask.

    A group of several rows of which one alone counts is left out: its score has nothing to be
    compared with, and would become the advantage itself.
    """
    members = mask_BT.any(1).nonzero().squeeze(1)
    if len(members) == 0:
        return []
    # Stable sort by group, then split where the group changes.
    ordered = members[group_B[members].argsort(stable=True)]
    _, sizes = torch.unique_consecutive(group_B[ordered], return_counts=True)
    groups = torch.split(ordered, sizes.tolist())
    return [at for at in groups if len(at) > 1 or (group_B == group_B[at]).sum() == 1]


def _group_mean(scores: Tensor) -> Tensor:
    """Return the mean of a group, 0 for a group of one.

    Clamped between the smallest and the largest: otherwise equal scores could differ from their
    mean by rounding, which the division by a tiny deviation would amplify.
    """
    if len(scores) == 1:
        return torch.zeros_like(scores[0])
    return scores.mean().clamp(scores.min(), scores.max())


def _spread(result_B: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Expand a number per row to all tokens under the mask, as advantages and as returns."""
    spread_BT = torch.where(mask_BT, result_B[:, None], 0.0)
    return spread_BT, spread_BT.clone()
