"""Gaps between two policies' log-probs of the same tokens: KL to the reference, and mismatch.

Estimators of KL(pi || ref) from tokens sampled from pi follow Schulman, "Approximating KL
divergence" (2020), with x = log pi - log ref. The mismatch is between the sampler's log-probs and
the trainer's for the same weights: kernels and precisions differ between the two, so samples come
from a slightly other policy than the one that is trained; truncated importance weights correct for
it (Ionides 2008; for language models Yao et al. 2025).
Legend: B sequences, T response tokens; a mask is bool, True counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from ppo_cli.algo.estimators import KlKind
from ppo_cli.algo.tokens import masked_mean, masked_sum, require_same_shape

# Bounds of log-ratios and of k3: exp must not overflow. The values are verl's.
_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0
_STRAIGHT_THROUGH = "+"  # suffix of kinds whose gradient is that of k2
# Alternative names of the estimators.
_SAME_AS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
SAMPLED_KINDS = tuple(kind for kind in get_args(KlKind) if kind != "full")


def token_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token.

    k1 (kl): x. abs: |x|. k2 (mse): x^2 / 2. k3 (low_var_kl): e^-x - 1 + x, with x held within
    20 and the result within 10. A trailing "+" keeps the value and takes k2's gradient, the
    only one whose expectation is the gradient of the KL: k2 - sg(k2) + sg(value).
    Raises ValueError for an unknown kind, and for "full", which `tokens.full_kl` computes.
    """
    require_same_shape(logprobs_BT=logprobs_BT, ref_logprobs_BT=ref_logprobs_BT)
    if kind not in SAMPLED_KINDS:
        if kind == "full":
            raise ValueError("kind 'full' needs the whole vocabulary: use tokens.full_kl")
        raise ValueError(f"unknown kl kind {kind!r}, known are {', '.join(SAMPLED_KINDS)}")
    plain = kind.removesuffix(_STRAIGHT_THROUGH)
    value_BT = _plain_kl(logprobs_BT, ref_logprobs_BT, _SAME_AS.get(plain, plain))
    if not kind.endswith(_STRAIGHT_THROUGH):
        return value_BT
    # The value of `kind`, the gradient of k2.
    k2_BT = _plain_kl(logprobs_BT, ref_logprobs_BT, "k2")
    return k2_BT - k2_BT.detach() + value_BT.detach()


def _plain_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: str) -> Tensor:
    """Return the KL estimate of each token: x, |x|, x^2 / 2 or k3, with x = logprob - ref_logprob.

    `kind` is "k1", "abs", "k2" or "k3". The gradient is that of the value.
    """
    x_BT = logprobs_BT - ref_logprobs_BT
    if kind == "k1":
        return x_BT
    if kind == "abs":
        return x_BT.abs()
    if kind == "k2":
        return 0.5 * x_BT.square()
    # k3, with the log-ratio and the result clamped.
    held_BT = (-x_BT).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (held_BT.exp() - held_BT - 1).clamp(-_K3_BOUND, _K3_BOUND)


def mean_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over valid sequences of their mean over tokens; 0 if there are none."""
    return masked_mean(masked_mean(kl_BT, mask_BT, 1), mask_BT.any(1))


def adapt_coef(
    coef: float, current_kl: float, sequences: int, *, target: float, horizon: int
) -> float:
    """Return the next coefficient for a target KL (Ziegler 2019, arXiv 1909.08593, section 2.2).

    coef (1 + clip(kl / target - 1, +-0.2) sequences / horizon), where `sequences` is the number of
    sequences in `current_kl`. Raises ValueError for a KL that is not finite: the coefficient could
    never recover from it.
    """
    if not math.isfinite(current_kl):
        raise ValueError(f"the KL to the reference is {current_kl}")
    error = min(max(current_kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * sequences / horizon)


@torch.no_grad()
def penalise(token_rewards_BT: Tensor, kl_BT: Tensor, mask_BT: Tensor, coef: float) -> Tensor:
    """Subtract coef times the KL from each token's reward; 0 outside the mask."""
    require_same_shape(token_rewards_BT=token_rewards_BT, kl_BT=kl_BT, mask_BT=mask_BT)
    return torch.where(mask_BT, token_rewards_BT - coef * kl_BT, 0.0)


@dataclass(frozen=True, eq=False)
class Mismatch:
    """Sampler minus trainer log-prob, summed over tokens (scalars, without gradient)."""

    abs_diff_sum: Tensor
    k3_kl_sum: Tensor  # estimate of KL(sampler || trainer), never negative
    abs_diff_max: Tensor
    token_count: Tensor


@torch.no_grad()
def importance_weights(
    old_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: str,
    threshold: float,
    lower: float | None = None,
    normalize: bool = False,
) -> Tensor:
    """Truncated importance weights min(trainer / sampler probability, threshold), 0 off the mask.

    With `lower` a weight outside [lower, threshold] is 0 instead (IcePop, arXiv 2510.18855).

    level "token": a ratio for each token. "sequence": the product over the row's tokens, the
    same for each of them. Log-ratios (sequence: their sum) are held within 20. `normalize`
    divides by the mean weight, over tokens or over rows that count, so call it on the whole
    rollout batch.
    """
    require_same_shape(
        old_logprobs_BT=old_logprobs_BT, sampler_logprobs_BT=sampler_logprobs_BT, mask_BT=mask_BT
    )
    log_ratio_BT = torch.where(mask_BT, old_logprobs_BT - sampler_logprobs_BT, 0.0)
    # One ratio per token, or the product over the row.
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp()
    # Truncate, or with a lower limit drop what is outside.
    if lower is None:
        ratio_BT = ratio_BT.clamp(max=threshold)
    else:
        ratio_BT = torch.where((ratio_BT >= lower) & (ratio_BT <= threshold), ratio_BT, 0.0)
    weights_BT = torch.where(mask_BT, ratio_BT, 0.0)
    if not normalize:
        return weights_BT
    mean = (masked_mean if level == "token" else mean_kl)(weights_BT, mask_BT)
    # A mean of (nearly) 0 means that nothing counts: leave the zeros as they are.
    return weights_BT / torch.where(mean > 1e-8, mean, 1.0)


@torch.no_grad()
def accepted_tokens(
    old_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    limits: Sequence[tuple[str, float | None, float]],
) -> Tensor:
    """Return the mask without tokens or rows outside the limits, each (name, lowest, highest).

    With x = log(trainer / sampler probability) held within 20, a token has k1 = -x, k2 = x^2 / 2
    and k3 = e^x - 1 - x (Schulman 2020, "Approximating KL Divergence"). The name says which, and
    whether it is the token's own (`token_k1`) or the sum, mean or largest of the row
    (`seq_sum_k1`), which takes out whole rows. Limits of k1 bound exp(k1).
    """
    x_BT = torch.where(mask_BT, old_logprobs_BT - sampler_logprobs_BT, 0.0)
    x_BT = x_BT.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    estimates = {"k1": -x_BT, "k2": 0.5 * x_BT.square(), "k3": x_BT.exp() - 1 - x_BT}
    kept_BT = mask_BT
    # Each limit is taken per token, or aggregated per row.
    for name, low, high in limits:
        level, kind = name.rsplit("_", 1)
        value_BT = estimates[kind]
        if level == "seq_sum":
            value_BT = masked_sum(value_BT, mask_BT, 1)[:, None]
        elif level == "seq_mean":
            value_BT = masked_mean(value_BT, mask_BT, 1)[:, None]
        elif level == "seq_max":  # of k2 and k3, which are never negative
            value_BT = value_BT.amax(1, keepdim=True)
        kept_BT = kept_BT & (value_BT <= (math.log(high) if kind == "k1" else high))
        if low is not None:
            kept_BT = kept_BT & (value_BT >= math.log(low))
    return kept_BT


@torch.no_grad()
def compute_mismatch(
    old_logprobs_BT: Tensor, sampler_logprobs_BT: Tensor, mask_BT: Tensor
) -> Mismatch:
    """Measure the difference of sampler and trainer log-probs; zeros for an empty mask."""
    require_same_shape(
        old_logprobs_BT=old_logprobs_BT, sampler_logprobs_BT=sampler_logprobs_BT, mask_BT=mask_BT
    )
    diff_BT = torch.where(mask_BT, sampler_logprobs_BT - old_logprobs_BT, 0.0)
    held_BT = (-diff_BT).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return Mismatch(
        abs_diff_sum=diff_BT.abs().sum(),
        k3_kl_sum=masked_sum(held_BT.exp() - held_BT - 1, mask_BT),
        abs_diff_max=diff_BT.abs().max() if diff_BT.numel() else diff_BT.sum(),
        token_count=mask_BT.sum(),
    )
