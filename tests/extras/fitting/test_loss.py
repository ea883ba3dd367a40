"""The loss against numbers worked out by hand, and torch's own function."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from ppo_cli.extras.fitting.training import pair_losses, summarise_pairs

NONE = torch.zeros(3)


def test_hand_worked_numbers() -> None:
    # Differences of 0, ln 3 and -ln 3: chances of 1/2, 3/4 and 1/4 that the chosen one wins.
    chosen = tensor([1.0, math.log(3), 0.0])
    rejected = tensor([1.0, 0.0, math.log(3)])
    expected = [math.log(2), math.log(4 / 3), math.log(4)]
    assert pair_losses(chosen, rejected, NONE, 0.0).tolist() == pytest.approx(expected, rel=1e-6)
    # The margin is taken off the lead; centring adds the square of the sum, and it alone sees
    # both scores move together.
    losses = pair_losses(tensor([3.0]), tensor([-1.0]), tensor([4.0]), 0.25)
    assert losses.item() == pytest.approx(math.log(2) + 0.25 * 4.0)
    moved = pair_losses(chosen + 7, rejected + 7, NONE, 0.0)
    assert moved.tolist() == pytest.approx(expected, rel=1e-5)


def test_equals_torch_and_stays_finite_far_out() -> None:
    difference = tensor([-1e4, -30.0, 0.3, 30.0, 1e4])
    losses = pair_losses(difference, torch.zeros(5), torch.zeros(5), 0.0)
    assert torch.equal(losses, -torch.nn.functional.logsigmoid(difference))
    assert losses[0] == 1e4 and losses[-1] == 0


def test_figures_count_ties_half() -> None:
    figures = summarise_pairs(
        tensor([1.0, 2.0, 3.0, 0.0]), tensor([0.0, 2.0, 5.0, 0.0]), torch.zeros(4)
    )
    assert figures.accuracy == 0.5  # one right, one wrong, two ties
    assert figures.margin == pytest.approx((1 + 0 - 2 + 0) / 4)
    assert figures.mean == pytest.approx(13 / 8)
    assert figures.std == pytest.approx(math.sqrt(43 / 8 - (13 / 8) ** 2))


def test_the_better_figures_have_the_higher_accuracy_then_the_lower_loss() -> None:
    good = summarise_pairs(tensor([5.0]), tensor([0.0]), tensor([0.0]))
    less = summarise_pairs(tensor([1.0]), tensor([0.0]), tensor([0.0]))
    wrong = summarise_pairs(tensor([0.0]), tensor([0.1]), tensor([0.0]))
    assert good.better_than(less) and less.better_than(wrong) and wrong.better_than(None)
    assert not less.better_than(good) and not good.better_than(good)
