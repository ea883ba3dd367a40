"""Draw one token for each row, from logits and one uniform number.

Shapes: R rows, V vocabulary, K candidates. Each rollout has its own stream of numbers, a hash
of (seed, prompt uid, sample), so that a draw does not depend on which rows share the batch.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_cli.engine.base import Sampling

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_A = np.uint64(0xBF58476D1CE4E5B9)
MIX_B = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, uid: str, sample: int) -> int:
    """Return the 64-bit key of one rollout's stream."""
    digest = hashlib.blake2b(f"{seed} {sample} {uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def compute_uniforms(
    keys_R: NDArray[np.uint64], positions_R: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return number `position` of each stream, in [0, 1): SplitMix64 (Steele et al., 2014)."""
    x = keys_R + (positions_R.astype(np.uint64) + np.uint64(1)) * GOLDEN
    x = (x ^ (x >> np.uint64(30))) * MIX_A
    x = (x ^ (x >> np.uint64(27))) * MIX_B
    x ^= x >> np.uint64(31)
    # 24 bits are what float32 holds without rounding up to 1.
    uniforms_R: NDArray[np.float32] = (x >> np.uint64(40)).astype(np.float32)
    return uniforms_R * np.float32(2.0**-24)


def draw_tokens(
    logits_RV: Tensor, sampling: Sampling, uniforms_R: NDArray[np.float32]
) -> tuple[Tensor, Tensor]:
    """Return the tokens and their log-probs under the temperature, before top-k and top-p.

    Temperature 0 takes the most likely token; its log-prob is that of temperature 1.
    """
    logits_RV = logits_RV.float()
    if sampling.temperature == 0:
        logprobs_RV = logits_RV.log_softmax(-1)
        chosen_R1 = logits_RV.argmax(-1, keepdim=True)
    else:
        logprobs_RV = (logits_RV / sampling.temperature).log_softmax(-1)
        uniforms_R1 = torch.from_numpy(uniforms_R).to(logits_RV.device)[:, None]
        chosen_R1 = _draw(logprobs_RV, sampling, uniforms_R1)
    return chosen_R1[:, 0], logprobs_RV.gather(-1, chosen_R1)[:, 0]


def _draw(logprobs_RV: Tensor, sampling: Sampling, uniforms_R1: Tensor) -> Tensor:
    top_k = min(sampling.top_k, logprobs_RV.shape[-1])
    if top_k <= 0 and sampling.top_p >= 1:
        return _invert(logprobs_RV.exp(), uniforms_R1)
    if top_k > 0:
        logprobs_RK, ids_RK = logprobs_RV.topk(top_k, dim=-1)
    else:
        logprobs_RK, ids_RK = logprobs_RV.sort(dim=-1, descending=True)
    probs_RK = logprobs_RK.softmax(-1)
    if sampling.top_p < 1:
        before_RK = probs_RK.cumsum(-1) - probs_RK
        before_RK[:, 0] = 0
        probs_RK = probs_RK.masked_fill(before_RK >= sampling.top_p, 0.0)
    return ids_RK.gather(-1, _invert(probs_RK, uniforms_R1))


def _invert(probs_RK: Tensor, uniforms_R1: Tensor) -> Tensor:
    """Return the first place where the running sum passes the uniform's share of the total."""
    sums_RK = probs_RK.cumsum(-1)
    total_R1 = sums_RK[:, -1:]
    # Rounding must not lift the target to the total: nothing lies beyond it.
    target_R1 = torch.minimum(
        uniforms_R1 * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1))
    )
    place_R1 = torch.searchsorted(sums_RK, target_R1, right=True)
    return place_R1.clamp_(max=probs_RK.shape[-1] - 1)
