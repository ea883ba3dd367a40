"""Verdicts that become one score: of votes, criteria, panels, cascades and comparisons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from ppo_cli.records import Part, Score
from ppo_cli.rewards.judge.calls import (
    JudgeError,
    Usage,
    Verdict,
    merge_criteria,
    score_from_votes,
)
from ppo_cli.rewards.judge.cascade import _add_costs
from ppo_cli.rewards.judge.compare import (
    Contest,
    Contestant,
    Tally,
    _build_score,
    _by_reference,
    _by_strength,
    bradley_terry,
    win_chances,
)
from ppo_cli.rewards.judge.panel import PanelReward
from ppo_cli.rewards.judge.rubric import Criterion, Placing, Rubric
from ppo_cli.rewards.remote.failures import Failure
from tests.judge_server.asking import make_question
from tests.rewards.scoring import rollouts_of

CRITERIA = (
    Criterion("a", "A."), Criterion("b", "B.", 2.0, fault=True, must=True), Criterion("c", "C."),
)  # fmt: skip
RUBRIC = Rubric(CRITERIA, fixed=True, quoted=True)
PLAIN = make_question()  # a scale from 1 to 10
PLACED = replace(PLAIN, placing=Placing(2, 1, 10, "whole"))
DECIDED = replace(PLAIN, rubric=RUBRIC)


def vote(value: float, k: int, **info: Any) -> Verdict:
    """The k-th vote, whose counts are powers of two, so that each sum tells what is in it."""
    usage = Usage(100 * 2**k, 2**k)
    return Verdict(value, f"r{k}", f"t{k}", usage, 2.0**k, 0.25 * k, 2**k, k > 0, info)


def totals(*votes: int, **more: Any) -> dict[str, Any]:
    """The info of a score of these votes."""
    calls = sum(2**k for k in votes)
    return {
        "cached": 0 not in votes, "judge_tokens": 101 * calls, "judge_calls": calls,
        "latency_s": 0.25 * max(votes), "cost_usd": float(calls), **more,
    }  # fmt: skip


def test_a_score_of_votes_is_their_mean_in_all_that_it_says() -> None:
    score, error = score_from_votes([vote(4, 1)], PLAIN)
    part = Part(4, pytest.approx(1 / 3))
    assert error is None
    assert score == Score(
        part.scaled, reason="r1", parts={"judge": part}, info=totals(1), reply="t1"
    )
    votes = [
        vote(1, 1, pieces=[0, 1], spread=0.25),
        vote(10, 2, pieces=[0.5, 0], spread=0.5),
        vote(4, 0, pieces=[1, 0.5], spread=0),
    ]
    score, _ = score_from_votes(votes, PLACED)
    part = Part(5, pytest.approx(4 / 9))
    within, between = 0.3125 / 3, (16 + 25 + 1) / 81 / 3
    spreads = (pytest.approx(math.sqrt(x)) for x in (between, within + between))
    more = dict(zip(("vote_spread", "spread"), spreads, strict=True))
    info = totals(0, 1, 2, pieces=[0.5, 0.5], votes=[1, 10, 4], **more)
    assert score == Score(part.scaled, reason="r0", parts={"judge": part}, info=info, reply="t0")


@pytest.mark.parametrize("fixed", [True, False])
def test_a_score_of_criteria_has_their_credit_as_written(fixed: bool) -> None:
    """Of two votes one misses the hurdle; a fault gives credit for its absence."""
    shuffled = replace(RUBRIC, criteria=(CRITERIA[2], *CRITERIA[:2]), places=(2, 0, 1), fixed=fixed)
    votes = [
        vote(value, k, grades=grades, quotes=[f"q{k}"])
        for value, k, grades in ((3, 1, [0.5, 1, 0]), (5, 2, [1, 0.75, 0.25]))
    ]
    score, _ = score_from_votes(votes, replace(DECIDED, rubric=shuffled))
    credits = {"a": 0.75, "b": 0.125, "c": 0.125}
    parts = {"judge": Part(4, pytest.approx(1 / 3)), "rubric/hurdle_missed": Part(1.0, None)}
    parts |= {f"rubric/{name}": Part(x, None) for name, x in credits.items()} if fixed else {}
    info = totals(
        1, 2, votes=[3, 5], vote_spread=pytest.approx(1 / 9), criteria=credits, quotes=["q1"]
    )
    assert score == Score(pytest.approx(1 / 3), reason="r1", parts=parts, info=info, reply="t1")
    assert [*score.info["criteria"]] == ["a", "b", "c"]
    free = replace(RUBRIC, criteria=(CRITERIA[0],), quoted=False)
    score, _ = score_from_votes([vote(1, 0, grades=[0.5])], replace(DECIDED, rubric=free))
    assert score is not None and score.parts.keys() == {"judge", "rubric/a"}
    assert "quotes" not in score.info


@pytest.mark.parametrize(
    ("quoted", "spreads"), [(True, (0.5, 0.25, 1.0)), (False, (0.5, None, 1.0))]
)
def test_one_call_a_criterion_makes_one_verdict(quoted: bool, spreads: Any) -> None:
    """Of weights 1, 2, 1 in 4; a spread of a hurdle counts with all of them."""
    verdicts = [
        vote(
            9, k, grades=[grade], quotes=[f"q{k}"], **({} if spread is None else {"spread": spread})
        )
        for k, (grade, spread) in enumerate(zip((1, 0.25, 0.5), spreads, strict=True))
    ]
    info: dict[str, Any] = {"grades": [1, 0.25, 0.5]}
    info |= {"quotes": ["q0", "q1", "q2"]} if quoted else {}
    info |= {"spread": math.sqrt(0.25 + 1 + 1) / 4} if None not in spreads else {}
    merged = merge_criteria(verdicts, replace(RUBRIC, quoted=quoted))
    assert merged == Verdict(
        0.75, "r0\nr1\nr2", "t0\nt1\nt2", Usage(700, 7), 7.0, 0.5, 7, False, info
    )
    assert merge_criteria(verdicts[1:], replace(RUBRIC, criteria=CRITERIA[1:])).cached


def judged(value: float, k: int, **info: Any) -> Score:
    return Score(value, reason=f"r{k}", reply=f"t{k}", info=totals(k, **info))


def combine(question: Any, *scores: Score) -> Score:
    judges = dict(zip(("judge", "x", "y", "z"), scores, strict=False))
    return PanelReward._combine(cast(PanelReward, None), judges, question)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_panel_is_the_median_in_all_that_it_says(fixed: bool) -> None:
    """Of three judges the one nearest to the median speaks; of two, the first."""
    rows = (
        (1.0, 1, (0, 1, 0.5), [1, 0]), (0.0, 2, (1, 0, 0.5), [0, 0.25]),
        (0.25, 0, (1, 0.5, 0), [0, 1]),
    )  # fmt: skip
    scores = [
        judged(value, k, criteria=dict(zip("abc", each, strict=True)), quotes=[f"q{k}"], pieces=p)
        for value, k, each, p in rows
    ]
    both = replace(PLACED, rubric=replace(RUBRIC, fixed=fixed))
    parts = {"judge": Part(3.25, 0.25), "panel/judge": Part(1.0, None), "panel/x": Part(0.0, None)}
    parts |= {"panel/y": Part(0.25, None)}
    credits = {"a": 1, "b": 0.5, "c": 0.5}
    parts |= {f"rubric/{name}": Part(x, None) for name, x in credits.items()} if fixed else {}
    spread = math.sqrt((1 + 1 / 16) / 3 - (1.25 / 3) ** 2)
    info = totals(
        0,
        1,
        2,
        criteria=credits,
        quotes=["q0"],
        pieces=[0, 0.25],
        panel_spread=pytest.approx(spread),
    )
    assert combine(both, *scores) == Score(0.25, reason="r0", parts=parts, info=info, reply="t0")
    parts = {"judge": Part(5.5, 0.5), "panel/judge": Part(1.0, None), "panel/x": Part(0.0, None)}
    info = totals(1, 2, panel_spread=0.5)
    assert combine(PLAIN, *scores[:2]) == Score(
        0.5, reason="r1", parts=parts, info=info, reply="t1"
    )


def test_a_cascade_costs_what_both_judges_cost() -> None:
    """What else is said is the later judge's; it is cached if both verdicts are."""
    cheap, strong = totals(1, spread=0.5), totals(2, votes=[1])
    both = {"judge_tokens": 606, "judge_calls": 6, "latency_s": 0.75, "cost_usd": 6.0}
    assert _add_costs(cheap, strong) == {**both, "votes": [1], "cached": True}
    assert (
        _add_costs(totals(0), strong)["cached"] is _add_costs(cheap, totals(0))["cached"] is False
    )
    assert _add_costs({}, strong) == strong


def contest(texts: str, nodes: tuple[int, ...], gated: int = 0, **answers: Any) -> Contest:
    """Samples 0, 1, 2 … have the texts of these nodes; `answers` has places by the nodes shown."""
    rollouts = rollouts_of(*(texts[node] for node in nodes), n=len(nodes))
    entries = [Contestant(r, node=node) for r, node in zip(rollouts, nodes, strict=True)]
    sizes = [nodes.count(node) for node in range(len(set(nodes)))]
    verdicts = {
        (tuple(map(int, shown.strip("n"))), k): vote(1, k, places=places)
        for k, (shown, places) in enumerate(answers.items())
    }
    reference = len(texts) > len(sizes)
    made = Contest(
        rollouts[0].prompt, entries, gated, texts, sizes, reference, (), False, dict(verdicts)
    )
    made.answers[(1, 0), 9] = JudgeError(Failure.RETRYABLE, "any", "no")
    return made


def test_a_score_of_comparisons_says_who_met_whom_and_shares_the_cost() -> None:
    drawn = contest("abc", (0, 1, 0), n01=(1, 2), n10=(1, 1), n201=(3, 1, 2), n12=(2, 1))
    tally = Tally(np.array([[0, 1.5, 1], [0.5, 0, 0.25], [0, 1, 0]]))
    info = {"cached": False, "judge_tokens": 505.0, "judge_calls": 5.0, "cost_usd": 5.0}
    reasons = (
        "won (R1 this one, R2 sample 1): r0\ntied (R1 sample 1, R2 this one): r1\n"
        "won (R1 the reference, R2 this one, R3 sample 1): r2",
        "lost (R1 sample 0, R2 this one): r0\ntied (R1 this one, R2 sample 0): r1\n"
        "place 2 (R1 the reference, R2 sample 0, R3 this one): r2\n"
        "lost (R1 this one, R2 the reference): r3",
    )
    for entry, wins, compared, reason in zip(
        drawn.entries, (2.5, 0.75), (3.0, 3.25), reasons, strict=False
    ):
        more = {"wins": wins, "compared": compared, "strength": 0.123457}
        expected = Score(
            0.75, reason=reason, parts={"judge": Part(0.75, 0.75)}, info=info | more, reply="t0"
        )
        assert _build_score(drawn, tally, entry, 0.75, 0.12345678) == expected
    alone = _build_score(contest("ab", (0,)), tally, drawn.entries[0], 0.5, None)
    assert "strength" not in alone.info and (alone.reason, alone.reply) == ("", "")


def test_strengths_and_references_by_hand() -> None:
    """Two equal responses, a third and one without content; then shares of the meetings won."""
    group, wins = contest("ab", (0, 1, 0), gated=1), np.array([[0, 1.5], [0.5, 0]])
    strength = bradley_terry(wins)
    chance = win_chances(strength)[0, 1]
    expected = ((0.5 * 2 + chance - 0.5 + 1) / 3, (2 * (1 - chance) + 1) / 3)
    for node, (share, theta) in _by_strength(group, Tally(wins)).items():
        assert (share, theta) == pytest.approx((expected[node], strength[node]))
    assert _by_strength(contest("a", (0,)), Tally(np.zeros((1, 1)))) == {}
    assert _by_strength(contest("a", (0,), gated=1), Tally(np.zeros((1, 1)))) == {0: (1.0, 0.0)}
    met = np.zeros((4, 4))
    met[0, 3], met[3, 0], met[3, 1] = 1.5, 0.5, 1
    scores = _by_reference(contest("abcd", (0, 1, 2)), Tally(met))
    assert scores == {0: (0.75, None), 1: (0.0, None)}
    assert _by_reference(contest("aba", (0, 1)), Tally(met)) == {0: (0.5, None)}
