"""GAE with separate lambdas and group means, against loops over plain Python numbers.

The loops see only tokens that count. Outside of the mask there is NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_cli.algo import advantages as adv

CASES = 40


def cases() -> Iterator[dict[str, Any]]:
    for seed in range(CASES):
        g = torch.Generator().manual_seed(seed)
        B, T = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 9), (1, 40)))
        mask = torch.rand(B, T, generator=g) < 0.8
        mask &= torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=g)
        rewards, values = torch.randn(2, B, T, generator=g)
        outside = (float("nan"), float("inf"), float("-inf"))[seed % 3]
        yield {
            "token_rewards_BT": torch.where(mask, rewards, outside),
            "values_BT": torch.where(mask, values, outside),
            "mask_BT": mask, "group_B": torch.randint(0, 3, (B,), generator=g),
        }  # fmt: skip


def tokens(case: dict[str, Any], b: int, name: str) -> list[float]:
    counted: list[float] = case[name][b][case["mask_BT"][b]].tolist()
    return counted


def td_sums(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Each token's sum of (gamma lam)^k delta, from its definition."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(deltas))
    ]


def assert_equal(actual: Tensor, mask: Tensor, expected: list[list[float]]) -> None:
    assert actual.isfinite().all() and not actual[~mask].any()
    for b, row in enumerate(expected):
        far = [abs(x - y) / max(1, abs(y)) for x, y in zip(actual[b][mask[b]], row, strict=True)]
        assert max(far, default=0) < 1e-6


@pytest.mark.parametrize("critic_lam", [None, 1.0, 0.8])
@pytest.mark.parametrize("alpha", [None, 0.05, 0.4])
@pytest.mark.parametrize("subtract", [False, True])
def test_advantages_and_targets_have_their_own_lambdas(
    critic_lam: float | None, alpha: float | None, subtract: bool
) -> None:
    gamma, lam = 0.98, 0.9
    for case in cases():
        double = {k: v.double() if v.is_floating_point() else v for k, v in case.items()}
        if subtract:
            double["token_rewards_BT"] = adv.subtract_group_means(
                double["token_rewards_BT"], double["mask_BT"], double["group_B"]
            )
        actual = adv.compute_advantages(
            "gae", **double, gamma=gamma, lam=lam, lam_alpha=alpha, critic_lam=critic_lam,
            whiten=False,
        )  # fmt: skip
        mask, groups = case["mask_BT"], case["group_B"].tolist()
        sums = {b: sum(tokens(case, b, "token_rewards_BT")) for b in range(len(mask))}
        advantages, returns = [], []
        for b in range(len(mask)):
            rewards, values = (tokens(case, b, n) for n in ("token_rewards_BT", "values_BT"))
            group = [sums[c] for c in sums if groups[c] == groups[b] and mask[c].any()]
            # A prompt's only response keeps its reward; one whose siblings failed has none.
            if subtract and rewards and groups.count(groups[b]) > 1:
                rewards[-1] -= fmean(group)
            own = lam if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, len(rewards))))
            critic = td_sums(rewards, values, gamma, lam if critic_lam is None else critic_lam)
            advantages.append(td_sums(rewards, values, gamma, own))
            returns.append([a + v for a, v in zip(critic, values, strict=True)])
        assert_equal(actual[0], mask, advantages)
        assert_equal(actual[1], mask, returns)


def test_the_critics_own_lambda_changes_no_advantage_and_the_same_one_no_bit() -> None:
    changed = False
    for case in cases():
        plain = adv.compute_advantages("gae", **case, gamma=0.99, lam=0.95)
        same = adv.compute_advantages("gae", **case, gamma=0.99, lam=0.95, critic_lam=0.95)
        other = adv.compute_advantages("gae", **case, gamma=0.99, lam=0.95, critic_lam=1.0)
        assert torch.equal(plain[0], same[0]) and torch.equal(plain[1], same[1])
        assert torch.equal(plain[0], other[0])
        changed |= not torch.equal(plain[1], other[1])
    assert changed


def test_lambda_grows_with_the_length() -> None:
    mask = torch.arange(100) < torch.tensor([[0], [10], [20], [40], [100]])
    lam = adv.length_adaptive_lam(mask, 0.05)
    # 1 - 1 / (0.05 * 40) = 0.5 and 1 - 1 / 5 = 0.8; up to 20 tokens it would be at most 0.
    assert lam.tolist() == pytest.approx([0, 0, 0, 0.5, 0.8])
