"""Means, pass@k and paired differences: against brute force, closed forms, and repeated draws."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from ppo_cli.trust.compare import Answers, difference, facts_of, pass_at_k, sign_flip_p, sources_of
from tests.trust.commands import run
from tests.trust.scripted import write_rows


def test_pass_at_k_is_the_share_of_all_draws() -> None:
    for samples in range(1, 7):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            marks = [1] * right + [0] * (samples - right)
            draws = list(itertools.combinations(marks, k))
            assert pass_at_k(samples, right, k) == pytest.approx(np.mean([any(d) for d in draws]))


def test_facts_by_source() -> None:
    answers = {
        "a:1": Answers("add", (1.0, 0.0, 0.0, None)),
        "a:2": Answers("add", (1.0, 1.0, 1.0, 1.0)),
        "b:1": Answers("", (None, None, None, None)),
    }
    sources = sources_of(answers)
    assert list(sources) == ["add", "unnamed", "all"]
    facts = facts_of(sources["add"], None)
    assert (facts["prompts"], facts["responses"], facts["failed"]) == (2, 8, 1)
    assert facts["mean"]["value"] == pytest.approx((1 / 3 + 1) / 2)
    assert facts["pass"]["2"]["value"] == pytest.approx((2 / 3 + 1) / 2)
    # Of four responses only one prompt has scores.
    assert (facts["pass"]["4"]["value"], facts["pass"]["4"]["prompts"]) == (1.0, 1)
    nothing = facts_of(sources["unnamed"], None)
    assert nothing["mean"]["value"] is None and nothing["pass"] == {}
    levels = {"c": Answers("", (0.2, 0.9)), "d": Answers("", (0.1, 0.3))}
    assert facts_of(levels, None)["pass"] == {}
    assert facts_of(levels, 0.5)["pass"]["2"]["value"] == 0.5


def test_all_right_still_has_an_interval() -> None:
    facts = facts_of({str(i): Answers("", (1.0,)) for i in range(12)}, None)
    assert facts["mean"]["value"] == facts["mean"]["high"] == 1.0
    assert 0.7 < facts["mean"]["low"] < 0.8  # Wilson: 12 of 12


def test_the_test_is_exact_for_a_few_and_close_for_many() -> None:
    gaps = np.array([0.5, -0.25, 1.0, 0.75, 0.0])
    flips = [abs(np.dot(s, gaps)) for s in itertools.product((-1, 1), repeat=len(gaps))]
    assert sign_flip_p(gaps) == np.mean([f >= abs(gaps.sum()) - 1e-9 for f in flips])
    # Right or wrong: McNemar's exact test over the prompts that differ, here 16 against 6.
    binary = np.array([1.0] * 16 + [-1.0] * 6 + [0.0] * 100)
    exact = 2 * sum(math.comb(22, i) for i in range(7)) / 2**22
    assert sign_flip_p(binary) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p(np.zeros(5)) == 1.0
    assert sign_flip_p(np.zeros(0)) is None


def test_differences_are_paired_and_cover_the_truth() -> None:
    random = np.random.default_rng(3)
    covered, rejected = 0, 0
    for _ in range(200):
        # 60 prompts of varying difficulty, 2 responses each; the second model is 0.1 better.
        easy = random.uniform(0.1, 0.8, 60)
        draws = [random.random((60, 2)) < (easy + gain)[:, None] for gain in (0.1, 0.0)]
        one, other = (
            {str(i): Answers("", tuple(map(float, row))) for i, row in enumerate(drawn)}
            for drawn in draws
        )
        found = difference(one, other)
        covered += found["low"] <= 0.1 <= found["high"]
        rejected += found["p"] < 0.05
    assert covered >= 180  # of 190 expected; 3.2 standard deviations below
    assert 40 < rejected < 160
    unpaired = difference(one, {"0": other["0"], "1": Answers("", (None, None)), "z": other["1"]})
    assert unpaired["prompts"] == 1


def test_how_rankings_move_over_steps_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule scores anew what a judge liked more and more, right or wrong."""
    (tmp_path / "rollouts").mkdir()
    liked = {3: (0.9, 0.1, 0.2, 0.8), 7: (0.9, 0.8, 0.9, 1.0)}
    for step, scores in liked.items():
        lines = [
            {"step": step, "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "sums",
             "response": f"It is {2 + n % 2}.", "score": score}
            for n, score in enumerate((*scores, None))
        ]  # fmt: skip
        write_rows(tmp_path / "rollouts" / f"step_{step:06d}.jsonl", *lines)
    run_ = str(tmp_path)
    code, out, err = run(
        capsys, "score", run_, "--rule", "math", "--step", "7", "--step", "3", "--json"
    )
    assert code == 0, err
    facts = json.loads(out)["rankings"]
    # Ranks by hand: the right responses are the first and the third of each step.
    assert facts["rows"] == 8 and facts["agreement"] == pytest.approx(4 / math.sqrt(39.5 * 8))
    assert facts["within"] == pytest.approx((2 / math.sqrt(5 * 4) + 0) / 2) and facts["groups"] == 2
    assert facts["turned"] == 3 / 8
    told = [(one["step"], one["before"], one["now"]) for one in facts["steps"]]
    assert told == [(3, pytest.approx(0.5), 0.5), (7, pytest.approx(0.9), 0.5)]
    assert len((tmp_path / "scored.jsonl").read_text().splitlines()) == 10
    code, out, _ = run(capsys, "score", run_, "--rule", "math")
    assert code == 0 and "rank correlation, 4 rows" in out, "the last step by default"


@pytest.mark.parametrize(
    ("more", "said"),
    [(["--step", "2"], "--step 2: .*There are 1, from 5 to 5"), (["FILE"], "goes with the folder")],
)
def test_steps_that_are_not_there_are_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").mkdir()
    row = {"prompt": "1 + 1 = ?", "response": "2", "ground_truth": "2"}
    file = write_rows(tmp_path / "rollouts" / "step_000005.jsonl", row)
    given = [str(tmp_path), *more] if more != ["FILE"] else [file, "--step", "5"]
    code, _, err = run(capsys, "score", *given, "--rule", "math")
    assert code == 2 and re.search(said, err)
