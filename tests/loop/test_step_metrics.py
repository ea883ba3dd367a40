"""Numbers that users read: means over what counts, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ppo_cli.algo.critic_fit import explained_variance
from ppo_cli.records import Part, Score, Scored
from ppo_cli.report.metrics import StepSums, recent_statistics, score_metrics, staleness_metrics
from tests.loop.scripted import scored


def test_failed_scores_are_counted_and_left_out() -> None:
    rows = [scored(1.0, range(2)), scored(None, range(2)), scored(0.5, range(4), "length")]
    metrics = score_metrics(rows)
    assert metrics["reward_mean"] == 0.75
    assert metrics["score/failed"] == 1
    assert metrics["response_length_mean"] == pytest.approx(8 / 3)
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    for row, value in ((0, 1.0), (2, 0.5)):
        part = Part(raw=2 * value, scaled=value)
        rows[row] = Scored(rows[row].rollout, Score(value, parts={"rule": part}))
    assert score_metrics(rows)["reward/rule"] == 1.5


def test_recent_looks_at_the_last_hundred_steps_and_at_main_metrics() -> None:
    lines = [{"step": s, "loss": float(s), "val/reward_mean": 1.0} for s in range(151)]
    lines[150] |= {"loss": None, "kl": 3.0}
    result = recent_statistics(lines)
    assert result["loss_mean"] == 100.0  # steps 51 to 149: the last measured nothing
    assert result["loss_std"] == pytest.approx(math.sqrt((99**2 - 1) / 12))
    assert result["kl_mean"] == 3.0 and result["kl_std"] == 0.0
    assert set(result) == {"loss_mean", "loss_std", "kl_mean", "kl_std"}
    assert recent_statistics(lines[:1]) == {}


def test_ages_and_carried_responses_are_counted() -> None:
    rows = [
        Scored(replace(row.rollout, weight_version=version, carried=carried), row.score)
        for version, carried in ((5, 0), (4, 2), (2, 1), (5, 0))
        for row in [scored(1.0)]
    ]
    assert staleness_metrics(rows, 5) == {
        "rollout/staleness_mean": 1.0, "rollout/staleness_max": 3.0, "rollout/carried_share": 0.5,
    }  # fmt: skip


def test_nothing_scored_gives_no_reward_at_all() -> None:
    assert "reward_mean" not in score_metrics([scored(None)])


def test_validation_has_sources_and_an_accuracy_only_for_right_or_wrong() -> None:
    rows = [scored(1.0, source="a"), scored(0.0, source="b"), scored(1.0, source="a")]
    metrics = score_metrics(rows, "val/")
    assert metrics["val/accuracy"] == pytest.approx(2 / 3)
    assert metrics["val/reward_mean/a"] == 1.0 and metrics["val/reward_mean/b"] == 0.0
    assert "val/accuracy" not in score_metrics([scored(0.5)], "val/")


def test_sums_of_mini_batches_weigh_by_their_counts() -> None:
    sums = StepSums()
    sums.add({"ppo_ratio": (10.0, 10.0), "policy_loss": (0.5, 1.0), "actor/skipped_steps": (1, 1)})
    sums.add({"ppo_ratio": (33.0, 30.0), "policy_loss": (0.1, 1.0), "actor/skipped_steps": (1, 1)})
    means = sums.means()
    assert means["ppo_ratio"] == pytest.approx(43 / 40)
    assert means["policy_loss"] == pytest.approx(0.3)
    assert means["actor/skipped_steps"] == 2


def test_explained_variance() -> None:
    returns = np.array([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns, returns + 5.0) == pytest.approx(1.0)
    assert explained_variance(returns, np.full(3, 2.0)) == pytest.approx(0.0)
    assert math.isnan(explained_variance(np.ones(3), returns))
