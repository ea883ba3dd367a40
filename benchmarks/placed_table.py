"""What estimators make of placed scores, for a policy that is a table: no network, many seeds.

    OMP_NUM_THREADS=1 python benchmarks/placed_table.py [--seeds 6] [--only TASK ...]

The letters task of benchmarks/judge_bill.py: 40 steps of 16 responses of 16 digits, one for each of
82 letters, whose ten odds are the policy. Adam, with the advantages of the product; the better of
two learning rates for each row. Printed is the true quality: mean over the run / last four steps.

letters   the whole score is the share of right digits
noise     30 % of the scores of pieces are turned over; the whole score has no noise
pieces-4  four pieces of four digits
prefix    a digit counts only if all before it are right
trap      before them a choice: what is chosen in 80 % of the cases at first earns 1 and halves what
          each digit earns
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from judge_bill import (  # noqa: E402
    DIGITS,
    HABITS,
    LENGTH,
    LETTERS,
    RESPONSES,
    STEPS,
)

from ppo_cli.algo.advantages import compute_advantages  # noqa: E402

TASKS = ("letters", "noise", "pieces-4", "prefix", "trap")
RATES = (0.2, 0.4)
Form = tuple[str, int, float | None]  # estimator, responses to a prompt, gamma_piece
FORMS: tuple[Form, ...] = (
    ("grpo", 8, None), ("grpo", 4, None), ("rloo", 4, None), ("process_grpo", 8, None),
    *(("piece_batch", 1, gamma) for gamma in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)),
    *(("piece_group", 4, gamma) for gamma in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)),
    *(("piece_grpo", 4, gamma) for gamma in (0.0, 0.8, 0.9)),
)  # fmt: skip


def start_table() -> Any:
    """Return the logits of the first policy: a row for each letter, the last one for the choice."""
    odds = np.full((len(LETTERS) + 1, 10), 1e-3)
    for letter, row in zip(LETTERS, odds, strict=False):
        shifts, rate = HABITS[letter]
        row[DIGITS[letter]] = 1 - rate
        row[[(DIGITS[letter] + shift) % 10 for shift in shifts]] = rate / len(shifts)
    odds[-1, :2] = 0.8, 0.2
    odds[-1, 2:] = 1e-9
    return np.log(odds / odds.sum(1, keepdims=True))


def learn(task: str, form: Form, rate: float, seed: int) -> list[float]:
    """Return the true quality of each step."""
    estimator, responses, gamma = form
    placed = estimator not in ("grpo", "rloo")
    rng, logits, right_of = np.random.default_rng(seed), start_table(), [*DIGITS.values()]
    first, second = np.zeros_like(logits), np.zeros_like(logits)  # Adam's moments
    count = 4 if task == "pieces-4" else LENGTH
    size = LENGTH // count
    pieces_BT = (torch.arange(LENGTH) // size).expand(RESPONSES, LENGTH).contiguous()
    mask_BT = torch.ones(RESPONSES, LENGTH, dtype=torch.bool)
    qualities = []
    for step in range(1, STEPS + 1):
        rows = rng.integers(0, len(LETTERS), (RESPONSES // responses, LENGTH))
        rows = np.repeat(rows, responses, 0)
        if task == "trap":
            rows[:, 0] = len(LETTERS)
        odds = np.exp(logits - logits.max(1, keepdims=True))
        odds /= odds.sum(1, keepdims=True)
        drawn = (odds[rows].cumsum(-1) < rng.random((*rows.shape, 1))).sum(-1).clip(0, 9)
        marks = (drawn == np.array([*right_of, 0])[rows]).astype(float)
        if task == "trap":
            marks[:, 1:] *= 1 - marks[:, :1] / 2
        if task == "prefix":
            marks = marks.cumprod(1)
        whole = marks.mean(1)
        qualities.append(float(whole.mean()))
        scores = marks.reshape(RESPONSES, count, size).mean(-1)
        wrong = rng.random(scores.shape) < (0.3 if task == "noise" else 0.0)
        scores = np.where(wrong, 1 - scores, scores)
        # The whole score is shared out as for a judge that places; else it comes at the end.
        rewards = np.zeros(rows.shape)
        total = scores.sum(1, keepdims=True)
        shares = np.where(total > 0, scores / np.maximum(total, 1e-9), 1 / count)
        if placed:
            rewards[:, size - 1 :: size] = shares * whole[:, None]
        else:
            rewards[:, -1] = whole
        rewards_BT = torch.from_numpy(rewards)
        advantages_BT, _ = compute_advantages(
            estimator, token_rewards_BT=rewards_BT, mask_BT=mask_BT, piece_BT=pieces_BT,
            group_B=torch.arange(RESPONSES) // responses, values_BT=torch.zeros_like(rewards_BT),
            gamma_piece=gamma, norm_by_std=True,
        )  # fmt: skip
        advantages = advantages_BT.numpy() / rows.size
        gradient = np.zeros_like(logits)
        np.add.at(gradient, rows, -advantages[..., None] * odds[rows])
        np.add.at(gradient, (rows, drawn), advantages)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        logits += rate * first / (1 - 0.9**step) / scale
    return qualities


def main() -> None:
    """Print a row for each estimator, a column for each task."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=[*TASKS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'mean (sd) / last four':24}" + "".join(f"{task:>22}" for task in args.only))
    for form in FORMS:
        cells = []
        for task in args.only:
            trials = [[learn(task, form, rate, seed) for seed in range(args.seeds)]
                      for rate in RATES]  # fmt: skip
            best = max(trials, key=lambda runs: fmean(map(fmean, runs)))
            means = [fmean(run) for run in best]
            end = fmean(fmean(run[-4:]) for run in best)
            cells.append(f"{fmean(means):.3f} ({stdev(means):.3f}) / {end:.3f}")
        name = f"{form[0]} n={form[1]}" + ("" if form[2] is None else f" {form[2]:g}")
        print(f"{name:24}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
