"""Policy and value losses, and the aggregation of token losses to one number.

algo/estimators.py declares each policy loss; the parameters of its formula are its inputs, by name.

Legend: B sequences, T response tokens. A mask is bool and True means it counts. Losses are
divided by counts of the whole mini-batch, so the losses of its micro-batches and ranks add up.
Values outside a mask can be anything, NaN included: they do not affect losses or gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_cli.algo.estimators import POLICY_LOSSES
from ppo_cli.algo.tokens import masked_mean, masked_sum, require_finite, require_same_shape
from ppo_cli.errors import ConfigError
from ppo_cli.plugins import call, is_own

# Bounds of log-ratios, so that exp does not overflow; the values are verl's.
_LOG_RATIO_BOUND = 20.0
_LOG_SEQUENCE_RATIO_BOUND = 10.0


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The policy loss of some rows, and sums over their tokens (scalars, without gradient).

    Divide a sum by `token_count`, both added over micro-batches and ranks, for the mean.
    """

    loss: Tensor  # with gradient, normalised by the mini-batch's counts
    ratio_sum: Tensor  # new over old probability
    clip_sum: Tensor  # tokens in `TokenLoss.clip_BT`
    clip_lower_sum: Tensor  # tokens in `TokenLoss.clip_lower_BT`
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
    # Sums over this micro-batch, divided by counts of the mini-batch.
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
    raise ValueError(f"unknown mode {mode!r}")


def policy_loss(
    new_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    kind: str = "vanilla",
    mode: str = "token-mean",
    global_tokens: float,
    global_sequences: float,
    scale_factor: float | None = None,
    is_weight_BT: Tensor | None = None,
    **settings: Any,
) -> PolicyLoss:
    """The loss `kind` of `POLICY_LOSSES`, normalised as in `aggregate`.

    Its formula takes those of the tensors, of `settings` and of log_ratio_BT and ratio_BT (the
    probability ratio, see `_mask_inputs`) that its parameters name. With `per_sequence` losses
    `mode` is ignored: each sequence's mean counts once. `is_weight_BT` multiplies each token's
    loss, as a constant. Raises ValueError as `aggregate` does; ConfigError for an unknown kind, and
    as `_check_loss` does.
    """
    # The loss of each token, times its importance weight, then one number.
    declared = POLICY_LOSSES[kind]
    inputs = _mask_inputs(new_logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    returned = call("losses", declared.formula, inputs | settings)
    if not is_own(declared.formula):
        returned = _check_loss(kind, inputs["new_logprobs_BT"], mask_BT, returned)
    token_loss: TokenLoss = returned
    loss_BT = token_loss.loss_BT
    if is_weight_BT is not None:
        require_same_shape(is_weight_BT=is_weight_BT, mask_BT=mask_BT)
        weight_BT = torch.where(mask_BT, is_weight_BT.detach(), 0.0)
        if declared.geometric_weight:
            weight_BT = masked_mean((weight_BT + 1e-10).log(), mask_BT, 1).exp()[:, None]
        loss_BT = loss_BT * weight_BT
    loss = aggregate(
        loss_BT,
        mask_BT,
        "seq-mean-token-mean" if declared.per_sequence else mode,
        global_tokens=global_tokens,
        global_sequences=global_sequences,
        scale_factor=scale_factor,
    )
    # Metrics are sums on the device, added up later.
    with torch.no_grad():
        return PolicyLoss(
            loss=loss,
            ratio_sum=masked_sum(inputs["ratio_BT"], mask_BT),
            clip_sum=_count(token_loss.clip_BT, mask_BT),
            clip_lower_sum=_count(token_loss.clip_lower_BT, mask_BT),
            approx_kl_sum=masked_sum(-inputs["log_ratio_BT"], mask_BT),
            token_count=mask_BT.sum(),
        )


class TokenLoss(NamedTuple):
    """What a formula returns: the loss of each token, and where it is clipped; None: nowhere.

    For dppo the two masks have masked and truncated tokens, for dis the first has masked ones, for
    geo_mean they have tokens outside the range with A > 0 and with A < 0.
    """

    loss_BT: Tensor
    clip_BT: Tensor | None = None  # bool: the clip is active, or the token chosen
    clip_lower_BT: Tensor | None = None  # bool: the dual clip is active


def _count(where_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
    marked_BT = torch.zeros_like(mask_BT) if where_BT is None else where_BT & mask_BT
    return marked_BT.sum()


def _mask_inputs(
    new_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    """Return the inputs of a loss by name, 0 outside the mask (ratio_BT 1).

    ratio = exp(new - old), with the log-ratio clamped to [-20, 20], so that it stays finite. Raises
    ValueError for shapes that differ.
    """
    require_same_shape(
        new_logprobs_BT=new_BT, old_logprobs_BT=old_BT, advantages_BT=advantages_BT, mask_BT=mask_BT
    )
    new_BT, old_BT, advantages_BT = (
        torch.where(mask_BT, x, 0.0) for x in (new_BT, old_BT, advantages_BT)
    )
    log_ratio_BT = (new_BT - old_BT).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return {
        "new_logprobs_BT": new_BT,
        "old_logprobs_BT": old_BT,
        "log_ratio_BT": log_ratio_BT,
        "ratio_BT": log_ratio_BT.exp(),
        "advantages_BT": advantages_BT,
        "mask_BT": mask_BT,
    }


def _check_loss(name: str, new_BT: Tensor, mask_BT: Tensor, returned: Any) -> TokenLoss:
    """Return what the loss of a package or file returned: loss_BT, or (loss_BT, clip_BT).

    Raises ConfigError for other shapes, for NaN or inf, and for a loss without a gradient.
    """
    none_BT, label = torch.zeros_like(mask_BT), f"The policy loss {name}"
    if isinstance(returned, tuple) and len(returned) != 2:
        raise ConfigError(f"{label} must return loss_BT or (loss_BT, clip_BT).")
    loss_BT, clip_BT = returned if isinstance(returned, tuple) else (returned, none_BT)
    # Log-probs that are not finite already come from the model.
    require_finite(label, mask_BT & new_BT.isfinite(), loss_BT=loss_BT, clip_BT=clip_BT)
    if new_BT.requires_grad and not loss_BT.requires_grad:
        raise ConfigError(f"{label} has no gradient: compute it from new_logprobs_BT.")
    return TokenLoss(loss_BT, clip_BT.bool())


def vanilla(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = 3.0,
) -> TokenLoss:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and where A < 0, min(that, -A dual_clip).

    PPO, arXiv 1707.06347, eq. 7; two ranges from DAPO, arXiv 2503.14476, eq. 10; dual clip from
    arXiv 1912.09729, eq. 5, unless it is None.
    """
    # The larger of the two losses is the pessimistic one; the dual clip bounds it for A < 0.
    minus_BT = -advantages_BT
    free_BT = minus_BT * ratio_BT
    held_BT = minus_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    pessimistic_BT = torch.maximum(free_BT, held_BT)
    bound_BT = pessimistic_BT if dual_clip is None else minus_BT * dual_clip
    negative_BT = advantages_BT < 0
    loss_BT = torch.where(negative_BT, torch.minimum(pessimistic_BT, bound_BT), pessimistic_BT)
    return TokenLoss(loss_BT, held_BT > free_BT, (pessimistic_BT > bound_BT) & negative_BT)


def dppo_tv(
    new_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """`_dppo` with the total variation of a token, |p - old p|."""
    with torch.no_grad():
        p_BT, old_p_BT = new_logprobs_BT.exp(), old_logprobs_BT.exp()
    return _dppo(
        (p_BT - old_p_BT).abs(), p_BT, old_p_BT, new_logprobs_BT, ratio_BT, advantages_BT,
        (clip_low, clip_high), dual_clip,
    )  # fmt: skip


def dppo_kl(
    new_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """`_dppo` with the KL of a token.

    old p log(old p / p) + (1 - old p) log((1 - old p) / (1 - p)), each 1 - p with 1e-8 added.
    """
    with torch.no_grad():
        p_BT, old_p_BT = new_logprobs_BT.exp(), old_logprobs_BT.exp()
        rest_BT = ((1 - old_p_BT + 1e-8) / (1 - p_BT + 1e-8)).log()
        divergence_BT = old_p_BT * (old_logprobs_BT - new_logprobs_BT) + (1 - old_p_BT) * rest_BT
    return _dppo(
        divergence_BT, p_BT, old_p_BT, new_logprobs_BT, ratio_BT, advantages_BT,
        (clip_low, clip_high), dual_clip,
    )  # fmt: skip


def _dppo(
    divergence_BT: Tensor,
    p_BT: Tensor,
    old_p_BT: Tensor,
    new_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip: tuple[float, float],
    largest_ratio: float | None,
) -> TokenLoss:
    """-A sg(min(ratio, largest_ratio)) log p where the divergence allows it, else 0.

    DPPO (arXiv 2602.04879) with the binary divergences of a token, of p and old p: it is masked
    where A would move p further away and the divergence is above `clip` (low for A <= 0, high for
    A > 0). No `largest_ratio` truncates nothing.
    """
    # The mask and the weight are constants of the gradient.
    with torch.no_grad():
        rises_BT = advantages_BT > 0
        away_BT = torch.where(rises_BT, p_BT > old_p_BT, p_BT < old_p_BT)
        masked_BT = away_BT & (divergence_BT > torch.where(rises_BT, clip[1], clip[0]))
        weight_BT = ratio_BT.clamp(max=largest_ratio or torch.inf)
        truncated_BT = (weight_BT < ratio_BT) & ~masked_BT
    loss_BT = -advantages_BT * weight_BT * new_BT
    return TokenLoss(torch.where(masked_BT, 0.0, loss_BT), masked_BT, truncated_BT)


def gspo(
    new_logprobs_BT: Tensor,
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped surrogate on the sequence's ratio (GSPO-token, arXiv 2507.18071, eq. 5 to 14).

    s = exp(mean over the sequence of new - old). Each token gets s_t = sg(s) p / sg(p), where sg
    stops the gradient: all tokens share the value of s, and each has its own gradient. log s is
    clamped to at most 10.
    """
    # Forward: log s. Backward: the gradient of the token's log-prob.
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, 1)[:, None]
    log_s_BT = new_logprobs_BT - new_logprobs_BT.detach() + mean_B1.detach()
    ratio_BT = log_s_BT.clamp(max=_LOG_SEQUENCE_RATIO_BOUND).exp()
    return vanilla(ratio_BT, advantages_BT, clip_low, clip_high, dual_clip=None)


def sapo(ratio_BT: Tensor, advantages_BT: Tensor, tau_pos: float, tau_neg: float) -> TokenLoss:
    """-A (4 / tau) sigmoid(tau (ratio - 1)), with tau = tau_pos for A > 0, else tau_neg.

    SAPO, arXiv 2511.20347: a soft gate in place of the clip. Its slope is 1 at a ratio of 1 and
    falls on both sides, faster for a larger tau.
    """
    tau_BT = torch.where(advantages_BT > 0, tau_pos, tau_neg)
    gate_BT = 4 / tau_BT * (tau_BT * (ratio_BT - 1)).sigmoid()
    return TokenLoss(-advantages_BT * gate_BT)


def cispo(
    new_logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg(clip(ratio, 1 - low, 1 + high)) A log p: weights are clipped, gradients are not.

    CISPO, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5.
    """
    # Reported as clipped where the weight differs from the ratio.
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high).detach()
    return TokenLoss(-weight_BT * advantages_BT * new_logprobs_BT, weight_BT != ratio_BT)


def dis(
    new_logprobs_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-sg(ratio) A log p where 1 - low <= ratio <= 1 + high, else 0: masked, not clipped.

    Direct double-sided importance sampling of SAO (arXiv 2607.07508): the old log-probs are the
    sampler's, so one ratio corrects for older weights and for the sampler's rounding. A ratio
    outside the range is masked for either sign of A; masked tokens count in the means.
    """
    outside_BT = (ratio_BT < 1 - clip_low) | (ratio_BT > 1 + clip_high)
    weight_BT = torch.where(outside_BT, 0.0, ratio_BT).detach()
    return TokenLoss(-weight_BT * advantages_BT * new_logprobs_BT, outside_BT)


def gpg(new_logprobs_BT: Tensor, advantages_BT: Tensor) -> TokenLoss:
    """-A log p, without ratio and clip (GPG, arXiv 2504.02546, eq. 6)."""
    return TokenLoss(-advantages_BT * new_logprobs_BT)


def clip_cov(
    ratio_BT: Tensor, advantages_BT: Tensor, chosen_BT: Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """The clipped surrogate without dual clip; chosen tokens get 0 (arXiv 2505.22617, eq. 12)."""
    clipped = vanilla(ratio_BT, advantages_BT, clip_low, clip_high, dual_clip=None)
    return TokenLoss(torch.where(chosen_BT, 0.0, clipped.loss_BT), chosen_BT)


def kl_cov(
    log_ratio_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    chosen_BT: Tensor,
    kl_coef: float,
) -> TokenLoss:
    """-A ratio, plus kl_coef |new - old| for chosen tokens (arXiv 2505.22617, eq. 14)."""
    held_BT = torch.where(chosen_BT, kl_coef * log_ratio_BT.abs(), 0.0)
    return TokenLoss(-advantages_BT * ratio_BT + held_BT, chosen_BT)


def geo_mean(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """-A times the geometric mean of a sequence's clipped ratios (GMPO, arXiv 2507.20673, eq. 4).

    Each log-ratio is clipped to [-low, high], but only on the side where A rewards a change. A is
    the mean advantage of the sequence.
    """
    # The pessimistic log-ratio: the smaller one for A > 0, the larger one for A < 0.
    sign_BT = advantages_BT.sign()
    held_BT = log_ratio_BT.clamp(-clip_low, clip_high)
    least_BT = sign_BT * torch.minimum(sign_BT * log_ratio_BT, sign_BT * held_BT)
    ratio_B = masked_mean(least_BT, mask_BT, 1).exp()
    advantage_B = masked_mean(advantages_BT, mask_BT, 1)
    outside_BT = held_BT != log_ratio_BT
    return TokenLoss(
        (-advantage_B * ratio_B)[:, None].expand_as(mask_BT),
        outside_BT & (advantages_BT > 0),
        outside_BT & (advantages_BT < 0),
    )


def positive_nll(
    new_logprobs_BT: Tensor, mask_BT: Tensor, positive_BT: Tensor, *, global_positives: float
) -> Tensor:
    """-sum of log p over the tokens of right answers, divided by the number of these tokens.

    The positive-example LM loss of VAPO (arXiv 2504.05118). `positive_BT` is True at the tokens of
    right answers; `global_positives` counts those of the whole mini-batch. 0 if there are none.
    """
    return -masked_sum(new_logprobs_BT, mask_BT & positive_BT) / max(global_positives, 1)


@torch.no_grad()
def choose_tokens(
    kind: str,
    new_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    share: float,
    **settings: float,
) -> Tensor:
    """Return the mask of the tokens of a mini-batch that a loss treats in another way.

    cov = (log p - mean log p) (A - mean A), with means over all tokens under the mask (Cui 2025,
    arXiv 2505.22617, eq. 10). The function that the loss declares chooses `share` of all tokens, at
    least one, and gets its inputs by name.
    """
    inputs = _mask_inputs(new_logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT)
    new_BT, advantages_BT = inputs["new_logprobs_BT"], inputs["advantages_BT"]
    cov_BT = (new_BT - masked_mean(new_BT, mask_BT)) * (
        advantages_BT - masked_mean(advantages_BT, mask_BT)
    )
    count = max(1, int(share * int(mask_BT.sum())))
    values = {**inputs, **settings, "cov_BT": cov_BT, "count": count}
    at = call("losses", POLICY_LOSSES[kind].chooses, values)
    chosen_BT = torch.zeros_like(mask_BT)
    chosen_BT.view(-1)[at] = True
    return chosen_BT


def take_largest_covariance(cov_BT: Tensor, mask_BT: Tensor, count: int) -> Tensor:
    """Return the flat places of the tokens with the largest covariance."""
    order = torch.where(mask_BT, cov_BT, -torch.inf).flatten().argsort(descending=True)
    return order[: min(count, int(mask_BT.sum()))]


def draw_by_covariance(
    cov_BT: Tensor,
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    count: int,
    clip_low: float,
    clip_high: float,
    cov_low: float,
    cov_high: float,
) -> Tensor:
    """Return flat places drawn among tokens with cov_low < cov < cov_high that are not clipped.

    The number of candidates seeds the draw, so the same mini-batch gives the same tokens.
    """
    minus_BT = -advantages_BT
    clipped_BT = minus_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high) > minus_BT * ratio_BT
    free_BT = mask_BT & ~clipped_BT & (cov_BT > cov_low) & (cov_BT < cov_high)
    places = free_BT.flatten().nonzero().squeeze(1)
    draw = torch.Generator().manual_seed(len(places))
    return places[torch.randperm(len(places), generator=draw)[:count]]


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_range: float | None,
    mode: str = "token-mean",
    global_tokens: float,
    global_sequences: float,
    scale_factor: float | None = None,
) -> ValueLoss:
    """0.5 max((V - R)^2, (clip(V, old V +- clip_range) - R)^2), normalised as in `aggregate`.

    The clipped value loss of PPO as in the baselines code that came with arXiv 1707.06347. Without
    a `clip_range` it is 0.5 (V - R)^2.
    """
    require_same_shape(
        values_BT=values_BT, old_values_BT=old_values_BT, returns_BT=returns_BT, mask_BT=mask_BT
    )
    # Values outside the mask may be NaN.
    new_BT, old_BT, returns_BT = (
        torch.where(mask_BT, x, 0.0) for x in (values_BT, old_values_BT, returns_BT)
    )
    # clip(V, old V - range, old V + range); the bounds differ per token.
    reach = torch.inf if clip_range is None else clip_range
    held_BT = torch.maximum(torch.minimum(new_BT, old_BT + reach), old_BT - reach)
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
