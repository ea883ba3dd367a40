"""Panels on loopback: one corrupt judge of three, failures, criteria in another order, costs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from ppo_cli.errors import Interrupted
from ppo_cli.estimates import correlate
from ppo_cli.records import Score
from ppo_cli.rewards.judge.panel import PanelReward
from ppo_cli.rewards.judge.rubric import Criterion, Rubric
from ppo_cli.run_folder.folder import paid_calls
from tests.judge_server import JudgeServer
from tests.rewards.scoring import number_of, score_all, sum_rollout
from tests.waiting import wait_until

Make = Callable[..., PanelReward]
NAMES = ("second", "third")
ROWS = 24
TEXTS = ("alpha is right", "beta is clear", "gamma is polite", "delta is short")
CRITERIA = [{"name": f"k{i}", "text": text, "weight": 1 + i} for i, text in enumerate(TEXTS)]


@pytest.fixture
def others() -> Iterator[list[JudgeServer]]:
    with JudgeServer(seed=3) as second, JudgeServer(seed=4) as third:
        yield [second, third]


@pytest.fixture
def make(judge_of: Make, others: list[JudgeServer]) -> Make:
    def build(*, least: int | None = None, **changes: Any) -> PanelReward:
        judges = {
            name: {"model": name, "base_url": server.url("openai"), "price_input": 1.0,
                   "price_output": 2.0}
            for name, server in zip(NAMES, others, strict=True)
        }  # fmt: skip
        usual = {
            "prompt_preset": "math", "price_input": 10.0, "price_output": 20.0, "judges": judges,
            "panel": {"judges": NAMES, "least": least}, "key_env": "FIRST_KEY",
        }  # fmt: skip
        return judge_of(kind=PanelReward, environ={"FIRST_KEY": "k1"}, **(usual | changes))

    return build


def truth_of(row: int, count: int = len(TEXTS)) -> list[int]:
    """Which criteria a response meets."""
    dice = random.Random(f"truth {row}")
    return [int(dice.random() < 0.5) for _ in range(count)]


def honest(name: str, row: int) -> list[int]:
    """A judge that is wrong about each criterion in one of eight cases, by itself."""
    dice = random.Random(f"{name} {row}")
    return [met if dice.random() < 0.875 else 1 - met for met in truth_of(row)]


def decide(user: str, met: Sequence[int]) -> str:
    """The judge's reply to a rubric, whose criteria come in any order."""
    keys = {key: TEXTS.index(text) for key, text in re.findall(r"(c\d): ([a-z ]+)", user)
            if text in TEXTS}  # fmt: skip
    return json.dumps({
        key: {"reason": "so", "met": bool(met[place])} for key, place in keys.items()
    })  # fmt: skip


def one_score(user: str, met: Sequence[int]) -> int:
    weights = [row["weight"] for row in CRITERIA]
    return 1 + round(9 * sum(w * m for w, m in zip(weights, met, strict=True)) / sum(weights))


@pytest.mark.parametrize(
    ("reply", "attack"),
    [
        (one_score, "inverted"),
        (decide, "full marks"),
        pytest.param(one_score, "full marks", marks=pytest.mark.slow),
        pytest.param(decide, "inverted", marks=pytest.mark.slow),
    ],
)
def test_one_corrupt_judge_of_three_costs_less_than_half_of_what_it_costs_a_mean(
    make: Make, server: JudgeServer, others: list[JudgeServer], tmp_path: Path,
    reply: Callable[[str, Sequence[int]], int | str], attack: str,
) -> None:  # fmt: skip
    (tmp_path / "rubric.json").write_text(json.dumps(CRITERIA))
    rubric = {"rubric": str(tmp_path / "rubric.json")} if reply is decide else {}

    def agreement(mean: str, corrupt: bool) -> tuple[float, float]:
        """How near the panel's scores are to the truth, and their correlation with it."""
        for name, judge in zip(("judge-1", *NAMES), (server, *others), strict=True):

            def score(system: str, user: str, name: str = name) -> int | str:
                met = honest(name, number_of(user))
                if corrupt and name == "third":
                    met = [1] * len(met) if attack == "full marks" else [1 - m for m in met]
                return reply(user, met)

            judge.score = score
        reward = make(cache="off", **rubric)
        scores = score_all(reward, [sum_rollout(number) for number in range(ROWS)])
        values = [float(score.value) for score in scores if score.value is not None]
        if mean == "mean":  # of the same verdicts, as they are in the rollouts
            verdicts = [score.facts["panel"].values() for score in scores]
            values = [fmean(verdict["score"] for verdict in each) for each in verdicts]
        truth = [(one_score("", truth_of(row)) - 1) / 9 for row in range(ROWS)]
        correlation = correlate(values, truth)
        assert len(values) == ROWS and correlation is not None
        return 1 - float(np.mean(np.abs(np.subtract(values, truth)))), correlation

    base, attacked, robust = (
        agreement(*case) for case in (("mean", False), ("mean", True), ("median", True))
    )
    for measure, clean, plain, kept in zip(("near", "r"), base, attacked, robust, strict=True):
        print(f"{reply.__name__}, {attack}, {measure}: {clean:.3f}, {plain:.3f}, {kept:.3f}")
        # Full marks for all shift a mean and leave its correlation.
        if measure == "near" or attack == "inverted":
            assert clean - plain > 0.05, "the attack must hurt the mean"
            assert clean - kept < (clean - plain) / 2


def test_a_judge_that_fails_is_left_out_while_enough_remain(
    make: Make, server: JudgeServer, others: list[JudgeServer], tmp_path: Path
) -> None:
    server.score, others[0].score = (lambda system, user: 4), (lambda system, user: 6)
    others[1].score = lambda system, user: "no number"
    reward = make(cache="off", name="strict")
    reward.attach(tmp_path)
    (score,) = score_all(reward, [sum_rollout(1)])
    assert score.value == pytest.approx((3 / 9 + 5 / 9) / 2)
    assert (score.parts["judge"].raw, score.info["judge_calls"]) == pytest.approx((5, 2))
    panel = score.facts["panel"]
    assert [panel[name] for name in ("judge", "second")] == [
        {"score": pytest.approx(value), "reason": "As told."} for value in (3 / 9, 5 / 9)
    ]
    assert "it is not one JSON object" in panel["third"]["failure"]
    metrics = reward.pop_metrics()
    assert metrics["judge/panel_failed/third"] == 1 and "judge/panel_failed/second" not in metrics
    assert metrics["judge/panel_spread"] == pytest.approx(1 / 9)
    # All calls are paid from one ledger, each at its judge's price.
    assert (tmp_path / "judge_calls_strict.jsonl").exists()
    calls = paid_calls(tmp_path)
    assert {call["model"] for call in calls} == {"judge-1", *NAMES}
    prices = {"judge-1": (10, 20), "second": (1, 2), "third": (1, 2)}
    for call in calls:
        read, written = prices[call["model"]]
        by_hand = (read * call["input"] + written * call["output"]) / 1e6
        assert call["usd"] == pytest.approx(by_hand)
    assert metrics["judge/cost_usd"] == pytest.approx(sum(call["usd"] for call in calls))
    assert metrics["judge/calls"] == len(calls)
    (repeated,) = reward.repeat(sum_rollout(1), 1).result(60)
    assert repeated.value == score.value
    # Failures and spreads are those of one step.
    others[0].score = lambda system, user: 8 if "What is 2 +" in user else 4
    score_all(reward, [sum_rollout(number) for number in (2, 3, 4)])
    metrics = reward.pop_metrics()
    assert metrics["judge/panel_failed/third"] == 3
    assert metrics["judge/panel_spread"] == pytest.approx((2 / 9 + 0 + 0) / 3)
    others[0].score = lambda system, user: 6
    # Too few verdicts: no score, and never 0.
    strict = make(least=3, cache="off")
    (failed,) = score_all(strict, [sum_rollout(1)])
    assert json.loads(json.dumps(failed.facts))["panel"]["second"]["score"] == pytest.approx(5 / 9)
    assert failed.value is None and "2 of 3 judges gave a verdict, 3 are needed" in failed.failure
    assert strict.repeat(sum_rollout(1), 1).result(60)[0].value is None
    assert "judge/panel_spread" not in strict.pop_metrics()
    # Without a setting more than half are needed. A reply may be readable the next time.
    others[0].fail(400, code="content_filter")
    (failed,) = score_all(make(cache="off"), [sum_rollout(1)])
    assert failed.value is None and failed.failure.startswith("form")
    assert "1 of 3 judges gave a verdict, 2 are needed" in failed.failure


def submit_two(reward: PanelReward, failing: JudgeServer) -> list[Future[Score]]:
    """Submit a response that a judge fails on, then one whose answer shows that it is not down."""
    futures = [reward.submit(sum_rollout(2))]
    wait_until(lambda: failing.count)
    futures.append(reward.submit(sum_rollout(1)))
    reward.end_round()
    return futures


@pytest.mark.parametrize("refuses", [False, True])
def test_only_judges_without_a_verdict_are_asked_again(
    make: Make, server: JudgeServer, others: list[JudgeServer], refuses: bool
) -> None:
    """One judge does not answer about a row for a while, another one never gives a number."""
    if refuses:
        others[0].fail(400, code="content_filter")
    server.score, others[1].score = (lambda system, user: 4), (lambda system, user: 6)
    others[0].score = lambda system, user: "no number"
    others[1].fail(500, said="What is 2 +")
    reward = make(cache="off", max_failure_rate=0.0, deadline=0.001)
    futures = submit_two(reward, others[1])
    wait_until(lambda: "got no verdict" in (reward.waiting_for() or ""))
    others[1].heal()
    assert [future.result(60).value for future in futures] == pytest.approx([4 / 9] * 2)
    assert server.count == 2
    assert not reward._loop.call(reward.is_up(), timeout=60)  # one of three is not


def test_a_judge_that_is_down_is_not_waited_for_where_the_others_refuse_the_text(
    make: Make, server: JudgeServer, others: list[JudgeServer]
) -> None:
    for judge in (server, others[0]):
        judge.fail(400, code="content_filter", said="What is 2 +")
    others[1].fail(500, said="What is 2 +")
    reward = make(cache="off", max_failure_rate=0.0, deadline=0.001)
    futures = submit_two(reward, others[1])
    with pytest.raises(Interrupted, match="0 of 3 judges gave a verdict"):
        futures[0].result(60)


def test_the_noise_of_a_panel_is_that_of_its_robust_mean(
    make: Make, server: JudgeServer, others: list[JudgeServer]
) -> None:
    # The outer judges never repeat themselves, the one in the middle does.
    dice = random.Random(1)
    server.score, others[0].score = (
        (lambda system, user: 5),
        (lambda system, user: dice.choice((9, 10))),
    )
    others[1].score = lambda system, user: dice.choice((1, 2))
    reward = make(noise_responses=2)
    reward.begin_step(1)
    scores = score_all(reward, [sum_rollout(1), sum_rollout(2)])
    metrics = reward.pop_metrics()
    assert [score.value for score in scores] == pytest.approx([4 / 9] * 2)
    assert metrics["judge/noise"] == 0.0 and metrics["judge/noise_responses"] == 2
    assert [judge.count for judge in (server, *others)] == [6, 6, 6]
    repeated = reward.repeat(sum_rollout(1), 3).result(60)
    assert [score.value for score in repeated] == pytest.approx([4 / 9] * 3)
    # Too few judges repeat their verdict.
    replies = iter([5])
    server.score = lambda system, user: next(replies, "no number")
    strict = make(noise_responses=1, least=3, cache="off")
    strict.begin_step(1)
    score_all(strict, [sum_rollout(1)])
    assert strict.pop_metrics()["judge/noise_failed"] == 2
    # Votes are of one judge: they do not show the noise of a panel.
    server.score = lambda system, user: 5
    voting = make(noise_responses=1, votes=2, cache="off")
    voting.begin_step(1)
    score_all(voting, [sum_rollout(1)])
    assert voting.pop_metrics()["judge/noise_responses"] == 1


def test_criteria_come_in_another_order_for_each_row_and_judge(
    make: Make, server: JudgeServer, others: list[JudgeServer], tmp_path: Path
) -> None:
    (tmp_path / "rubric.json").write_text(json.dumps(CRITERIA))
    for judge in (server, *others):
        judge.score = lambda system, user: decide(user, truth_of(number_of(user)))
    rollouts = [sum_rollout(number) for number in range(6)]
    rubric = {"rubric": str(tmp_path / "rubric.json"), "votes": 2}
    scores = score_all(make(**rubric), rollouts)
    # Every criterion got its own verdict, whatever its place.
    for row, score in enumerate(scores):
        expected = {f"k{i}": float(met) for i, met in enumerate(truth_of(row))}
        assert score.facts["criteria"] == pytest.approx(expected)
        assert {f"k{i}": score.parts[f"rubric/k{i}"].raw for i in range(4)} == expected
    orders = [re.findall(r"c\d: (\w+)", json.dumps(call.body)) for judge in (server, *others)
              for call in judge.calls]  # fmt: skip
    assert len({tuple(order) for order in orders}) > 10 and len(orders) == 36
    # Of the two votes of a judge on a row, too.
    assert len({tuple(order) for order in orders[:12]}) > len(rollouts)
    # The same rows are asked in the same orders again: all of it is in the cache.
    before = [judge.count for judge in (server, *others)]
    again = score_all(make(**rubric), rollouts)
    assert [score.value for score in again] == [score.value for score in scores]
    assert [judge.count for judge in (server, *others)] == before
    fixed = make(**rubric, rubric_order="fixed", cache="off")
    score_all(fixed, rollouts[:1])
    order = re.findall(r"c\d: (\w+)", json.dumps(server.calls[-1].body))
    assert order == ["alpha", "beta", "gamma", "delta"]


def test_a_criterion_is_placed_where_the_judge_nearest_to_the_median_quotes(
    make: Make, server: JudgeServer, others: list[JudgeServer]
) -> None:
    for judge, quote in zip((server, *others), ("It is", "2.", "2."), strict=True):
        reply = {"c1": {"reason": "so", "quote": quote, "met": quote == "2."}}
        judge.score = lambda system, user, reply=reply: json.dumps(reply)
    rubric = {"rubric": [{"text": "It is right."}]}
    reward = make(rubric="extra_info.rubric", place="criterion")
    (score,) = score_all(reward, [sum_rollout(1, extra_info=rubric)])
    assert [(step.end, step.value) for step in score.steps] == [(len("It is 2."), 1.0)]
    # Other rows have other criteria, so there is no metric of this one.
    assert set(score.parts) == {"judge", *(f"panel/{name}" for name in ("judge", *NAMES))}


def test_a_shuffled_rubric_is_restored() -> None:
    rubric = Rubric(tuple(Criterion(f"k{i}", f"text {i}", weight=1.0 + i) for i in range(7)), True)
    shuffled = rubric.shuffle("row/0/model")
    assert shuffled == rubric.shuffle("row/0/model") != rubric.shuffle("row/1/model")
    assert shuffled.criteria != rubric.criteria and shuffled.restore() == rubric
    grades = [float(int(criterion.name[1:]) % 2) for criterion in shuffled.criteria]
    assert shuffled.in_order(grades) == [0, 1, 0, 1, 0, 1, 0]
    assert shuffled.value(grades) == rubric.value(shuffled.in_order(grades))
