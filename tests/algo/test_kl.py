"""Estimators of the KL to the reference, and the controllers of its coefficient."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from ppo_cli.algo import kl
from ppo_cli.config.algorithm_schema import KlKind

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
    found = kl.token_kl(logprobs, REF, kind)
    assert found[0].tolist() == pytest.approx(VALUES[base], abs=1e-6)
    found.sum().backward()
    assert logprobs.grad is not None
    gradient = GRADIENTS["k2"] if kind.endswith("+") else GRADIENTS[base]
    assert logprobs.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_k3_is_held_within_bounds() -> None:
    far = torch.tensor([[-500.0, 500.0]])
    found = kl.token_kl(far, torch.zeros(1, 2), "k3")
    assert found.tolist() == [[10.0, 10.0]]
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


def test_the_schema_offers_the_same_kinds() -> None:
    assert set(get_args(KlKind)) == {*kl.SAMPLED_KINDS, "full"}


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown kl kind 'k4', known are kl, k1"):
        kl.token_kl(X, REF, "k4")
    with pytest.raises(ValueError, match=r"use tokens\.full_kl"):
        kl.token_kl(X, REF, "full")
    with pytest.raises(ValueError, match="shapes differ"):
        kl.token_kl(X, REF[:, :1], "k1")
    with pytest.raises(ValueError, match="shapes differ"):
        kl.penalise(X, REF[:, :1], X > 0, 0.1)
