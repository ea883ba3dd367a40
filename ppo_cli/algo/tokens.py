"""Computations per token: masked statistics, log-probs, entropy, full-vocabulary KL.

Legend: B sequences, T response tokens, N tokens of any sequences, H hidden size, V vocabulary.
A mask is bool and True means it counts. Values outside a mask may be anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppo_cli.errors import ConfigError
from ppo_cli.moments import TINY

Head = Callable[[Tensor], Tensor]
R = TypeVar("R")


def require_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have one shape: broadcasting here is a bug."""
    if len({tuple(t.shape) for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")


def require_finite(label: str, mask_BT: Tensor, **results: object) -> None:
    """Raise ConfigError for a result, by name, that is not finite numbers (B, T) under the mask."""
    for name, result in results.items():
        if not isinstance(result, Tensor) or result.shape != mask_BT.shape:
            shape = f"{tuple(result.shape)}" if isinstance(result, Tensor) else f"{result!r:.60}"
            raise ConfigError(
                f"{label} returned {name} {shape}; return a tensor {tuple(mask_BT.shape)}, a value "
                "for each token of each response."
            )
        if count := int((mask_BT & ~result.detach().isfinite()).sum()):
            raise ConfigError(
                f"{label} returned {name} with NaN or inf for {count} of {int(mask_BT.sum())} "
                "tokens that count."
            )


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum the elements under the mask; 0 where there are none."""
    masked = torch.where(mask, x, 0.0)
    return masked.sum() if dim is None else masked.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average the elements under the mask; 0 where there are none."""
    # At least 1, so that an empty mask gives 0 and not NaN.
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(x, mask, dim) / count.clamp_min(1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance of the elements under the mask, divisor n - 1; 0 for fewer than two."""
    count = mask.sum()
    # Bessel's correction; torch.var has no mask.
    biased = masked_mean((x - masked_mean(x, mask)) ** 2, mask)
    return torch.where(count > 1, biased * (count / (count - 1).clamp_min(1)), 0.0)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale to mean 0, variance 1 under the mask: (x - mean) / sqrt(var + 1e-8).

    0 outside the mask. A mask of one element gives 0, an empty one all zeros. Elements that differ
    only by rounding give 0.
    """
    if x.numel() == 0:
        return torch.zeros_like(x)
    mean, var = masked_mean(x, mask), masked_var(x, mask)
    differ = var.sqrt() > TINY * mean.abs().clamp_min(1)
    return torch.where(mask & differ, (x - mean) * torch.rsqrt(var + 1e-8), 0.0)


def gather_logprobs_entropy(
    hidden_NH: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    with_entropy: bool = True,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, softmax(logits / temperature).

    `head` maps (n, H) to (n, V) logits. They exist for `chunk` tokens at a time, in fp32; with
    gradients on, the backward pass recomputes a chunk's logits unless `keep` is set.
    Returns fp32 (logprobs_N, entropy_N), differentiable in `hidden_NH` and the head's weights;
    entropy is zeros without `with_entropy`. N may be 0. Logits must be finite.
    Raises ValueError for N that differ.
    """
    if hidden_NH.shape[0] != targets_N.shape[0]:
        raise ValueError(f"{hidden_NH.shape[0]} hidden states for {targets_N.shape[0]} targets")

    # The function that is computed, and recomputed, per chunk.
    def one_chunk(hidden_nH: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        logp_nV = _scaled_logits(hidden_nH, head, temperature).log_softmax(dim=-1)
        picked_n = logp_nV.gather(-1, targets_n[:, None]).squeeze(-1)
        if not with_entropy:
            return picked_n, torch.zeros_like(picked_n)
        return picked_n, -torch.linalg.vecdot(logp_nV.exp(), logp_nV)

    compute = one_chunk if keep else partial(_recomputed, one_chunk)
    # Chunks are concatenated, so that gradients flow to each of them.
    parts = [compute(hidden_NH[at], targets_N[at]) for at in _chunks(hidden_NH.shape[0], chunk)]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def full_kl(
    hidden_NH: Tensor,
    head: Head,
    ref_hidden_NH: Tensor,
    ref_head: Head,
    temperature: float,
    chunk: int,
) -> Tensor:
    """KL(actor || reference) of each token's distribution, summed over the whole vocabulary.

    Both sides are softmax(logits / temperature), in fp32, `chunk` tokens at a time. Returns fp32
    kl_N, differentiable in the actor only; the two hidden sizes may differ. N may be 0.
    Raises ValueError for N or vocabularies that differ.
    """
    if hidden_NH.shape[0] != ref_hidden_NH.shape[0]:
        raise ValueError(
            f"{hidden_NH.shape[0]} hidden states of the actor, "
            f"{ref_hidden_NH.shape[0]} of the reference"
        )

    # sum_v p_v (log p_v - log q_v), with gradients only through the actor.
    def one_chunk(hidden_nH: Tensor, ref_hidden_nH: Tensor) -> Tensor:
        """Return the KL of each token of a chunk, (n,); ValueError if the vocabularies differ."""
        logits_nV = _scaled_logits(hidden_nH, head, temperature)
        with torch.no_grad():
            ref_logits_nV = _scaled_logits(ref_hidden_nH, ref_head, temperature)
        if logits_nV.shape != ref_logits_nV.shape:
            raise ValueError(
                f"the actor has {logits_nV.shape[-1]} tokens in its vocabulary, "
                f"the reference {ref_logits_nV.shape[-1]}"
            )
        logp_nV, ref_logp_nV = logits_nV.log_softmax(-1), ref_logits_nV.log_softmax(-1)
        return (logp_nV.exp() * (logp_nV - ref_logp_nV)).sum(-1)

    return torch.cat([
        _recomputed(one_chunk, hidden_NH[at], ref_hidden_NH[at])
        for at in _chunks(hidden_NH.shape[0], chunk)
    ])  # fmt: skip


def _chunks(n: int, chunk: int) -> Iterator[slice]:
    """Return slices that cover n tokens; an empty one for none keeps gradients connected."""
    return (slice(start, start + chunk) for start in range(0, max(n, 1), chunk))


def _scaled_logits(hidden_nH: Tensor, head: Head, temperature: float) -> Tensor:
    logits_nV = head(hidden_nH).float()
    return logits_nV if temperature == 1 else logits_nV / temperature


def _recomputed(function: Callable[..., R], *inputs: Tensor) -> R:
    """Call the function; with gradients on, recompute its activations in the backward pass."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    result: R = checkpoint(function, *inputs, use_reentrant=False)
    return result
