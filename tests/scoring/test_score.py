"""Scoring outside training: order, failures, early stops, and what is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.records import Part, Rollout, Score
from ppo_cli.scoring import score as scorer
from ppo_cli.scoring.rows import ResponseSet, read_responses
from tests.scoring.scripted import Scripted, write_rows

RULES = RewardSettings()
MIXED = RewardSettings(parts=("judge:1", "rule:1"))
Rows = Callable[..., ResponseSet]


@pytest.fixture
def rows_of(tmp_path: Path) -> Rows:
    """Rows of one prompt with these responses, and a column of their own."""

    def read(*responses: str) -> ResponseSet:
        rows = [{"prompt": "x", "response": text, "mine": [1]} for text in responses]
        return read_responses(write_rows(tmp_path / "a.jsonl", *rows))

    return read


def by_length(rollout: Rollout) -> Score:
    return Score(float(len(rollout.text)))


def values(scoring: scorer.Scoring) -> list[float | None]:
    return [score.value for score in scoring.scores]


def test_scores_come_in_the_order_of_the_rows(rows_of: Rows) -> None:
    reward, seen = Scripted(by_length), list[int]()
    rollouts = rows_of("ccc", "a", "bb").rollouts
    scoring = scorer.score_all(reward, rollouts, scorer.Callbacks(seen.append))
    assert values(scoring) == [3.0, 1.0, 2.0]
    assert (sum(seen), reward.settled, scoring.stopped) == (3, 1, "")


def test_interrupted_keeps_what_is_there(rows_of: Rows) -> None:
    def up_to_the_budget(rollout: Rollout) -> Score:
        if rollout.text == "bb":
            raise Interrupted("The budget of $1 is used up.")
        return by_length(rollout)

    class Closing(Scripted):
        """Does not even take "bb"."""

        def submit(self, rollout: Rollout) -> Future[Score]:
            if rollout.text == "bb":
                raise Interrupted("No more.")
            return super().submit(rollout)

    rollouts = rows_of("ccc", "bb", "a").rollouts
    scoring = scorer.score_all(Scripted(up_to_the_budget), rollouts, scorer.Callbacks())
    assert values(scoring) == [3.0, None, 1.0]
    assert scoring.scores[1].failure == scorer.NOT_ASKED
    assert scoring.stopped == "The budget of $1 is used up."
    scoring = scorer.score_all(Closing(by_length), rollouts, scorer.Callbacks())
    assert [s.failure for s in scoring.scores] == [
        "",
        scorer.NOT_ASKED,
        scorer.NOT_ASKED,
    ]


def test_ctrl_c_keeps_what_is_there(rows_of: Rows) -> None:
    class Stopping(Scripted):
        def waiting_for(self) -> str | None:
            raise KeyboardInterrupt

    reward = Stopping(lambda r: None if r.text == "never" else by_length(r))
    scoring = scorer.score_all(reward, rows_of("ccc", "never", "a").rollouts, scorer.Callbacks())
    assert values(scoring) == [3.0, None, 1.0]
    assert scoring.stopped == "Stopped by Ctrl-C."


def test_a_standstill_is_told_once(rows_of: Rows) -> None:
    class Slow(Scripted):
        reasons = 0

        def submit(self, rollout: Rollout) -> Future[Score]:
            future: Future[Score] = Future()
            threading.Timer(0.9, future.set_result, [Score(1.0)]).start()
            return future

        def waiting_for(self) -> str | None:
            self.reasons += 1
            return "The judge is down."

    notes, reward = list[str](), Slow(by_length)
    scoring = scorer.score_all(reward, rows_of("a").rollouts, scorer.Callbacks(note=notes.append))
    assert values(scoring) == [1.0] and reward.reasons > 1
    assert notes == ["The judge is down."]


def test_row_keeps_its_columns_and_gains_the_score(rows_of: Rows) -> None:
    (row,) = rows_of("a").rows
    score = Score(0.5, reason="fine", parts={"judge": Part(5.0, 0.5)}, info={"cached": True})
    assert scorer.scored_row(row, score) == {
        "prompt": "x", "response": "a", "mine": [1], "score": 0.5, "failure": None,
        "reason": "fine", "parts": {"judge": {"raw": 5.0, "scaled": 0.5}},
        "info": {"cached": True},
    }  # fmt: skip
    failed = scorer.scored_row(row, Score.failed("timeout: after 60 s"))
    assert (failed["score"], failed["failure"]) == (None, "timeout: after 60 s")


def test_no_secret_of_a_scorer_is_written(rows_of: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sekret-123456")
    (row,) = rows_of("a").rows
    score = Score(None, "http_401: key sekret-123456", reply="sekret-123456")
    assert "sekret" not in str(scorer.scored_row(row, score))
    scoring = scorer.Scoring((score,), 1.0, stopped="sekret-123456 is bad")
    assert "sekret" not in str(scorer.summarise_scores((row,), scoring, RULES))


def test_summary(rows_of: Rows) -> None:
    rows = rows_of("aaaa", "b", "cc", "dd", "e", "f").rows
    scores = (
        Score(1.0), Score(0.0, reason="bad"), Score(0.5), Score.failed("timeout: slow"),
        Score.failed("timeout: slower"), Score(0.4, imputed="unparsed: what?"),
    )  # fmt: skip
    metrics = {"judge/calls": 7.0, "judge/cost_usd": 0.25, "judge/error_rate": 0.5, "x": 1.0}
    summary = scorer.summarise_scores(rows, scorer.Scoring(scores, 2.0, metrics), RULES)
    assert (summary["rows"], summary["scored"]) == (6, 3)
    assert summary["failed"] == {"timeout": 2, "unparsed": 1}
    assert (summary["mean"], summary["min"], summary["max"]) == (0.5, 0.0, 1.0)
    assert summary["std"] == pytest.approx((1 / 6) ** 0.5)
    assert (summary["calls"], summary["cost_usd"], summary["seconds"]) == (7.0, 0.25, 2.0)
    assert "error_rate" not in summary
    assert [e["score"] for e in summary["best"]] == [1.0, 0.5]
    assert [(e["score"], e["reason"]) for e in summary["worst"]] == [(0.0, "bad")]
    nothing = scorer.Scoring((Score.failed(scorer.NOT_ASKED),), 0.0)
    none = scorer.summarise_scores(rows[:1], nothing, RULES)
    assert none["failed"] == {scorer.NOT_ASKED: 1}
    assert (none["mean"], none["histogram"], none["best"]) == (None, [], [])


def test_histogram_by_level_and_by_bins() -> None:
    levels = [tuple(bar.values()) for bar in scorer.histogram([1.0, 0.0, 0.1 + 0.2, 0.3])]
    assert levels == [(1.0, 1.0, 1), (0.3, 0.3, 2), (0.0, 0.0, 1)]
    bins = scorer.histogram([i / 100 for i in range(101)])
    assert len(bins) == 10 and sum(b["count"] for b in bins) == 101
    assert bins[0]["to"] == 1.0 and set(bins[0]) == {"from", "to", "count"}


def test_what_is_said_is_short_and_how_to_go_on() -> None:
    assert scorer.shorten("a\n b") == "a b"
    text = scorer.shorten("start" + "x" * 300 + "end")
    assert len(text) <= 100 and text.startswith("start") and text.endswith("end")
    for api, cached in ((ApiReward(enable=True), True), (ApiReward(), False),
                        (ApiReward(enable=True, cache="off"), False)):  # fmt: skip
        assert ("cache" in scorer.resume_advice(RewardSettings(api=api))) is cached


def spending_of(metrics: dict[str, float], *scores: Score) -> dict[str, float]:
    return scorer.scoring_spending(scores, scorer.Scoring((), 1.0, metrics))


def test_unknown_prices_give_no_cost() -> None:
    assert spending_of({"judge/cost_usd": 0.0, "judge/tokens_in": 5.0}) == {
        "seconds": 1.0, "tokens_in": 5.0,
    }  # fmt: skip
    assert spending_of({"judge/cost_usd": 0.0, "judge/tokens_in": 0.0})["cost_usd"] == 0.0


def test_spending_adds_up_over_the_judges_of_a_mixture() -> None:
    metrics = {
        "judge/calls": 3.0, "judge/cost_usd": 0.5, "judge/tokens_in": 9.0,
        "judge_style/calls": 2.0, "judge_style/cost_usd": 0.25, "judge_style/tokens_in": 1.0,
        "model/samples": 9.0,
    }  # fmt: skip
    judge, style = Score(1.0, info={"cached": True}), Score(1.0, info={"cached": False})
    cached = Score(1.0, mixture={"judge": judge, "rule": Score(1.0, info={"rule": "gsm8k"})})
    half = Score(1.0, mixture={"judge": judge, "style": style})
    assert spending_of(metrics, cached, half) == {
        "seconds": 1.0, "cached": 2, "calls": 5.0, "cost_usd": 0.75, "tokens_in": 10.0,
    }  # fmt: skip
    assert "cost_usd" not in spending_of(metrics | {"judge_style/cost_usd": 0.0})


def test_a_part_of_a_mixture_is_named_in_the_cause() -> None:
    parts = {"judge": Part(None, None)}
    assert (
        scorer.failure_cause(Score(None, "judge: timeout: slow", parts=parts)) == "judge: timeout"
    )
    assert scorer.failure_cause(Score(None, "judge: timeout: slow")) == "judge"


def test_facts_of_gated_imputed_and_failed_parts(rows_of: Rows) -> None:
    scores = (
        Score(1.0, parts={"judge": Part(0.5, 1.0), "rule": Part(1.0, 1.0)}),
        Score(0.0, parts={"judge": Part(None, -1.0), "rule": Part(0.0, -1.0)}),
        Score(None, "judge: x", parts={"judge": Part(None, None), "rule": Part(1.0, 1.0)}),
        Score(
            0.5, parts={"judge": Part(0.7, 0.0), "rule": Part(0.0, -1.0)},
            imputed="judge: slow", mixture={"judge": Score(0.7, imputed="slow")},
        ),
        Score.failed(scorer.NOT_ASKED),
    )  # fmt: skip
    facts = scorer.part_facts(MIXED, rows_of("a", "b", "c", "d", "e").rollouts, scores)["parts"]
    judge, rule = facts["judge"], facts["rule"]
    assert (judge["scored"], judge["failed"], judge["gated"]) == (1, 2, 1)
    assert (rule["scored"], rule["failed"], "gated" in rule) == (4, 0, False)
    assert judge["affine"] is None
    assert rule["affine"] == "scaling: affine, mean: 0.5, std: 0.5"


def test_a_part_is_dominated_below_a_third_of_what_its_weight_asks_for(rows_of: Rows) -> None:
    for quiet, remarks in ((0.21, 0), (0.19, 1)):  # a share of 0.174 and 0.160, half is asked for
        scores = [
            Score(x, parts={"judge": Part(x, quiet * x), "rule": Part(x, x)}) for x in (0.0, 1.0)
        ]
        lines = scorer.part_facts(MIXED, rows_of("a", "b").rollouts, scores)["remarks"]
        assert len(lines) == remarks
        assert all(line.startswith("judge is dominated") for line in lines)


def test_lines_to_paste() -> None:
    lines = {
        (19.9, 20.1): "scaling: affine, mean: 20, std: 0.1",
        (15.9, 24.3): "scaling: affine, mean: 20.1, std: 4.2",
        (-3000.0, 1000.0): "scaling: affine, mean: -1000, std: 2000",
        (-1e-9, 1e-9): None, (2.0, 2.0): None, (): None,
    }  # fmt: skip
    assert {values: scorer.affine_line(values) for values in lines} == lines
