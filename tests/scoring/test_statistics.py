"""Statistics: agreement measures, means, pass@k and paired differences.

Against hand-worked numbers, slow but obvious versions, closed forms, and repeated draws.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ppo_cli import estimates
from ppo_cli.scoring import statistics as stats
from tests.scoring.commands import Bench
from tests.scoring.scripted import write_rows

SCORES = st.lists(st.integers(0, 5), min_size=2, max_size=12)


@given(SCORES)
def test_ranks_as_by_counting(values: list[int]) -> None:
    slow = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    assert stats.ranks(values).tolist() == slow


def test_correlations_by_hand() -> None:
    # Ranks differ by 0, 1, -1, 0: 1 - 6 * 2 / (4 * 15).
    assert stats.spearman([1, 2, 3, 4], [10, 300, 20, 4000]) == pytest.approx(0.8)
    assert stats.spearman([1, 2, 3], [1, 8, 27]) == pytest.approx(1.0)
    # Deviations (-1, 0, 1) and (-2, -1, 3): 5 / sqrt(2 * 14).
    assert stats.pearson([1, 2, 3], [2, 3, 7]) == pytest.approx(5 / 28**0.5)
    for x, y in (([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [2, 2, 2]), ([1], [2]), ([], [])):
        assert stats.pearson(x, y) is stats.spearman(x, y) is None


def test_bootstrap_of_a_mean_is_the_textbook_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    first, second = (
        estimates.bootstrap(lambda rows: float(values[rows].mean()), len(values)) for _ in range(2)
    )
    half = 1.96 * values.std() / 20
    assert first.value == pytest.approx(values.mean())
    ends = (values.mean() - half, values.mean() + half)
    assert (first.low, first.high) == pytest.approx(ends, abs=0.03)
    assert first == second, "the same seed gives the same interval"


def test_the_best_of_several_is_not_taken_for_better_than_it_is() -> None:
    """Of eight candidates that gain 0.1 in 64 rows; the plain mean of the best says 0.16."""
    dice = np.random.default_rng(1)
    inside = false_gains = 0
    values = []
    for _ in range(400):
        ease = dice.beta(1, 1, 64)
        start = dice.random(64) < ease
        later = dice.random((8, 64)) < np.minimum(1, ease + 0.1)
        estimate = estimates.estimate_best(later - start.astype(float))
        truth = float((np.minimum(1, ease + 0.1) - ease).mean())
        assert estimate.value is not None and estimate.low is not None and estimate.high is not None
        inside += estimate.low <= truth <= estimate.high
        values.append(estimate.value - truth)
        nothing = estimates.estimate_best((dice.random((8, 64)) < ease) - start.astype(float))
        false_gains += nothing.low is not None and nothing.low > 0
    assert 0.92 < inside / 400 < 0.985 and false_gains / 400 < 0.045
    assert np.mean(values) == pytest.approx(0, abs=0.01)


def test_a_share_of_single_rows_has_an_interval_that_holds_near_its_ends() -> None:
    dice = np.random.default_rng(2)
    intervals = [estimates.estimate_mean(dice.random(32) < 0.03, share=True) for _ in range(500)]
    contains = [
        i.low <= 0.03 <= i.high for i in intervals if i.low is not None and i.high is not None
    ]
    assert len(contains) == 500 and np.mean(contains) > 0.93


def test_bootstrap_keeps_rows_together() -> None:
    x = np.arange(30.0)
    result = estimates.bootstrap(lambda rows: stats.pearson(x[rows], 2 * x[rows]), 30)
    assert result.value == pytest.approx(1.0)
    assert (result.low, result.high) == (None, None)  # 1 in each resample


def test_bootstrap_of_what_is_not_defined() -> None:
    assert estimates.bootstrap(lambda rows: None, 5) == estimates.Estimate(None)
    calls = itertools.count()
    rarely = estimates.bootstrap(lambda rows: 1.0 if next(calls) == 0 else None, 5, resamples=20)
    assert rarely == estimates.Estimate(1.0, None, None)


def test_twelve_of_twelve_still_has_an_interval() -> None:
    def share(rows: NDArray[np.intp]) -> float:
        return 1.0

    all_right = estimates.bootstrap(share, 12, share=True)
    assert all_right.value == all_right.high == 1.0
    assert all_right.low == pytest.approx(12 / (12 + 1.959964**2), abs=1e-6)  # Wilson's, by hand
    assert estimates.bootstrap(share, 12) == estimates.Estimate(1.0)  # of a correlation: none
    half = estimates.wilson(0.5, 100)
    assert (half.low, half.high) == pytest.approx((0.40383, 0.59617), abs=1e-5)


def test_pass_at_k_is_the_share_of_all_draws() -> None:
    for samples in range(1, 7):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            marks = [1] * right + [0] * (samples - right)
            draws = list(itertools.combinations(marks, k))
            assert stats.pass_at_k(samples, right, k) == pytest.approx(
                np.mean([any(d) for d in draws])
            )


def test_facts_by_source() -> None:
    answers = {
        "a:1": stats.PromptScores("add", (1.0, 0.0, 0.0, None)),
        "a:2": stats.PromptScores("add", (1.0, 1.0, 1.0, 1.0)),
        "b:1": stats.PromptScores("", (None, None, None, None)),
    }
    sources = stats.split_by_source(answers)
    assert list(sources) == ["add", "unnamed", "all"]
    facts = stats.model_facts(sources["add"], None)
    assert (facts["prompts"], facts["responses"], facts["failed"]) == (2, 8, 1)
    assert facts["mean"]["value"] == pytest.approx((1 / 3 + 1) / 2)
    assert facts["pass"]["2"]["value"] == pytest.approx((2 / 3 + 1) / 2)
    # Of four responses only one prompt has scores.
    assert (facts["pass"]["4"]["value"], facts["pass"]["4"]["prompts"]) == (1.0, 1)
    nothing = stats.model_facts(sources["unnamed"], None)
    assert nothing["mean"]["value"] is None and nothing["pass"] == {}
    levels = {
        "c": stats.PromptScores("", (0.2, 0.9)),
        "d": stats.PromptScores("", (0.1, 0.3)),
    }
    assert stats.model_facts(levels, None)["pass"] == {}
    assert stats.model_facts(levels, 0.5)["pass"]["2"]["value"] == 0.5


def test_all_right_still_has_an_interval() -> None:
    facts = stats.model_facts({str(i): stats.PromptScores("", (1.0,)) for i in range(12)}, None)
    assert facts["mean"]["value"] == facts["mean"]["high"] == 1.0
    assert 0.7 < facts["mean"]["low"] < 0.8  # Wilson: 12 of 12


def test_the_test_is_exact_for_a_few_and_close_for_many() -> None:
    gaps = np.array([0.5, -0.25, 1.0, 0.75, 0.0])
    flips = [abs(np.dot(s, gaps)) for s in itertools.product((-1, 1), repeat=len(gaps))]
    assert stats.sign_flip_p(gaps) == np.mean([f >= abs(gaps.sum()) - 1e-9 for f in flips])
    # Right or wrong: McNemar's exact test over the prompts that differ, here 16 against 6.
    binary = np.array([1.0] * 16 + [-1.0] * 6 + [0.0] * 100)
    exact = 2 * sum(math.comb(22, i) for i in range(7)) / 2**22
    assert stats.sign_flip_p(binary) == pytest.approx(exact, abs=0.01)
    assert stats.sign_flip_p(np.zeros(5)) == 1.0
    assert stats.sign_flip_p(np.zeros(0)) is None


@pytest.mark.slow
def test_differences_are_paired_and_cover_the_truth() -> None:
    random = np.random.default_rng(3)
    covered, rejected = 0, 0
    for _ in range(100):
        # 60 prompts of varying difficulty, 2 responses each; the second model is 0.1 better.
        easy = random.uniform(0.1, 0.8, 60)
        draws = [random.random((60, 2)) < (easy + gain)[:, None] for gain in (0.1, 0.0)]
        first, other = (
            {str(i): stats.PromptScores("", tuple(map(float, row))) for i, row in enumerate(drawn)}
            for drawn in draws
        )
        result = stats.mean_difference(first, other)
        covered += result["low"] <= 0.1 <= result["high"]
        rejected += result["p"] < 0.05
    assert covered >= 88  # of 95 expected; 3.2 standard deviations below
    assert 20 < rejected < 80
    unpaired = {"0": other["0"], "1": stats.PromptScores("", (None, None)), "z": other["1"]}
    assert stats.mean_difference(first, unpaired)["prompts"] == 1


def test_how_rankings_move_over_steps_of_a_run(bench: Bench) -> None:
    """A rule scores again what a judge liked more and more, right or wrong."""
    (bench.folder / "rollouts").mkdir()
    liked = {3: (0.9, 0.1, 0.2, 0.8), 7: (0.9, 0.8, 0.9, 1.0)}
    for step, scores in liked.items():
        rows = [
            {"step": step, "uid": "train:0", "prompt": "1 + 1 = ?", "ground_truth": "2",
             "data_source": "sums", "response": f"It is {2 + n % 2}.", "score": score}
            for n, score in enumerate((*scores, None))
        ]  # fmt: skip
        write_rows(bench.folder / "rollouts" / f"step_{step:06d}.jsonl", *rows)
    args = ("score", str(bench.folder), "--rule", "math")
    facts = bench.reward(*args, "--step", "7", "--step", "3", "--json").summary["rankings"]
    # Ranks by hand: the right responses are the first and the third of each step.
    assert facts["rows"] == 8 and facts["agreement"] == pytest.approx(4 / math.sqrt(39.5 * 8))
    assert facts["within"] == pytest.approx((2 / math.sqrt(5 * 4) + 0) / 2) and facts["groups"] == 2
    assert facts["turned"] == 3 / 8
    steps = [(step["step"], step["before"], step["now"]) for step in facts["steps"]]
    assert steps == [(3, pytest.approx(0.5), 0.5), (7, pytest.approx(0.9), 0.5)]
    assert len((bench.folder / "scored.jsonl").read_text().splitlines()) == 10
    assert "rank correlation, 4 rows" in bench.reward(*args).out, "the last step by default"
