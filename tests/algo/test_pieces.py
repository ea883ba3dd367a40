"""Advantages of pieces, against loops over plain Python numbers and by hand."""

from __future__ import annotations

import math
import random
from statistics import fmean, pstdev, stdev

import pytest
import torch

from ppo_cli.algo.advantages import compute_advantages, gae
from ppo_cli.algo.pieces import number_pieces, sum_pieces

ESTIMATORS = ("piece_group", "piece_batch", "piece_grpo", "process_grpo")


def test_tokens_behind_the_last_end_belong_to_the_last_piece() -> None:
    # Ends in any order, two at one token, and a row without places.
    pieces = number_pieces([[3, 1, 1], [], [0, 5]], 6)
    assert pieces.tolist() == [[0, 0, 1, 1, 1, 1], [0] * 6, [0, 1, 1, 1, 1, 1]]


def test_three_responses_by_hand() -> None:
    """Rewards 0.5 and 0 of two pieces, 0.25 of one, and a row of another prompt; gamma 0.5."""
    nan = math.nan
    rewards = torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.25, nan], [1.0, nan, nan, nan]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    inputs = {
        "token_rewards_BT": rewards, "mask_BT": mask, "group_B": torch.tensor([0, 0, 1]),
        "piece_BT": number_pieces([[1, 3], [2], [0]], 4), "gamma_piece": 0.5,
        "norm_by_std": False,
    }  # fmt: skip
    # Scores 1 and 0; 0.25, and as much for the second piece, which was not written.
    advantages, returns = compute_advantages("piece_group", **inputs)
    assert advantages.tolist() == [
        [0.3125, 0.3125, -0.125, -0.125], [-0.3125, -0.3125, -0.3125, 0], [1.5, 0, 0, 0],
    ]  # fmt: skip
    assert returns.tolist() == [[1, 1, 0, 0], [0.375, 0.375, 0.375, 0], [1.5, 0, 0, 0]]
    # All three rows as one group: (1 + 0.375 + 1.5) / 3 at the first piece.
    advantages, _ = compute_advantages("piece_batch", **inputs)
    mean = 2.875 / 3
    assert advantages[:, 0].tolist() == pytest.approx([1 - mean, 0.375 - mean, 1.5 - mean])
    # Scores 1, 0 and 0.25 of pieces have the mean 5/12; whole scores 0.5 and 0.25 the mean 0.375.
    advantages, _ = compute_advantages("piece_grpo", **inputs)
    first, second, lone = 1 - 5 / 12, -5 / 12, 0.25 - 5 / 12
    assert advantages[0].tolist() == pytest.approx(
        [first + second / 2 + 0.125] * 2 + [second + 0.125] * 2
    )
    assert advantages[1, :3].tolist() == pytest.approx([lone - 0.125] * 3)
    assert advantages[2].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_equal_their_definition(name: str) -> None:
    for seed in range(60):
        dice = random.Random(seed)
        rows, width = dice.randint(1, 9), dice.randint(1, 25)
        groups = [dice.randint(0, 2) for _ in range(rows)]
        lengths = [dice.randint(0, width) for _ in range(rows)]
        gamma = dice.choice([0.0, 0.5, 0.9, 1.0])
        # Places of rewards within the part of the response that counts.
        ends = [sorted({dice.randrange(n) for _ in range(dice.randint(0, 5))}) if n else []
                for n in lengths]  # fmt: skip
        values = [[dice.choice([0.0, 0.25, 1.0, -0.5]) for _ in row] for row in ends]
        rewards, mask = torch.zeros(rows, width), torch.zeros(rows, width, dtype=torch.bool)
        for b in range(rows):
            mask[b, : lengths[b]] = True
            for end, value in zip(ends[b], values[b], strict=True):
                rewards[b, end] = value
        advantages, _ = compute_advantages(
            name, token_rewards_BT=rewards, mask_BT=mask, group_B=torch.tensor(groups),
            piece_BT=number_pieces(ends, width), gamma_piece=gamma, norm_by_std=False,
        )  # fmt: skip
        # A response without places is one piece with reward 0.
        pieces = [values[b] or [0.0] if lengths[b] else [] for b in range(rows)]
        for b in range(rows):
            cuts = [*ends[b][:-1], lengths[b] - 1] if lengths[b] else []
            expected = [0.0] * width
            for k, (start, end) in enumerate(zip([-1, *cuts], cuts, strict=False)):
                value = define(name, pieces, groups, b, k, gamma)
                expected[start + 1 : end + 1] = [value] * (end - start)
            assert advantages[b].tolist() == pytest.approx(expected, abs=1e-5), (seed, b)


def define(
    name: str, pieces: list[list[float]], groups: list[int], b: int, k: int, gamma: float
) -> float:
    """The advantage of piece k of response b; 0 if its score has nothing to be compared with."""
    together = [i for i in range(len(pieces)) if name == "piece_batch" or groups[i] == groups[b]]
    if len(together) > 1 and sum(bool(pieces[i]) for i in together) == 1:
        return 0.0
    peers = [
        i
        for i, row in enumerate(pieces)
        if row and (name == "piece_batch" or groups[i] == groups[b])
    ]

    def to_go(row: list[float], start: int, discount: float) -> float:
        return sum(discount ** (j - start) * row[j] for j in range(start, len(row)))

    if name in ("piece_group", "piece_batch"):
        longest = max(map(len, pieces))
        full = {
            i: [x * len(pieces[i]) for x in pieces[i]]
            + [sum(pieces[i])] * (longest - len(pieces[i]))
            for i in peers
        }
        mean = fmean(to_go(full[i], k, gamma) for i in peers) if len(peers) > 1 else 0.0
        return to_go(full[b], k, gamma) - mean
    if name == "piece_grpo":
        scores = {i: [x * len(pieces[i]) for x in pieces[i]] for i in peers}
        mean = fmean(x for row in scores.values() for x in row)
        whole = fmean(sum(pieces[i]) for i in peers) if len(peers) > 1 else 0.0
        return to_go([x - mean for x in scores[b]], k, gamma) + sum(pieces[b]) - whole
    every = [x for i in peers for x in pieces[i]]
    if len(every) == 1:
        return every[0] / (1 + 1e-6)
    if pstdev(every) < 1e-9:
        return 0.0
    return to_go([(x - fmean(every)) / (stdev(every) + 1e-6) for x in pieces[b]], k, 1.0)


@pytest.mark.parametrize("name", ["piece_group", "piece_batch", "piece_grpo"])
def test_the_number_of_pieces_does_not_pay(name: str) -> None:
    """Four responses of one score, all of whose pieces are equal: one has a single piece."""
    ends = [[11], [2, 5, 8, 11], [2, 5, 8, 11], [1, 3, 5, 7, 9, 11]]
    rewards = torch.zeros(4, 12)
    for row, places in enumerate(ends):
        rewards[row, places] = 0.8 / len(places)
    advantages, _ = compute_advantages(
        name, token_rewards_BT=rewards, mask_BT=torch.ones(4, 12, dtype=torch.bool),
        group_B=torch.zeros(4, dtype=torch.int64), piece_BT=number_pieces(ends, 12),
        gamma_piece=0.8, norm_by_std=True,
    )  # fmt: skip
    assert not advantages.any()


def test_equal_rewards_give_no_advantage() -> None:
    mask = torch.ones(4, 6, dtype=torch.bool)
    rewards = torch.full((4, 6), 0.1)
    for name in ESTIMATORS:
        advantages, _ = compute_advantages(
            name, token_rewards_BT=rewards, mask_BT=mask, group_B=torch.zeros(4, dtype=torch.int64),
            piece_BT=number_pieces([[2, 5]] * 4, 6), gamma_piece=0.9, norm_by_std=True,
        )  # fmt: skip
        assert not advantages.any(), name


@pytest.mark.parametrize("lam_piece", [None, 0.0, 0.8])
def test_gae_counts_its_horizon_in_pieces(lam_piece: float | None) -> None:
    """Within a piece nothing is discounted: the discounts are those of the piece ends."""
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.rand(2, 1, 7, generator=generator)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0]]).bool()
    advantages, _ = gae(
        rewards, values, mask, gamma=1.0, lam=0.9, whiten=False,
        piece_BT=number_pieces([[1, 4, 5]], 7), gamma_piece=0.5, lam_piece=lam_piece,
    )  # fmt: skip
    order, gammas = [0, 1, 3, 4, 5], [1, 0.5, 1, 0.5, 0.5]
    lams = [0.9] * 5 if lam_piece is None else [1, lam_piece, 1, lam_piece, lam_piece]
    advantage, following = 0.0, 0.0
    for t, gamma, lam in reversed(list(zip(order, gammas, lams, strict=True))):
        delta = float(rewards[0, t]) + gamma * following - float(values[0, t])
        advantage = delta + gamma * lam * advantage
        following = float(values[0, t])
        assert float(advantages[0, t]) == pytest.approx(advantage, abs=1e-6)


def test_a_piece_of_tokens_that_do_not_count_is_not_written() -> None:
    mask = torch.tensor([[True, False, False, True]])
    rewards, written = sum_pieces(torch.ones(1, 4), mask, number_pieces([[0, 2, 3]], 4))
    assert rewards.tolist() == [[1, 0, 1]] and written.tolist() == [[True, False, True]]
