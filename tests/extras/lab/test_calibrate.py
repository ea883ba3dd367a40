"""Calibration: known agreement comes out as known, and what is not defined says so."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.extras.lab.calibrate import (
    STEADY,
    calibrate,
    forecast_calls,
    is_cached,
    per_thousand,
)
from ppo_cli.extras.lab.repeats import add_spending
from ppo_cli.records import Rollout, Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward
from ppo_cli.scoring.rows import read_labels, read_responses
from ppo_cli.scoring.score import Scoring
from tests.scoring.scripted import Scripted, write_rows
from tests.settings import complete_judge, complete_reward_model

pytestmark = pytest.mark.usefixtures("few_resamples")
Row = dict[str, Any]
Calibrate = Callable[..., dict[str, Any]]
JUDGE = RewardSettings(api=complete_judge(enable=True, model="m"))
THREE_VOTES = RewardSettings(api=complete_judge(enable=True, model="m", votes=3))


def first_word(rollout: Rollout) -> Score:
    return Score(float(rollout.text.split()[0]))


def right_or_wrong(count: int) -> list[Row]:
    return [{"response": str(i % 2), "label": i % 2} for i in range(count)]


@pytest.fixture
def calibrated(tmp_path: Path) -> Calibrate:
    """Calibrate a reward with rows that have a response, a label and maybe a prompt."""

    def run(
        rows: list[Row], reward: Reward | None = None, *, repeat: int = 0,
        settings: RewardSettings = JUDGE,
    ) -> dict[str, Any]:  # fmt: skip
        rows = [{"prompt": f"question {i}"} | row for i, row in enumerate(rows)]
        labelled = read_labels(read_responses(write_rows(tmp_path / "a.jsonl", *rows)), "label")
        result = calibrate(reward or Scripted(first_word), settings, labelled, repeat=repeat,
                           screen=Screen(), marks={}, place_marks={})  # fmt: skip
        json.dumps(result, allow_nan=False)
        return result

    return run


def has_advice(result: dict[str, Any], fragment: str) -> bool:
    return any(fragment in line for line in result["advice"])


def test_a_perfect_judge(calibrated: Calibrate) -> None:
    rows = [{"response": f"{i % 2} {'x' * (i // 2)}", "label": bool(i % 2)} for i in range(20)]
    result = calibrated(rows)
    agreement = result["agreement"]
    names = ["accuracy at the best threshold", "accuracy at 0.5", "AUC", "Spearman", "Pearson",
             "Kendall's tau-b", "pairs in order"]  # fmt: skip
    values = {name: facts["value"] for name, facts in agreement.items()}
    assert values == pytest.approx(dict.fromkeys(names, 1.0))
    assert agreement["AUC"]["low"] == pytest.approx(20 / (20 + 1.959964**2))  # Wilson
    assert agreement["Pearson"]["low"] is None
    assert result["bias"]["length"]["value"] == pytest.approx(0.0, abs=1e-9)
    assert "AUC 1.00 [0.84, 1.00]: separates good from bad answers well." in result["advice"]


def test_a_judge_that_throws_dice(calibrated: Calibrate) -> None:
    random = np.random.default_rng(0)
    rows = [{"response": f"{random.random():.6f}", "label": i % 2} for i in range(200)]
    result = calibrated(rows)
    assert result["agreement"]["AUC"]["low"] < 0.5 < result["agreement"]["AUC"]["high"]
    assert has_advice(result, "not distinguishable from chance")


def test_a_judge_that_pays_for_length(calibrated: Calibrate) -> None:
    random = np.random.default_rng(0)
    rows = [
        {"response": "x" * int(random.integers(1, 80)), "label": int(random.integers(2))}
        for _ in range(100)
    ]
    result = calibrated(rows, Scripted(lambda r: Score(len(r.text) / 80)))
    assert result["bias"]["length, labels held equal"]["value"] > 0.95
    assert has_advice(result, "longer answers score higher for their length")


def test_a_judge_that_likes_what_comes_first(calibrated: Calibrate) -> None:
    rows = [
        {"prompt": f"p{i // 2}", "response": f"{(1 - i % 2) * 0.5 + i / 1000}", "label": i // 2 % 2}
        for i in range(40)
    ]
    result = calibrated(rows)
    assert result["bias"]["position among answers to one prompt"]["value"] < -0.8
    assert "position in the file" not in result["bias"]
    assert has_advice(result, "always in one place")


def test_a_file_sorted_by_quality(calibrated: Calibrate) -> None:
    result = calibrated([{"response": str(i / 20), "label": int(i > 9)} for i in range(20)])
    assert result["bias"]["position in the file"]["value"] == pytest.approx(1.0)
    assert has_advice(result, "sorted by quality")


def test_a_judge_of_another_scale(calibrated: Calibrate) -> None:
    rows = [{"response": f"{0.7 + 0.2 * (i % 2)}", "label": i % 2} for i in range(20)]
    result = calibrated(rows)
    assert result["agreement"]["accuracy at 0.5"]["value"] == 0.5
    best = result["agreement"]["accuracy at the best threshold"]
    assert (best["value"], best["at"]) == (1.0, pytest.approx(0.8))
    assert has_advice(result, "too kind or too harsh")


@pytest.mark.parametrize(
    ("score", "label", "group", "name", "why"),
    [
        (lambda i: i / 20, lambda i: 1, "agreement", "AUC", "labels of two classes are needed"),
        (lambda i: 0.5, lambda i: i % 2, "agreement", "Spearman", "every score is the same"),
        (lambda i: 0.5, lambda i: i % 2, "agreement", "AUC", "every score is the same"),
        (lambda i: 0.5, lambda i: i % 2, "bias", "length", "every score is the same"),
        (lambda i: i % 2, lambda i: i, "agreement", "accuracy at 0.5", "two classes are needed"),
        (lambda i: i / 100 + 1, lambda i: i % 2, "bias", "length", ""),
    ],
)
def test_what_is_not_defined_says_why(
    calibrated: Calibrate, score: Callable[[int], float], label: Callable[[int], Any],
    group: str, name: str, why: str,
) -> None:  # fmt: skip
    rows = [{"response": f"{score(i)} {'x' * (i % 7)}", "label": label(i)} for i in range(20)]
    facts = calibrated(rows)[group][name]
    assert (facts["value"] is None) == bool(why)
    assert why in facts["why"]
    few = calibrated(rows[:9])[group][name]
    assert few["why"] == "9 rows with a score; at least 10 are needed"


def test_failed_rows_are_left_out(calibrated: Calibrate) -> None:
    def partial(rollout: Rollout) -> Score:
        return Score.failed("timeout: slow") if "!" in rollout.text else first_word(rollout)

    rows = [{"response": f"{i % 2}{' !' if i > 14 else ''}", "label": i % 2} for i in range(20)]
    result = calibrated(rows, Scripted(partial))
    assert (result["scored"], result["failed"]) == (15, {"timeout": 5})
    assert result["agreement"]["AUC"]["value"] == 1.0
    assert result["advice"][0].startswith("25% of the rows got no score")


class Fickle(Scripted):
    """Says one thing once, and two things when asked again past the cache."""

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_result([Score(0.2), Score(0.6), Score.failed("timeout")][:votes])
        return future


def test_repeated_verdicts_go_past_the_cache(calibrated: Calibrate) -> None:
    result = calibrated(right_or_wrong(60), Fickle(first_word), repeat=3)
    repeated = result["repeated"]
    assert (repeated["rows"], repeated["verdicts"], repeated["same"]) == (50, 3, 0.0)
    assert repeated["mean_gap"] == pytest.approx(0.4)
    assert has_advice(result, "--rm_votes 3")


def test_functions_are_asked_again(calibrated: Calibrate) -> None:
    reward, function = Scripted(first_word), RewardSettings(function="mine.py")
    result = calibrated(right_or_wrong(12), reward, repeat=3, settings=function)
    assert result["repeated"]["same"] == 1.0
    assert (len(reward.submitted), reward.settled) == (12 + 36, 2)
    assert STEADY not in result["advice"]


@pytest.mark.parametrize(
    "settings",
    [RewardSettings(rule="gsm8k"), RewardSettings(model=complete_reward_model(path="some/model"))],
)
def test_what_is_not_random_is_asked_once(calibrated: Calibrate, settings: RewardSettings) -> None:
    rows, reward = right_or_wrong(12), Scripted(first_word)
    result = calibrated(rows, reward, repeat=3, settings=settings)
    assert (len(reward.submitted), result["repeated"]) == (12, None)
    assert result["advice"].count(STEADY) == 1
    assert STEADY not in calibrated(rows, reward, settings=settings)["advice"]


def test_a_stop_is_reported(calibrated: Calibrate) -> None:
    def broke(rollout: Rollout) -> Score:
        if rollout.text.startswith("1"):
            raise Interrupted("The budget is used up.")
        return first_word(rollout)

    result = calibrated(right_or_wrong(20), Scripted(broke), repeat=3)
    assert (result["stopped"], result["repeated"]) == ("The budget is used up.", None)
    assert result["failed"] == {"not asked": 10}


CACHED = Score(1.0, info={"cached": True})


def test_cost_of_a_thousand_leaves_the_cache_out() -> None:
    scoring = Scoring((Score(1.0), Score(1.0), CACHED, Score.failed("x")), 4.0)
    spent = {"seconds": 4.0, "cost_usd": 0.5, "tokens_in": 100.0, "calls": 3.0, "cached": 1}
    assert per_thousand(scoring, spent) == {
        "seconds": 2000.0, "cost_usd": 250.0, "tokens_in": 50_000.0, "calls": 1500.0,
        "paid_calls": 3.0,
    }  # fmt: skip
    assert per_thousand(Scoring((CACHED,), 1.0), {"seconds": 1.0}) == {}


def test_cost_of_a_thousand_counts_paid_repeats() -> None:
    scoring = Scoring((CACHED,) * 4, 0.1)
    spent = {"seconds": 2.0, "cost_usd": 0.6, "calls": 12.0, "cached": 4}
    spending = per_thousand(scoring, spent, repeats=12)
    assert (spending["cost_usd"], spending["paid_calls"]) == (pytest.approx(50.0), 12.0)
    assert per_thousand(scoring, spent, 12, 3)["cost_usd"] == pytest.approx(150)


def test_few_rows_do_not_fill_what_may_run_at_once() -> None:
    scoring = Scoring((Score(1.0),) * 8, 2.0)
    for at_once, seconds in ((1, 250.0), (32, 62.5), (8, 250.0), (5000, 2.0)):
        assert per_thousand(scoring, {"seconds": 2.0}, at_once=at_once)["seconds"] == seconds


class Paid(Fickle):
    """Everything scored before; each repeat is a paid call."""

    paid = 0

    def __init__(self) -> None:
        super().__init__(lambda r: Score(float(r.text), info={"cached": True}))

    def repeat(self, rollout: Rollout, votes: int) -> Future[list[Score]]:
        self.paid += votes
        time.sleep(0.005)
        return super().repeat(rollout, votes)

    def pop_metrics(self) -> dict[str, float]:
        result = {"judge/calls": float(self.paid), "judge/cost_usd": self.paid * 0.01,
                 "judge/tokens_in": self.paid * 100.0}  # fmt: skip
        self.paid = 0
        return result


def test_a_file_that_was_scored_before_still_has_a_cost(calibrated: Calibrate) -> None:
    reward = Paid()
    result = calibrated(right_or_wrong(20), reward, repeat=2)
    assert result["per_1000"]["cost_usd"] == pytest.approx(10.0)
    assert result["per_1000"]["paid_calls"] == 40
    assert has_advice(result, "extrapolated from the 40 calls made here")
    result = calibrated(right_or_wrong(20), reward, repeat=2, settings=THREE_VOTES)
    assert result["per_1000"]["cost_usd"] == pytest.approx(30.0)


def test_how_much_will_be_asked_is_told() -> None:
    assert forecast_calls(THREE_VOTES, 60, 50, 2) == (
        "Asking for at most 280 verdicts: 60 rows x 3 votes, and 50 of them 2 times more."
    )
    assert forecast_calls(JUDGE, 60, 0, 2) == "Asking for at most 60 verdicts: 60 rows."


def test_the_seconds_of_repeats_count_and_many_run_at_once(calibrated: Calibrate) -> None:
    wide = RewardSettings(api=complete_judge(enable=True, model="m", concurrency=400))
    began = time.monotonic()
    result = calibrated(right_or_wrong(20), Paid(), repeat=2, settings=wide)
    elapsed = time.monotonic() - began
    # 1,000 responses take 2.5 times as long as the 400 that run at once.
    assert 2.5 * 20 * 0.005 <= result["per_1000"]["seconds"] <= 2.5 * elapsed


def test_pairs_of_one_prompt_are_compared(calibrated: Calibrate) -> None:
    rows = [
        {"prompt": f"p{i // 2}", "response": f"{i // 2 * 10 + i % 2 * (-1 if i < 10 else 1)}",
         "label": i % 2}
        for i in range(40)
    ]  # fmt: skip

    def agreement(rows: list[Row]) -> tuple[dict[str, Any], Any]:
        facts = calibrated(rows)["agreement"]
        return facts, facts.get("pairs of one prompt in order")

    facts, pairs = agreement(rows)
    assert pairs["value"] == 15 / 20 and pairs["low"] < 0.75 < pairs["high"]
    assert facts["AUC"]["value"] < 0.6
    tied = [row | {"response": "7"} for row in rows[:20]]
    assert agreement(tied + rows[20:])[1]["value"] == (10 * 0.5 + 10) / 20
    assert agreement(rows[:8])[1]["why"].startswith("4 prompts with better and worse")
    assert agreement(rows[::2])[1] is None


def test_spending_and_cached_verdicts_of_all_judges_count() -> None:
    assert add_spending(
        {"seconds": 1.0, "tokens_in": 5.0}, {"judge/tokens_in": 2.0, "judge/calls": 1.0}
    ) == {"seconds": 1.0, "tokens_in": 7.0, "calls": 1.0}
    judge, style = (Score(1.0, info={"cached": cached}) for cached in (True, False))
    half = Score(1.0, mixture={"judge": judge, "style": style})
    assert [is_cached(score) for score in (judge, half, Score(1.0))] == [True, False, False]
