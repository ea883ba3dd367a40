"""Scoring outside training: order, failures, early stops, and what is told of it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.extras.trust.calibrate import repeat_verdicts
from ppo_cli.records import Part, Rollout, Score
from ppo_cli.scoring.rows import ResponseSet, read_responses
from ppo_cli.scoring.score import (
    NOT_ASKED,
    Callbacks,
    Scoring,
    add_spending,
    affine_line,
    failure_cause,
    histogram,
    is_cached,
    part_facts,
    resume_advice,
    score_all,
    scored_row,
    scoring_spending,
    shorten,
    summarise_scores,
)
from tests.scoring.scripted import Scripted, write_rows

RULES = RewardSettings()


def rows_of(tmp_path: Path, *responses: str) -> ResponseSet:
    rows = [{"prompt": "x", "response": text, "mine": [1]} for text in responses]
    return read_responses(write_rows(tmp_path / "a.jsonl", *rows))


def by_length(rollout: Rollout) -> Score:
    return Score(float(len(rollout.text)))


def test_scores_come_in_the_order_of_the_rows(tmp_path: Path) -> None:
    responses = rows_of(tmp_path, "ccc", "a", "bb")
    reward, seen = Scripted(by_length), list[int]()
    scoring = score_all(reward, responses.rollouts, Callbacks(seen.append))
    assert [s.value for s in scoring.scores] == [3.0, 1.0, 2.0]
    assert sum(seen) == 3
    assert reward.settled == 1
    assert scoring.stopped == ""


def test_interrupted_keeps_what_is_there(tmp_path: Path) -> None:
    def up_to_the_budget(rollout: Rollout) -> Score:
        if rollout.text == "bb":
            raise Interrupted("The budget of $1 is used up.")
        return by_length(rollout)

    responses = rows_of(tmp_path, "ccc", "bb", "a")
    scoring = score_all(Scripted(up_to_the_budget), responses.rollouts, Callbacks())
    assert [s.value for s in scoring.scores] == [3.0, None, 1.0]
    assert scoring.scores[1].failure == NOT_ASKED
    assert scoring.stopped == "The budget of $1 is used up."

    class Closing(Scripted):
        def submit(self, rollout: Rollout) -> Future[Score]:
            return Scripted.submit(self, rollout) if rollout.text != "bb" else refuse()

    def refuse() -> Future[Score]:
        raise Interrupted("No more.")

    scoring = score_all(Closing(by_length), responses.rollouts, Callbacks())
    assert [s.failure for s in scoring.scores] == ["", NOT_ASKED, NOT_ASKED]


def test_ctrl_c_keeps_what_is_there(tmp_path: Path) -> None:
    class Stopping(Scripted):
        def waiting_for(self) -> str | None:
            raise KeyboardInterrupt

    responses = rows_of(tmp_path, "ccc", "never", "a")
    reward = Stopping(lambda r: None if r.text == "never" else by_length(r))
    scoring = score_all(reward, responses.rollouts, Callbacks())
    assert [s.value for s in scoring.scores] == [3.0, None, 1.0]
    assert scoring.stopped == "Stopped by Ctrl-C."


def test_a_standstill_is_told_once(tmp_path: Path) -> None:
    class Slow(Scripted):
        def __init__(self) -> None:
            super().__init__(by_length)
            self.reasons_given = 0

        def submit(self, rollout: Rollout) -> Future[Score]:
            future: Future[Score] = Future()
            threading.Timer(0.9, future.set_result, [Score(1.0)]).start()
            return future

        def waiting_for(self) -> str | None:
            self.reasons_given += 1
            return "The judge is down."

    notes: list[str] = []
    reward = Slow()
    scoring = score_all(reward, rows_of(tmp_path, "a").rollouts, Callbacks(note=notes.append))
    assert scoring.scores[0].value == 1.0
    assert reward.reasons_given > 1
    assert notes == ["The judge is down."]


def test_row_keeps_its_columns_and_gains_the_score(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "a").rows
    score = Score(0.5, reason="fine", parts={"judge": Part(5.0, 0.5)}, info={"cached": True})
    assert scored_row(row, score) == {
        "prompt": "x", "response": "a", "mine": [1], "score": 0.5, "failure": None,
        "reason": "fine", "parts": {"judge": {"raw": 5.0, "scaled": 0.5}},
        "info": {"cached": True},
    }  # fmt: skip
    failed = scored_row(row, Score.failed("timeout: after 60 s"))
    assert failed["score"] is None
    assert failed["failure"] == "timeout: after 60 s"


def test_no_secret_of_a_scorer_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sekret-123456")
    (row,) = rows_of(tmp_path, "a").rows
    score = Score(None, "http_401: key sekret-123456", reply="sekret-123456")
    assert "sekret" not in str(scored_row(row, score))
    summary = summarise_scores(
        (row,), Scoring((score,), 1.0, stopped="sekret-123456 is bad"), RULES
    )
    assert "sekret" not in str(summary)


def test_summary(tmp_path: Path) -> None:
    responses = rows_of(tmp_path, "aaaa", "b", "cc", "dd", "e", "f")
    scores = (
        Score(1.0), Score(0.0, reason="bad"), Score(0.5), Score.failed("timeout: slow"),
        Score.failed("timeout: slower"), Score(0.4, imputed="unparsed: what?"),
    )  # fmt: skip
    metrics = {"judge/calls": 7.0, "judge/cost_usd": 0.25, "judge/error_rate": 0.5, "x": 1.0}
    summary = summarise_scores(responses.rows, Scoring(scores, 2.0, metrics), RULES)
    assert (summary["rows"], summary["scored"]) == (6, 3)
    assert summary["failed"] == {"timeout": 2, "unparsed": 1}
    assert (summary["mean"], summary["min"], summary["max"]) == (0.5, 0.0, 1.0)
    assert summary["std"] == pytest.approx((1 / 6) ** 0.5)
    assert (summary["calls"], summary["cost_usd"], summary["seconds"]) == (7.0, 0.25, 2.0)
    assert "error_rate" not in summary
    assert [e["score"] for e in summary["best"]] == [1.0, 0.5]
    assert [(e["score"], e["reason"]) for e in summary["worst"]] == [(0.0, "bad")]
    none = summarise_scores(responses.rows[:1], Scoring((Score.failed(NOT_ASKED),), 0.0), RULES)
    assert none["failed"] == {NOT_ASKED: 1}
    assert (none["mean"], none["histogram"], none["best"]) == (None, [], [])


def test_histogram_by_level_and_by_bins() -> None:
    assert histogram([1.0, 0.0, 0.1 + 0.2, 0.3]) == [
        {"from": 1.0, "to": 1.0, "count": 1},
        {"from": 0.3, "to": 0.3, "count": 2},
        {"from": 0.0, "to": 0.0, "count": 1},
    ]
    bins = histogram([i / 100 for i in range(101)])
    assert len(bins) == 10
    assert sum(b["count"] for b in bins) == 101
    assert bins[0]["to"] == 1.0


def test_what_is_said_is_short_and_how_to_go_on() -> None:
    assert shorten("a\n b") == "a b"
    text = shorten("start" + "x" * 300 + "end")
    assert len(text) <= 100
    assert text.startswith("start") and text.endswith("end")
    for api, cached in ((ApiReward(enable=True), True), (ApiReward(), False),
                        (ApiReward(enable=True, cache="off"), False)):  # fmt: skip
        assert ("cache" in resume_advice(RewardSettings(api=api))) is cached


def test_unknown_prices_give_no_cost() -> None:
    spending = scoring_spending(
        (), Scoring((), 1.0, {"judge/cost_usd": 0.0, "judge/tokens_in": 5.0})
    )
    assert spending == {"seconds": 1.0, "tokens_in": 5.0}
    free = scoring_spending((), Scoring((), 1.0, {"judge/cost_usd": 0.0, "judge/tokens_in": 0.0}))
    assert free["cost_usd"] == 0.0
    assert add_spending(spending, {"judge/tokens_in": 2.0, "judge/calls": 1.0}) == {
        "seconds": 1.0, "tokens_in": 7.0, "calls": 1.0,
    }  # fmt: skip


def test_spending_adds_up_over_the_judges_of_a_mixture() -> None:
    metrics = {
        "judge/calls": 3.0, "judge/cost_usd": 0.5, "judge/tokens_in": 9.0,
        "judge_style/calls": 2.0, "judge_style/cost_usd": 0.25, "judge_style/tokens_in": 1.0,
        "model/samples": 9.0,
    }  # fmt: skip
    judge, style = Score(1.0, info={"cached": True}), Score(1.0, info={"cached": False})
    remaining = Score(1.0, mixture={"judge": judge, "rule": Score(1.0, info={"rule": "gsm8k"})})
    half = Score(1.0, mixture={"judge": judge, "style": style})
    spending = scoring_spending((remaining, half), Scoring((), 1.0, metrics))
    assert spending == {
        "seconds": 1.0, "cached": 2, "calls": 5.0, "cost_usd": 0.75, "tokens_in": 10.0,
    }  # fmt: skip
    assert (is_cached(remaining), is_cached(half), is_cached(Score(1.0))) == (True, False, False)
    unknown = metrics | {"judge_style/cost_usd": 0.0}
    assert "cost_usd" not in scoring_spending((), Scoring((), 1.0, unknown))


def test_a_part_of_a_mixture_is_named_in_the_cause() -> None:
    parts = {"judge": Part(None, None)}
    assert failure_cause(Score(None, "judge: timeout: slow", parts=parts)) == "judge: timeout"
    assert failure_cause(Score(None, "judge: timeout: slow")) == "judge"


def test_facts_of_gated_imputed_and_failed_parts(tmp_path: Path) -> None:
    mixed = RewardSettings(parts=("judge:1", "rule:1"))
    scores = (
        Score(1.0, parts={"judge": Part(0.5, 1.0), "rule": Part(1.0, 1.0)}),
        Score(0.0, parts={"judge": Part(None, -1.0), "rule": Part(0.0, -1.0)}),
        Score(None, "judge: x", parts={"judge": Part(None, None), "rule": Part(1.0, 1.0)}),
        Score(
            0.5, parts={"judge": Part(0.7, 0.0), "rule": Part(0.0, -1.0)},
            imputed="judge: slow", mixture={"judge": Score(0.7, imputed="slow")},
        ),
        Score.failed(NOT_ASKED),
    )  # fmt: skip
    responses = rows_of(tmp_path, "a", "b", "c", "d", "e")
    facts = part_facts(mixed, responses.rollouts, scores)["parts"]
    judge, rule = facts["judge"], facts["rule"]
    assert (judge["scored"], judge["failed"], judge["gated"]) == (1, 2, 1)
    assert (rule["scored"], rule["failed"], "gated" in rule) == (4, 0, False)
    assert judge["affine"] is None
    assert rule["affine"] == "scaling: affine, mean: 0.5, std: 0.5"


def test_a_part_is_dominated_below_a_third_of_what_its_weight_asks_for(tmp_path: Path) -> None:
    responses = rows_of(tmp_path, "a", "b")
    settings = RewardSettings(parts=("judge:1", "rule:1"))
    for quiet, remarks in ((0.21, 0), (0.19, 1)):  # a share of 0.174 and 0.160, half is asked for
        scores = [
            Score(x, parts={"judge": Part(x, quiet * x), "rule": Part(x, x)}) for x in (0.0, 1.0)
        ]
        output = part_facts(settings, responses.rollouts, scores)["remarks"]
        assert len(output) == remarks and all(
            line.startswith("judge is dominated") for line in output
        )


def test_repeats_are_asked_for_each_row_and_counted(tmp_path: Path) -> None:
    seen = list[int]()
    responses = repeat_verdicts(Scripted(by_length), rows_of(tmp_path, "a", "bb").rollouts, 3,
                       Callbacks(seen.append))  # fmt: skip
    assert (responses, seen) == (("", [[1.0] * 3, [2.0] * 3]), [1, 1])


def test_lines_to_paste() -> None:
    lines = {
        (19.9, 20.1): "scaling: affine, mean: 20, std: 0.1",
        (15.9, 24.3): "scaling: affine, mean: 20.1, std: 4.2",
        (-3000.0, 1000.0): "scaling: affine, mean: -1000, std: 2000",
        (-1e-9, 1e-9): None, (2.0, 2.0): None, (): None,
    }  # fmt: skip
    assert {values: affine_line(values) for values in lines} == lines
