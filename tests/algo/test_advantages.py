"""The eight estimators: by hand, against slow numpy, and what must not change them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_cli.algo import advantages as adv
from ppo_cli.algo.estimators import ESTIMATOR_INPUTS, ESTIMATORS
from ppo_cli.plugins import import_name

NAN = float("nan")
quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)
WEIGHTS = (1.0, 0.5)
Inputs = dict[str, Tensor]


def draw(seed: int, *, empty_rows: bool = True) -> Inputs:
    """Random inputs with holes, and rewards and values everywhere, under the mask or not."""
    g = torch.Generator().manual_seed(seed)
    B, T = 9, 6
    mask = torch.rand(B, T, generator=g) < 0.7
    mask[:, 0] |= ~mask.any(1)
    if empty_rows:
        mask[1] = mask[4] = False
    return {
        "token_rewards_BT": torch.randn(B, T, generator=g),
        "values_BT": torch.randn(B, T, generator=g), "mask_BT": mask,
        "piece_BT": (torch.rand(B, T, generator=g) < 0.3).long().cumsum(1),
        "group_B": torch.tensor([0, 0, 0, 5, 5, 5, 5, 2, 2]),
        "baseline_B": torch.randn(B, generator=g), "parts_BK": torch.randn(B, 2, generator=g),
    }  # fmt: skip


def estimate(name: str, inputs: Inputs, **changes: object) -> tuple[Tensor, Tensor]:
    options = {"gamma": 0.97, "lam": 0.9, "weights": WEIGHTS, "gamma_piece": 0.9}
    return adv.compute_advantages(name, **{**inputs, **options, **changes})  # type: ignore[arg-type]


def of_scores(name: str, *scores: float, group: list[int], **options: object) -> list[float]:
    """Advantages of responses of two tokens, the score on the second."""
    rewards = torch.tensor([[0.0, score] for score in scores])
    inputs = {
        "token_rewards_BT": rewards, "values_BT": torch.zeros_like(rewards),
        "mask_BT": torch.ones_like(rewards, dtype=torch.bool), "group_B": torch.tensor(group),
    }  # fmt: skip
    advantages, returns = estimate(name, inputs, **options)
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # Group 7: scores 1, 3, 5, mean 3, std 2. Group 4: one alone has mean 0 and std 1.
        ("grpo", {}, [-1, 0, 1, 2]),
        ("grpo", {"norm_by_std": False}, [-2, 0, 2, 2]),
        # Each score minus the mean of the other two: 1 - 4, 3 - 3, 5 - 2.
        ("rloo", {}, [-3, 0, 3, 2]),
        ("rloo_vectorized", {}, [-3, 0, 3, 0]),
        # Centred -2, 0, 2 and 2, two tokens each: mean 0.5, variance 22 / 7.
        ("reinforce_plus_plus_baseline", {}, [x / (22 / 7) ** 0.5 for x in (-2.5, -0.5, 1.5, 1.5)]),
    ],
)
def test_advantages_of_scores_by_hand(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    advantages = of_scores(name, 1, 3, 5, 2, group=[7, 7, 7, 4], **options)
    assert advantages == pytest.approx(expected, abs=1e-5)


def test_gae_by_hand() -> None:
    # delta_1 = 1 - 0.4 = 0.6; delta_0 = 0 + 0.9 * 0.4 - 0.5 = -0.14; A_0 = -0.14 + 0.45 * 0.6.
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.4]])
    mask = torch.tensor([[True, True]])
    advantages, returns = adv.gae(rewards, values, mask, gamma=0.9, lam=0.5, whiten=False)
    assert advantages[0].tolist() == pytest.approx([0.13, 0.6])
    assert returns[0].tolist() == pytest.approx([0.63, 1.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_equal_scores_have_no_advantage_at_all(name: str) -> None:
    assert of_scores(name, *[0.1] * 7, group=[0] * 7) == [0.0] * 7


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg"])
def test_a_response_whose_siblings_have_no_score_has_no_advantage(name: str) -> None:
    inputs = draw(0)
    inputs["mask_BT"][7] = False  # of the group of rows 7 and 8
    assert estimate(name, inputs)[0][8].abs().max() == 0


def slow(name: str, inputs: Inputs, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """The definitions again, token by token in float64, over the tokens that count only."""
    x = {k: v.numpy() for k, v in inputs.items()}
    rewards, values = x["token_rewards_BT"].astype(float), x["values_BT"].astype(float)
    mask, group = x["mask_BT"], x["group_B"]
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    member = [b for b in range(len(mask)) if mask[b].any()]
    score = {b: sum(rewards[b][mask[b]]) for b in member}
    for b in member:
        at = np.flatnonzero(mask[b])
        n = len(at)
        r, v = rewards[b, at], np.append(values[b, at], 0.0)
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(n)]
        others = [c for c in member if group[c] == group[b] and c != b]
        peers = np.array([score[c] for c in [*others, b]])
        for i in range(n):
            if name == "gae":
                a = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, n))
                g = a + v[i]
            elif name in ("reinforce_plus_plus", "remax"):
                discount = gamma if name == "reinforce_plus_plus" else 1.0
                g = sum(discount ** (j - i) * r[j] for j in range(i, n))
                a = g - (x["baseline_B"][b] if name == "remax" else 0)
            elif name in ("rloo", "rloo_vectorized"):
                alone = score[b] if name == "rloo" else 0.0
                a = g = score[b] - np.mean([score[c] for c in others]) if others else alone
            elif name == "opo":
                lens = [mask[c].sum() for c in [*others, b]]
                a = g = score[b] - (np.average(peers, weights=lens) if others else 0)
            elif name == "gdpo":
                a = 0.0
                for k, weight in enumerate(WEIGHTS):
                    own_parts = x["parts_BK"][[*others, b], k].astype(float)
                    spread = np.std(own_parts, ddof=1) if others else 1.0
                    centre = own_parts.mean() if others else 0.0
                    a += weight * (own_parts[-1] - centre) / (spread + 1e-6)
                g = a
            elif name == "gpg":
                scored = len(member) / max(1, sum(s != 0 for s in score.values()))
                a = g = scored * (score[b] - (peers.mean() if others else 0))
            else:
                a = g = score[b] - (peers.mean() if others else 0)
                if name == "grpo" and others:
                    a = g = a / (np.std(peers, ddof=1) + 1e-6)
            advantages[b, at[i]], returns[b, at[i]] = a, g
    if name in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        accepted = advantages[mask]
        advantages[mask] = (accepted - accepted.mean()) / np.sqrt(accepted.var(ddof=1) + 1e-8)
    return advantages, advantages if name in ("reinforce_plus_plus_baseline", "gdpo") else returns


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if not ESTIMATORS[n].pieces])
@pytest.mark.parametrize("seed", [0, 1])
def test_against_slow_numpy(name: str, seed: int) -> None:
    inputs = draw(seed, empty_rows=seed % 2 == 0)
    estimated = estimate(name, inputs, gamma_piece=1.0)
    for actual, expected in zip(estimated, slow(name, inputs, 0.97, 0.9), strict=True):
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.numpy(), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_without_a_score_change_nothing(name: str) -> None:
    inputs = draw(5)
    present = inputs["mask_BT"].any(1)
    assert present.sum() < len(present)
    fewer = {k: v[present] for k, v in inputs.items()}
    ill = dict(inputs)
    for key in ("token_rewards_BT", "values_BT", "baseline_B", "parts_BK"):
        ill[key] = inputs[key].clone()
        ill[key][~present] = NAN
    for full_values, part in zip(estimate(name, ill), estimate(name, fewer), strict=True):
        torch.testing.assert_close(full_values[present], part, rtol=1e-6, atol=1e-6)
        assert full_values[~present].abs().max() == 0
    for nothing in estimate(name, inputs | {"mask_BT": torch.zeros_like(inputs["mask_BT"])}):
        assert nothing.shape == inputs["mask_BT"].shape and nothing.abs().max() == 0


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=st.integers(0, 10_000), extra=st.integers(1, 4))
def test_padding_with_anything_changes_nothing(name: str, seed: int, extra: int) -> None:
    inputs = draw(seed)
    padded = dict(inputs)
    fillers = ("token_rewards_BT", NAN), ("values_BT", NAN), ("mask_BT", False), ("piece_BT", 0)
    for key, filler in fillers:
        tail = torch.full((9, extra), filler, dtype=inputs[key].dtype)
        padded[key] = torch.cat([inputs[key], tail], 1)
    for narrow, wide in zip(estimate(name, inputs), estimate(name, padded), strict=True):
        torch.testing.assert_close(wide[:, :-extra], narrow, rtol=1e-5, atol=1e-5)
        assert wide[:, -extra:].abs().max() == 0


@pytest.mark.parametrize("name", ESTIMATORS)
@quick
@given(seed=st.integers(0, 10_000))
def test_row_order_and_group_numbers_do_not_matter(name: str, seed: int) -> None:
    inputs = draw(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    shuffled = {k: v[order] for k, v in inputs.items()}
    shuffled["group_B"] = 40 - 3 * shuffled["group_B"]
    for plain, other in zip(estimate(name, inputs), estimate(name, shuffled), strict=True):
        torch.testing.assert_close(other, plain[order], rtol=1e-4, atol=1e-4)


def test_inputs_stay_as_they_were() -> None:
    for name in ESTIMATORS:
        inputs = draw(7)
        before = {k: v.clone() for k, v in inputs.items()}
        advantages, returns = estimate(name, inputs)
        advantages.fill_(1)
        returns.fill_(2)
        assert advantages.max() == 1
        assert all(torch.equal(inputs[k], before[k]) for k in inputs)


def test_place_scores_on_the_last_token_that_counts() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    placed = adv.place_scores(torch.tensor([1.0, 2.0, 3.0, NAN]), torch.tensor([2, 4, 3, 4]), mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 2, 0], [0, 3, 0, 0], [0, 0, 0, 0]]
    assert placed.dtype == torch.float32


@pytest.mark.parametrize("name", ESTIMATORS)
def test_declared_needs_are_the_parameters_of_the_formula(name: str) -> None:
    declared = ESTIMATORS[name]
    needs = signature(import_name(declared.formula)).parameters.keys()
    named = [word in needs for word in ("values_BT", "group_B", "baseline_B", "parts_BK")]
    assert named == [declared.critic, declared.grouped, declared.baseline, declared.parts]
    assert needs <= set(ESTIMATOR_INPUTS)


def test_bad_arguments_are_named() -> None:
    inputs = draw(8)
    with pytest.raises(ValueError, match=r"unknown advantage estimator 'gea'"):
        estimate("gea", inputs)
    for name, message, changes in (
        ("grpo", "shapes differ", {"mask_BT": inputs["mask_BT"][:, :1]}),
        ("gae", "shapes differ", {"values_BT": inputs["values_BT"][:, :1]}),
    ):
        with pytest.raises(ValueError, match=message):
            estimate(name, inputs, **changes)
