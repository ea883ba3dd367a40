"""Policy and value losses, and how token losses become one number.

Legend: B sequences, T response tokens. A mask is bool and True means it counts. Losses are
divided by counts of the whole mini-batch, so those of its micro-batches and ranks add up to
its own. Values outside a mask may be anything, NaN included: they touch no loss or gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_cli.algo.tokens import masked_mean, masked_sum, require_same_shape

AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The policy loss of some rows, and sums over their tokens (scalars, without gradient).

    Divide a sum by `token_count`, both added over micro-batches and ranks, for the mean.
    """

    loss: Tensor  # with gradient, normalised by the mini-batch's counts
    ratio_sum: Tensor  # new over old probability
    clip_sum: Tensor  # tokens where the clipped surrogate is the one that counts
    clip_lower_sum: Tensor  # tokens where the dual clip bounds it
    approx_kl_sum: Tensor  # log old - log new
    token_count: Tensor


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """The value loss of some rows, and sums over their tokens (scalars, without gradient)."""

    loss: Tensor  # with gradient, normalised by the mini-batch's counts
    clip_sum: Tensor  # tokens where the clipped error is the larger one
    token_count: Tensor


def count_mask(mask_BT: Tensor) -> tuple[int, int]:
    """Return (tokens, sequences that have one): the global counts of a mini-batch."""
    return int(mask_BT.sum()), int(mask_BT.any(1).sum())


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    *,
    global_tokens: float,
    global_sequences: float,
    scale_factor: float | None = None,
) -> Tensor:
    """Turn token losses into one number, normalised by the mini-batch's global counts.

    token-mean: sum / tokens (DAPO, arXiv 2503.14476). token-sum: sum. seq-mean-token-sum: sum /
    sequences. seq-mean-token-mean: each row's mean, summed / sequences (GRPO, arXiv 2402.03300).
    seq-mean-token-sum-norm: sum / sequences / `scale_factor` (Dr. GRPO, arXiv 2503.20783), which
    must be one constant for all micro-batches, such as the longest response length.
    Gives 0 with a zero gradient when nothing counts. Raises ValueError for an unknown mode,
    shapes that differ, or a scale factor that is missing or not positive.
    """
    require_same_shape(loss_BT=loss_BT, mask_BT=mask_BT)
    if mode == "token-mean":
        return masked_sum(loss_BT, mask_BT) / max(global_tokens, 1)
    if mode == "token-sum":
        return masked_sum(loss_BT, mask_BT)
    if mode == "seq-mean-token-sum":
        return masked_sum(loss_BT, mask_BT, 1).sum() / max(global_sequences, 1)
    if mode == "seq-mean-token-mean":
        return masked_mean(loss_BT, mask_BT, 1).sum() / max(global_sequences, 1)
    if mode == "seq-mean-token-sum-norm":
        if scale_factor is None or not scale_factor > 0:
            raise ValueError(f"{mode} needs a positive scale_factor, not {scale_factor}")
        return masked_sum(loss_BT, mask_BT, 1).sum() / max(global_sequences, 1) / scale_factor
    raise ValueError(f"unknown mode {mode!r}, known are {', '.join(AGGREGATION_MODES)}")


def policy_loss(
    new_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 3.0,
    mode: str = "token-mean",
    global_tokens: float,
    global_sequences: float,
    scale_factor: float | None = None,
    is_weight_BT: Tensor | None = None,
) -> PolicyLoss:
    """Clipped surrogate with two clip ranges and dual clip, normalised as in `aggregate`.

    With ratio = exp(new - old), the log-ratio held within 20:
    L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7; clip-higher
    from DAPO, arXiv 2503.14476, eq. 10), and where A < 0, L = min(L, -A dual_clip) (arXiv
    1912.09729, eq. 5). `is_weight_BT` multiplies each token's L and gets no gradient.
    Raises ValueError for dual_clip <= 1, and as `aggregate` does.
    """
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    require_same_shape(
        new_logprobs_BT=new_logprobs_BT,
        old_logprobs_BT=old_logprobs_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
    )
    new_BT, old_BT, advantages_BT = (
        torch.where(mask_BT, x, 0.0) for x in (new_logprobs_BT, old_logprobs_BT, advantages_BT)
    )
    log_ratio_BT = (new_BT - old_BT).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    ratio_BT = log_ratio_BT.exp()
    free_BT = -advantages_BT * ratio_BT
    held_BT = -advantages_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    clipped_BT = torch.maximum(free_BT, held_BT)
    bound_BT = -advantages_BT * dual_clip
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(clipped_BT, bound_BT), clipped_BT)
    if is_weight_BT is not None:
        require_same_shape(is_weight_BT=is_weight_BT, mask_BT=mask_BT)
        loss_BT = loss_BT * is_weight_BT.detach()
    loss = aggregate(
        loss_BT,
        mask_BT,
        mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        scale_factor=scale_factor,
    )
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            ratio_sum=masked_sum(ratio_BT, mask_BT),
            clip_sum=((held_BT > free_BT) & mask_BT).sum(),
            clip_lower_sum=((clipped_BT > bound_BT) & negative_BT & mask_BT).sum(),
            approx_kl_sum=masked_sum(-log_ratio_BT, mask_BT),
            token_count=mask_BT.sum(),
        )


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_range: float,
    mode: str = "token-mean",
    global_tokens: float,
    global_sequences: float,
    scale_factor: float | None = None,
) -> ValueLoss:
    """0.5 max((V - R)^2, (clip(V, old V +- clip_range) - R)^2), normalised as in `aggregate`.

    The clipped value loss of PPO as in the baselines code that came with arXiv 1707.06347.
    """
    require_same_shape(
        values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT
    )
    new_BT, old_BT, returns_BT = (
        torch.where(mask_BT, x, 0.0) for x in (values_BT, old_values_BT, returns_BT)
    )
    held_BT = torch.maximum(torch.minimum(new_BT, old_BT + clip_range), old_BT - clip_range)
    free_error_BT = (new_BT - returns_BT).square()
    held_error_BT = (held_BT - returns_BT).square()
    loss = 0.5 * aggregate(
        torch.maximum(free_error_BT, held_error_BT),
        mask_BT,
        mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        scale_factor=scale_factor,
    )
    with torch.no_grad():
        return ValueLoss(
            loss=loss,
            clip_sum=((held_error_BT > free_error_BT) & mask_BT).sum(),
            token_count=mask_BT.sum(),
        )
