"""KL to the reference policy: per-token estimators, and the coefficient's control.

Legend: B sequences, T response tokens. Estimators of KL(pi || ref) from tokens sampled from pi
follow Schulman, "Approximating KL divergence" (2020), with x = log pi - log ref.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_cli.algo.tokens import masked_mean, require_same_shape

_LOG_RATIO_BOUND = 20.0
_K3_BOUND = 10.0
_STRAIGHT_THROUGH = "+"
_SAME_AS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
SAMPLED_KINDS = (
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
)  # fmt: skip


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
    k2_BT = _plain_kl(logprobs_BT, ref_logprobs_BT, "k2")
    return k2_BT - k2_BT.detach() + value_BT.detach()


def _plain_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: str) -> Tensor:
    x_BT = logprobs_BT - ref_logprobs_BT
    if kind == "k1":
        return x_BT
    if kind == "abs":
        return x_BT.abs()
    if kind == "k2":
        return 0.5 * x_BT.square()
    held_BT = (-x_BT).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return (held_BT.exp() - held_BT - 1).clamp(-_K3_BOUND, _K3_BOUND)


def mean_kl(kl_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the sequences that count of each one's mean over tokens; 0 if none counts."""
    return masked_mean(masked_mean(kl_BT, mask_BT, 1), mask_BT.any(1))


def adapt_coef(
    coef: float, current_kl: float, sequences: int, *, target: float, horizon: int
) -> float:
    """The next coefficient, steered towards a target KL (Ziegler 2019, arXiv 1909.08593, 2.2).

    coef (1 + clip(kl / target - 1, +-0.2) sequences / horizon), where `sequences` are those behind
    `current_kl`. Raises ValueError for a KL that is not finite: the coefficient could never
    recover from it.
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
