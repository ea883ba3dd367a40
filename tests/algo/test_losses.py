"""Losses: by hand, against plain loops and autograd, and how they add up over micro-batches."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_cli.algo import losses
from ppo_cli.algo.estimators import AggregationMode

NAN = float("nan")
MODES = get_args(AggregationMode)
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def draw(seed: int, B: int = 8, T: int = 5) -> dict[str, Tensor]:
    """In float64, where another order of the same sums makes no difference that matters."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[2] = False
    noise = torch.randn(6, B, T, generator=g, dtype=torch.float64)
    old = noise[0] - 2
    return {
        "new": old + 0.6 * noise[1],
        "old": old,
        "advantages": 2 * noise[2],
        "weights": torch.rand(B, T, generator=g, dtype=torch.float64) + 0.5,
        "values": noise[3],
        "old_values": noise[4],
        "returns": noise[5],
        "mask": mask,
    }


def policy(
    x: dict[str, Tensor], mode: str, counts: tuple[int, int], dual_clip: float = 2.0
) -> losses.PolicyLoss:
    return losses.policy_loss(
        x["new"], x["old"], x["advantages"], x["mask"], clip_low=0.2, clip_high=0.3,
        dual_clip=dual_clip, mode=mode, global_tokens=counts[0], global_sequences=counts[1],
        scale_factor=5, is_weight_BT=x["weights"],
    )  # fmt: skip


def value(x: dict[str, Tensor], mode: str, counts: tuple[int, int]) -> losses.ValueLoss:
    return losses.value_loss(
        x["values"], x["old_values"], x["returns"], x["mask"], clip_range=0.4, mode=mode,
        global_tokens=counts[0], global_sequences=counts[1], scale_factor=5,
    )  # fmt: skip


def single(ratio: float, advantage: float, **options: Any) -> losses.PolicyLoss:
    """Loss of one token with a given ratio; clip 0.2 below and 0.4 above, dual clip at 3."""
    return losses.policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]),
        torch.ones(1, 1, dtype=torch.bool), clip_low=0.2, clip_high=0.4, global_tokens=1,
        global_sequences=1, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside the range: -A ratio
        (1.5, 2.0, -2.8, 1, 0),  # above it, A > 0: -A 1.4
        (0.5, 2.0, -1.0, 0, 0),  # below it, A > 0: the worse one counts
        (0.5, -2.0, 1.6, 1, 0),  # below it, A < 0: -A 0.8
        (1.5, -2.0, 3.0, 0, 0),  # above it, A < 0: the worse one counts
        (5.0, -2.0, 6.0, 0, 1),  # far above, A < 0: the dual clip, -A 3
        (5.0, 2.0, -2.8, 1, 0),  # the dual clip leaves A > 0 alone
    ],
)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, clipped: int, lower: int
) -> None:
    actual = single(ratio, advantage)
    assert float(actual.loss) == pytest.approx(loss)
    assert (int(actual.clip_sum), int(actual.clip_lower_sum)) == (clipped, lower)
    assert float(actual.ratio_sum) == pytest.approx(ratio)
    assert float(actual.approx_kl_sum) == pytest.approx(-math.log(ratio), abs=1e-6)
    assert int(actual.token_count) == 1


def test_sampler_weights_multiply_the_loss() -> None:
    loss = single(1.5, 2.0, is_weight_BT=torch.tensor([[0.5]])).loss
    assert float(loss) == pytest.approx(-1.4)


def test_without_a_dual_clip_a_bad_token_that_grew_likely_costs_in_full() -> None:
    unbounded = single(5.0, -2.0, dual_clip=None)
    assert float(unbounded.loss) == pytest.approx(10.0) and not unbounded.clip_lower_sum


def test_first_update_has_ratio_1_and_nothing_clipped() -> None:
    x = draw(0)
    x["new"] = x["old"].clone().requires_grad_()
    n = int(x["mask"].sum())
    loss = policy(x, "token-mean", (n, 7))
    assert loss.ratio_sum == loss.token_count == n
    assert loss.clip_sum == loss.clip_lower_sum == loss.approx_kl_sum == 0
    loss.loss.backward()
    expected = torch.where(x["mask"], -x["advantages"] * x["weights"] / n, 0.0)
    torch.testing.assert_close(x["new"].grad, expected)


def test_value_loss_by_hand() -> None:
    # V 3 from 1, clipped to 1.5. R 2: errors 1 and 0.25. R 4: errors 1 and 6.25, clipped larger.
    for target, reach, loss, clipped in (
        (2.0, 0.5, 0.5, 0), (4.0, 0.5, 3.125, 1), (4.0, None, 0.5, 0),
    ):  # fmt: skip
        actual = losses.value_loss(
            torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([[target]]),
            torch.ones(1, 1, dtype=torch.bool), clip_range=reach, global_tokens=1,
            global_sequences=1,
        )  # fmt: skip
        assert (float(actual.loss), int(actual.clip_sum)) == (loss, clipped)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 12 / 3),
        ("token-sum", 12),
        ("seq-mean-token-sum", 12 / 2),
        ("seq-mean-token-mean", (2 + 8) / 2),
        ("seq-mean-token-sum-norm", 12 / 2 / 4),
    ],
)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    loss = torch.tensor([[1.0, NAN, 3.0], [NAN, 8.0, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    assert losses.count_mask(mask) == (3, 2)
    actual = losses.aggregate(
        loss, mask, mode, global_tokens=3, global_sequences=2, scale_factor=4.0
    )
    assert float(actual) == pytest.approx(expected)


def with_gradients(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return x | {k: x[k].clone().requires_grad_() for k in ("new", "values", "weights")}


def total(x: dict[str, Tensor], mode: str, counts: tuple[int, int]) -> Tensor:
    return policy(x, mode, counts).loss + value(x, mode, counts).loss


@pytest.mark.parametrize("seed", [0, 3])
def test_value_loss_and_its_gradient_are_those_of_the_plain_formula(seed: int) -> None:
    x = with_gradients(draw(seed))
    loss = value(x, "token-mean", (31, 11)).loss
    values = x["values"].detach().clone().requires_grad_()
    clamped = x["old_values"] + (values - x["old_values"]).clamp(-0.4, 0.4)
    error = torch.maximum((values - x["returns"]) ** 2, (clamped - x["returns"]) ** 2)
    expected = (0.5 * error * x["mask"] / 31).sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x["values"].grad, values.grad)


@pytest.mark.parametrize("mode", MODES)
@quick
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 7), max_size=4))
def test_micro_batches_add_up_to_the_whole(mode: str, seed: int, cuts: set[int]) -> None:
    x = draw(seed)
    counts = losses.count_mask(x["mask"])
    full_batch, parts = with_gradients(x), with_gradients(x)
    expected = policy(full_batch, mode, counts)
    (expected.loss + value(full_batch, mode, counts).loss).backward()
    bounds = [0, *sorted(cuts), 8]
    sums: dict[str, Tensor] = {}
    for low, high in pairwise(bounds):
        micro = {k: v[low:high] for k, v in parts.items()}
        loss = policy(micro, mode, counts)
        (loss.loss + value(micro, mode, counts).loss).backward()
        for f in fields(loss):
            sums[f.name] = sums.get(f.name, torch.zeros(())) + getattr(loss, f.name).detach()
    for f in fields(expected):
        of_batch = getattr(expected, f.name).detach().double()
        torch.testing.assert_close(sums[f.name].double(), of_batch, rtol=1e-5, atol=1e-5)
    for key in ("new", "values"):
        torch.testing.assert_close(parts[key].grad, full_batch[key].grad, rtol=1e-6, atol=1e-7)
    assert parts["weights"].grad is None


@pytest.mark.parametrize("mode", MODES)
@quick
@given(seed=st.integers(0, 10_000), extra=st.integers(1, 4))
def test_padding_and_row_order_change_nothing(mode: str, seed: int, extra: int) -> None:
    x = draw(seed)
    counts = losses.count_mask(x["mask"])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    plain, other = with_gradients(x), {}
    for key, tensor in x.items():
        tail = torch.full((8, extra), False if key == "mask" else NAN, dtype=tensor.dtype)
        other[key] = torch.cat([tensor, tail], 1)[order]
    other = with_gradients(other)
    total(plain, mode, counts).backward()
    total(other, mode, counts).backward()
    torch.testing.assert_close(total(other, mode, counts), total(plain, mode, counts))
    for key in ("new", "values"):
        torch.testing.assert_close(other[key].grad[:, :-extra], plain[key].grad[order])
        assert other[key].grad[:, -extra:].abs().max() == 0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_counts_gives_zero_loss_and_zero_gradient(mode: str) -> None:
    x = {k: torch.full_like(v, NAN) if k != "mask" else v & False for k, v in draw(4).items()}
    x = with_gradients(x)
    loss = total(x, mode, (0, 0))
    assert loss == 0
    loss.backward()
    assert x["new"].grad.abs().max() == x["values"].grad.abs().max() == 0
    assert policy(x, mode, (0, 0)).token_count == policy(x, mode, (0, 0)).ratio_sum == 0


def test_what_lies_outside_the_mask_touches_nothing() -> None:
    clean = with_gradients(draw(7))
    total(clean, "token-mean", (20, 7)).backward()
    wrong = []
    for key, filler in product(draw(7).keys() - {"mask"}, (NAN, math.inf, -math.inf)):
        ill = draw(7)
        ill[key] = torch.where(ill["mask"], ill[key], filler)
        ill = with_gradients(ill)
        total(ill, "token-mean", (20, 7)).backward()
        if not all(torch.equal(ill[leaf].grad, clean[leaf].grad) for leaf in ("new", "values")):
            wrong.append((key, filler))
    assert wrong == []


def test_huge_log_ratios_stay_finite() -> None:
    x = draw(5)
    x["new"] = (x["old"] + 500.0).requires_grad_()
    loss = policy(x, "token-mean", (10, 5))
    loss.loss.backward()
    assert loss.loss.isfinite()
    assert x["new"].grad.isfinite().all()
    assert float(loss.approx_kl_sum / loss.token_count) == pytest.approx(-20)


def test_bad_arguments_are_named() -> None:
    x = draw(6)
    with pytest.raises(ValueError, match="unknown mode 'mean'"):
        policy(x, "mean", (1, 1))
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs a positive scale_factor"):
        losses.aggregate(x["values"], x["mask"], MODES[-1], global_tokens=1, global_sequences=1)
    for name, function, wrong in (
        ("advantages", policy, x["advantages"][:, :1]), ("weights", policy, x["weights"][:, :1]),
        ("returns", value, x["returns"][:1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="shapes differ"):
            function(x | {name: wrong}, "token-mean", (1, 1))
