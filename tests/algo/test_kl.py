"""Gaps between log-probs: the KL to the reference with its controllers, and sampler and trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_cli.algo import kl

X = torch.tensor([[0.5, -1.0, 0.0]])  # log pi - log ref
REF = torch.tensor([[-2.0, -3.0, -1.0]])
VALUES = {
    "k1": [0.5, -1.0, 0.0],
    "abs": [0.5, 1.0, 0.0],
    "k2": [0.125, 0.5, 0.0],
    "k3": [math.exp(-0.5) - 1 + 0.5, math.e - 2, 0.0],
}
GRADIENTS = {
    "k1": [1.0, 1.0, 1.0],
    "abs": [1.0, -1.0, 0.0],
    "k2": [0.5, -1.0, 0.0],
    "k3": [1 - math.exp(-0.5), 1 - math.e, 0.0],
}
PLAIN = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", kl.SAMPLED_KINDS)
def test_value_and_gradient_by_hand(kind: str) -> None:
    base = kind.removesuffix("+")
    base = PLAIN.get(base, base)
    logprobs = (REF + X).requires_grad_()
    kl_values = kl.token_kl(logprobs, REF, kind)
    assert kl_values[0].tolist() == pytest.approx(VALUES[base], abs=1e-6)
    kl_values.sum().backward()
    assert logprobs.grad is not None
    gradient = GRADIENTS["k2"] if kind.endswith("+") else GRADIENTS[base]
    assert logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_k3_is_held_within_bounds() -> None:
    far = torch.tensor([[-500.0, 500.0]])
    kl_values = kl.token_kl(far, torch.zeros(1, 2), "k3")
    assert kl_values.tolist() == [[10.0, 10.0]]
    below = kl.token_kl(torch.tensor([[30.0]]), torch.zeros(1, 1), "k3")
    assert below.tolist() == [[10.0]]


def test_k2_is_the_one_with_the_right_expected_gradient() -> None:
    """Summed over a small vocabulary, k2's gradient is the KL's; k1's is not."""
    logits = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    reference = torch.tensor([0.0, 0.5, -0.5]).log_softmax(0)

    def gradient(kind: str) -> torch.Tensor:
        logp = logits.log_softmax(0)
        estimates = kl.token_kl(logp[None], reference[None], kind)[0]
        expected = (logp.exp().detach() * estimates).sum()
        return torch.autograd.grad(expected, logits)[0]

    logp = logits.log_softmax(0)
    true = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)[0]
    for kind in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(gradient(kind), true)
    assert not torch.allclose(gradient("k1"), true, atol=1e-3)


def test_mean_kl_weighs_sequences_alike_and_leaves_out_empty_ones() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan], [5.0, math.nan, math.nan], [math.nan] * 3])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert kl.mean_kl(values, mask) == 3.5
    assert kl.mean_kl(values, torch.zeros_like(mask)) == 0


def test_penalise_subtracts_under_the_mask_only() -> None:
    rewards = torch.tensor([[0.0, 1.0, math.nan]])
    kl_BT = torch.tensor([[0.5, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False]])
    assert kl.penalise(rewards, kl_BT, mask, coef=0.5).tolist() == [[-0.25, 1.5, 0.0]]


def test_the_adaptive_coefficient_by_hand() -> None:
    def adapted(current: float, sequences: int) -> float:
        return kl.adapt_coef(0.1, current, sequences, target=0.05, horizon=1000)

    # 10 % above target over 100 sequences: 1 + 0.1 * 100 / 1000.
    assert adapted(0.055, 100) == pytest.approx(0.1 * 1.01)
    assert adapted(5.0, 100) == pytest.approx(0.1 * 1.02)
    assert adapted(-5.0, 100) == pytest.approx(0.1 * 0.98)
    assert adapted(0.0, 0) == 0.1
    for bad in (math.nan, math.inf):  # it could not recover from these
        with pytest.raises(ValueError, match="the KL to the reference is"):
            adapted(bad, 1)


def test_bad_arguments_are_named() -> None:
    for message, reference, kind in (
        ("unknown kl kind 'k4', known are kl, k1", REF, "k4"),
        (r"use tokens\.full_kl", REF, "full"),
        ("shapes differ", REF[:, :1], "k1"),
    ):
        with pytest.raises(ValueError, match=message):
            kl.token_kl(X, reference, kind)
    with pytest.raises(ValueError, match="shapes differ"):
        kl.penalise(X, REF[:, :1], X > 0, 0.1)


NAN = float("nan")
SAMPLER = torch.tensor([[-1.0, NAN, -1.0], [-1.0, -1.0, NAN], [NAN, NAN, NAN]])
# Trainer over sampler probability: row 0 has 2 and 4, row 1 has 1/2 and 1.
OLD = torch.tensor(
    [[math.log(2) - 1, 5.0, math.log(4) - 1], [math.log(0.5) - 1, -1.0, 5.0], [5.0, 5.0, 5.0]]
)
MASK = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def weights(level: str, threshold: float, mask: Tensor = MASK, **options: Any) -> Tensor:
    return kl.importance_weights(OLD, SAMPLER, mask, level=level, threshold=threshold, **options)


def close(actual: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32))


# Tokens 2, 3, 0.5, 1: mean 1.625. Rows 3 and 0.5: mean 1.75, whatever their lengths.
@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("token", {}, [[2, 0, 3], [0.5, 1, 0]]),
        ("token", {"lower": 0.7}, [[2, 0, 0], [0, 1, 0]]),
        ("token", {"normalize": True}, [[2 / 1.625, 0, 3 / 1.625], [0.5 / 1.625, 1 / 1.625, 0]]),
        ("sequence", {"threshold": 100.0}, [[8, 0, 8], [0.5, 0.5, 0]]),
        ("sequence", {}, [[3, 0, 3], [0.5, 0.5, 0]]),
        ("sequence", {"normalize": True}, [[3 / 1.75, 0, 3 / 1.75], [0.5 / 1.75, 0.5 / 1.75, 0]]),
    ],
)
def test_weights_by_hand(level: str, options: dict[str, Any], expected: list[list[float]]) -> None:
    close(weights(level, **{"threshold": 3.0} | options), [*expected, [0, 0, 0]])


def test_the_row_mean_does_not_depend_on_lengths() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = torch.tensor([[math.log(3.0), 0.0, 0.0], [0.0, 0.0, 0.0]])
    weights = kl.importance_weights(
        old, torch.zeros(2, 3), mask, level="sequence", threshold=9, normalize=True
    )
    close(weights, [[1.5, 1.5, 1.5], [0.5, 0, 0]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_counts_gives_zeros(level: str, normalize: bool) -> None:
    zeros = weights(level, 2.0, MASK & False, normalize=normalize)
    assert zeros.tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_huge_log_ratios_stay_finite(level: str) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    for gap in (900.0, -900.0):
        weights = kl.importance_weights(
            torch.full((1, 2), gap), torch.zeros(1, 2), mask, level=level, threshold=1e12
        )
        assert weights.tolist() == [pytest.approx([math.exp(math.copysign(20, gap))] * 2)]


@pytest.mark.parametrize("level", ["token", "sequence"])
@quick
@given(seed=st.integers(0, 10_000), normalize=st.booleans())
def test_padding_row_order_and_gradient(level: str, seed: int, normalize: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    old, sampler = torch.randn(2, 6, 4, generator=g)
    mask = torch.rand(6, 4, generator=g) < 0.6
    options = {"level": level, "threshold": 2.0, "normalize": normalize}
    plain = kl.importance_weights(old.requires_grad_(), sampler, mask, **options)
    assert not plain.requires_grad
    order = torch.randperm(6, generator=g)
    padded = [
        torch.cat([x, torch.full((6, 2), filler, dtype=x.dtype)], 1)[order]
        for x, filler in ((old, NAN), (sampler, NAN), (mask, False))
    ]
    wide = kl.importance_weights(*padded, **options)
    torch.testing.assert_close(wide[:, :4], plain[order])
    assert wide[:, 4:].abs().max() == 0


def test_mismatch_by_hand() -> None:
    mismatch = kl.compute_mismatch(OLD, SAMPLER, MASK)
    two = math.log(2)
    assert int(mismatch.token_count) == 4
    assert float(mismatch.abs_diff_sum) == pytest.approx(4 * two)
    k3 = (2 - two - 1) + (4 - 2 * two - 1) + (0.5 + two - 1)
    assert float(mismatch.k3_kl_sum) == pytest.approx(k3)
    assert float(mismatch.abs_diff_max) == pytest.approx(2 * two)


def test_mismatch_of_nothing_is_zero() -> None:
    for old, sampler, mask in ((OLD, SAMPLER, MASK & False), (OLD[:0], SAMPLER[:0], MASK[:0])):
        mismatch = kl.compute_mismatch(old, sampler, mask)
        sums = (mismatch.abs_diff_sum, mismatch.k3_kl_sum, mismatch.abs_diff_max)
        assert [float(s) for s in sums] == [0, 0, 0]
        assert int(mismatch.token_count) == 0


def test_bad_arguments_of_weights_are_named() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        kl.compute_mismatch(OLD, SAMPLER[:, :1], MASK)
    with pytest.raises(ValueError, match="shapes differ"):
        kl.importance_weights(OLD, SAMPLER[:1], MASK, level="token", threshold=2.0)


def test_what_is_too_far_from_the_sampler_is_rejected_by_token_or_by_row() -> None:
    # Trainer over sampler: row 0 has 2 and 4, row 1 has 1/2 and 1; exp(k1) is the inverse.
    first, second, neither = [True, False, False], [False, True, False], [False] * 3
    full_mask = MASK.tolist()

    def accepted_tokens(*limits: tuple[str, float | None, float]) -> list[list[bool]]:
        accepted: list[list[bool]] = kl.accepted_tokens(OLD, SAMPLER, MASK, limits).tolist()
        assert accepted.pop() == neither
        return accepted

    assert accepted_tokens() == full_mask[:2]
    # exp(k1): 0.5 and 0.25; 2 and 1. Of rows 0.125; 2 and 0.354; 1.414.
    assert accepted_tokens(("token_k1", 0.4, 1.5)) == [first, second]
    assert accepted_tokens(("seq_sum_k1", 0.2, 3.0)) == [neither, full_mask[1]]
    assert accepted_tokens(("seq_mean_k1", 0.3, 3.0)) == full_mask[:2]
    # k2: 0.240 and 0.961; 0.240 and 0. k3: 0.307 and 1.614; 0.193 and 0.
    assert accepted_tokens(("token_k2", None, 0.3)) == [first, full_mask[1]]
    assert accepted_tokens(("seq_max_k3", None, 1.6)) == [neither, full_mask[1]]
    assert accepted_tokens(("seq_mean_k3", None, 0.97)) == full_mask[:2]
    both = accepted_tokens(("token_k2", None, 0.3), ("token_k1", 0.6, 3.0))
    assert both == [neither, full_mask[1]]
