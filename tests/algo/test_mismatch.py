"""Importance weights between sampler and trainer, and how far apart the two are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_cli.algo import kl

NAN = float("nan")
SAMPLER = torch.tensor([[-1.0, NAN, -1.0], [-1.0, -1.0, NAN], [NAN, NAN, NAN]])
# Trainer over sampler probability: row 0 has 2 and 4, row 1 has 1/2 and 1.
OLD = torch.tensor(
    [[math.log(2) - 1, 5.0, math.log(4) - 1], [math.log(0.5) - 1, -1.0, 5.0], [5.0, 5.0, 5.0]]
)
MASK = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def weights(level: str, threshold: float, normalize: bool = False) -> Tensor:
    return kl.importance_weights(
        OLD, SAMPLER, MASK, level=level, threshold=threshold, normalize=normalize
    )


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected))


def test_token_weights_by_hand() -> None:
    close(weights("token", 3.0), [[2, 0, 3], [0.5, 1, 0], [0, 0, 0]])


def test_sequence_weights_by_hand() -> None:
    close(weights("sequence", 100.0), [[8, 0, 8], [0.5, 0.5, 0], [0, 0, 0]])
    close(weights("sequence", 3.0), [[3, 0, 3], [0.5, 0.5, 0], [0, 0, 0]])


def test_normalised_weights_by_hand() -> None:
    # Tokens 2, 3, 0.5, 1: mean 1.625. Rows 3 and 0.5: mean 1.75, whatever their lengths.
    m = 1.625
    close(weights("token", 3.0, True), [[2 / m, 0, 3 / m], [0.5 / m, 1 / m, 0], [0, 0, 0]])
    m = 1.75
    close(weights("sequence", 3.0, True), [[3 / m, 0, 3 / m], [0.5 / m, 0.5 / m, 0], [0, 0, 0]])


def test_the_row_mean_does_not_depend_on_lengths() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    old = torch.tensor([[math.log(3.0), 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = kl.importance_weights(
        old, torch.zeros(2, 3), mask, level="sequence", threshold=9, normalize=True
    )
    close(found, [[1.5, 1.5, 1.5], [0.5, 0, 0]])


@pytest.mark.parametrize("level", kl.LEVELS)
@pytest.mark.parametrize("normalize", [False, True])
def test_nothing_counts_gives_zeros(level: str, normalize: bool) -> None:
    found = kl.importance_weights(
        OLD, SAMPLER, MASK & False, level=level, threshold=2.0, normalize=normalize
    )
    assert found.tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("level", kl.LEVELS)
def test_huge_log_ratios_stay_finite(level: str) -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    for gap in (900.0, -900.0):
        found = kl.importance_weights(
            torch.full((1, 2), gap), torch.zeros(1, 2), mask, level=level, threshold=1e12
        )
        assert found.tolist() == [pytest.approx([math.exp(math.copysign(20, gap))] * 2)]


@pytest.mark.parametrize("level", kl.LEVELS)
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
    found = kl.compute_mismatch(OLD, SAMPLER, MASK)
    two = math.log(2)
    assert int(found.token_count) == 4
    assert float(found.abs_diff_sum) == pytest.approx(4 * two)
    k3 = (2 - two - 1) + (4 - 2 * two - 1) + (0.5 + two - 1)
    assert float(found.k3_kl_sum) == pytest.approx(k3)
    assert float(found.abs_diff_max) == pytest.approx(2 * two)


def test_mismatch_of_nothing_is_zero() -> None:
    for old, sampler, mask in ((OLD, SAMPLER, MASK & False), (OLD[:0], SAMPLER[:0], MASK[:0])):
        found = kl.compute_mismatch(old, sampler, mask)
        sums = (found.abs_diff_sum, found.k3_kl_sum, found.abs_diff_max)
        assert [float(s) for s in sums] == [0, 0, 0]
        assert int(found.token_count) == 0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="unknown level 'word', known are token, sequence"):
        weights("word", 2.0)
    with pytest.raises(ValueError, match="threshold must be positive, not 0"):
        weights("token", 0)
    with pytest.raises(ValueError, match="shapes differ"):
        kl.compute_mismatch(OLD, SAMPLER[:, :1], MASK)
    with pytest.raises(ValueError, match="shapes differ"):
        kl.importance_weights(OLD, SAMPLER[:1], MASK, level="token", threshold=2.0)


def test_what_is_too_far_from_the_sampler_is_rejected_by_token_or_by_row() -> None:
    # Trainer over sampler: row 0 has 2 and 4, row 1 has 1/2 and 1; exp(k1) is the inverse.
    def kept(*limits: tuple[str, float | None, float]) -> list[list[bool]]:
        found: list[list[bool]] = kl.accepted_tokens(OLD, SAMPLER, MASK, limits).tolist()
        return found

    none, whole = [False, False, False], MASK.tolist()
    assert kept() == whole
    # exp(k1): 0.5 and 0.25; 2 and 1.
    assert kept(("token_k1", 0.4, 1.5)) == [[True, False, False], [False, True, False], none]
    assert kept(("seq_sum_k1", 0.2, 3.0)) == [none, whole[1], none]  # 0.125; 2
    assert kept(("seq_mean_k1", 0.3, 3.0)) == whole  # 0.354; 1.414
    # k2: 0.240 and 0.961; 0.240 and 0. k3: 0.307 and 1.614; 0.193 and 0.
    assert kept(("token_k2", None, 0.3)) == [[True, False, False], whole[1], none]
    assert kept(("seq_max_k3", None, 1.6)) == [none, whole[1], none]
    assert kept(("seq_mean_k3", None, 0.97)) == whole
    assert kept(("token_k2", None, 0.3), ("token_k1", 0.6, 3.0)) == [none, whole[1], none]


def test_weights_outside_of_a_window_are_0() -> None:
    found = kl.importance_weights(OLD, SAMPLER, MASK, level="token", threshold=3.0, lower=0.7)
    close(found, [[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
