"""Criteria on decision endpoints: the real SDKs against twins of their providers' protocols."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.records import Score
from ppo_cli.rewards.judge.calls import Output, Scale, worst_case
from ppo_cli.rewards.judge.prompt import Material, build_material, load_preset
from ppo_cli.rewards.judge.providers.forms import decision_input
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.judge.rubric import read_rubric
from ppo_cli.rewards.judge.verdict import build_reminder
from tests.judge_server import JudgeServer
from tests.judge_server.decisions import Asked, valid_reply
from tests.judge_server.wire import fenced
from tests.rewards.judge.test_rubric import rollout
from tests.rewards.scoring import score_all

Make = Callable[..., JudgeReward]
ROWS = {"openai": 100, "dashscope": 60, "gemini": 40}  # the third SDK takes 40 ms a call
CRITERIA: list[dict[str, Any]] = [
    {"name": "right", "text": "It is right.", "weight": 3, "must": True},
    {"name": "honest", "text": "It invents a source.", "weight": -2, "must": True},
    {"name": "clear", "text": "It is clear.", "levels": 3},
    {"name": "kind", "text": "It is kind.", "weight": 0.5},
    {"name": "rude", "text": "It is rude.", "weight": -1.25, "levels": 4},
    {"name": "short", "text": "It is short.", "weight": 2},
    {"name": "told", "text": "It says who it is.", "weight": 0},
    {"name": "fine", "text": "How fine its style is.", "levels": 20, "weight": 5},
]


def drawn(text: str, asked: Asked) -> list[float]:
    """Probabilities by chance, the same for a response and a question each time."""
    dice = random.Random(f"{fenced('response', text)} {asked.instructions}")
    peak = dice.randrange(len(asked.options)) if dice.random() < 0.7 else -1
    weights = [dice.random() + 20 * (i == peak) for i in range(len(asked.options))]
    return [weight / math.fsum(weights) for weight in weights]


def worth(response: str, criteria: list[dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """The score by hand, and the credit of each criterion."""
    earned = total = 0.0
    credits, missed = {}, False
    text = f"<response-0>\n{response}\n</response-0>"
    for row in criteria:
        levels, weight = row.get("levels", 1), row.get("weight", 1)
        words = f" (level_0_to_{levels}: 0 is the least, {levels} the most)" if levels > 1 else ""
        if not words and weight < 0:
            words = " (a fault: is it present in the response?)"
        shares = drawn(text, Asked("", row["text"] + words, ("",) * (levels + 1)))
        grade = math.fsum(level * share for level, share in enumerate(shares)) / levels
        credits[row["name"]] = credit = 1 - grade if weight < 0 else grade
        missed |= row.get("must", False) and credit < 0.5
        earned, total = earned + abs(weight) * credit, total + abs(weight)
    return 0.0 if missed else earned / total, credits


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    import openai  # noqa: F401  # it takes a second, which no call should pay for

    with JudgeServer(decide=drawn) as running:
        yield running


@pytest.fixture
def make(judge_of: Make) -> Make:
    return partial(judge_of, mode="decision", rubric="extra_info.rubric")


@pytest.mark.parametrize("wire", ROWS)
def test_eight_criteria_cost_one_request_and_give_their_expectation(
    wire: str, make: Make, server: JudgeServer
) -> None:
    """Each row has its own selection of the criteria, in its own order."""
    dice, rows = random.Random(wire), []
    for number in range(ROWS[wire]):
        criteria = CRITERIA if number % 2 else dice.sample(CRITERIA, dice.randrange(2, 8))
        rows.append(rollout(number, f"response {number}", criteria))
    scores = score_all(make(wire), rows)
    assert server.count == ROWS[wire], "one request a response"
    values = [worth(row.text, row.prompt.extra_info["rubric"]) for row in rows]
    for row, score, (value, credits) in zip(rows, scores, values, strict=True):
        assert score.value == pytest.approx(value, abs=1e-9)
        met_or_not = [c for c in row.prompt.extra_info["rubric"] if "levels" not in c]
        assert score.reason.count(" with probability ") == len(met_or_not)
        assert score.info["criteria"] == pytest.approx(credits, abs=1e-9)
        assert score.info["judge_calls"] == 1
    zeros = sum(value == 0 for value, _ in values)
    assert 0.2 < zeros / len(rows) < 0.8, "hurdles are met and missed"
    assert server.tokens == sum(score.info["judge_tokens"] for score in scores)
    # Other weights ask nothing again: score and spread follow from the grades in the cache.
    for number, row in enumerate(rows):
        criteria = row.prompt.extra_info["rubric"]
        heavy = [c | {"weight": c.get("weight", 1) ** 3} for c in criteria]
        rows[number] = rollout(number, row.text, heavy)
    cached = score_all(make(wire), rows)
    assert server.count == ROWS[wire]
    uncached = score_all(make(wire, cache="off"), rows[:9])
    for score, other in zip(cached, uncached, strict=False):
        figures = [(s.value, s.info["spread"]) for s in (score, other)]
        assert figures[0] == pytest.approx(figures[1])


@pytest.mark.parametrize("wire", ROWS)
def test_a_request_shows_each_criterion_once_and_no_other_form(
    wire: str, make: Make, server: JudgeServer
) -> None:
    """The twin refuses what its provider's documents do not allow, and its replies are theirs."""
    seen: list[tuple[str, Asked]] = []
    server.decide = lambda text, asked: (seen.append((text, asked)), drawn(text, asked))[1]
    checked: list[Any] = []
    server.spoil = lambda answers: (
        checked.append(valid_reply(wire, {"answers": answers, "model": "m", "usage": USAGE[wire]})),
        answers,
    )[1]
    score_all(make(wire), [rollout(1, "response", CRITERIA)])
    (text,) = {text for text, _ in seen}
    assert len(checked[0].answers) == 8
    assert fenced("response", text) == "response" and text.count("Question 1") == 1
    assert "You check responses against criteria" in text and "JSON" not in text
    assert not any(row["text"] in text for row in CRITERIA)
    assert sorted(asked.instructions.partition(" (")[0] for _, asked in seen) == sorted(
        row["text"] for row in CRITERIA
    )
    options = {asked.instructions.partition(" (")[0]: asked.options for _, asked in seen}
    assert options["It is right."] == ("not met", "met")
    assert options["It invents a source."] == ("absent", "present")
    assert options["It is clear."] == tuple(f"level {level} of 3" for level in range(4))


DETAILS = {"cached_tokens": 0, "cache_write_tokens": 0}
USAGE: Mapping[str, Any] = {
    "openai": {
        "input_tokens": 1, "output_tokens": 0, "total_tokens": 1, "input_tokens_details": DETAILS,
        "output_tokens_details": {"reasoning_tokens": 0},
    },
    "gemini": {"total_input_tokens": 1, "total_output_tokens": 0},
    "dashscope": {"input_tokens": 1, "output_tokens": 0},
}  # fmt: skip


def first(answers: Any) -> Any:
    """The answer to the first criterion, c1."""
    return answers[0] if isinstance(answers, list) else answers["c1"]


def without_last(answers: Any) -> Any:
    return answers[:-1] if isinstance(answers, list) else dict(list(answers.items())[:-1])


def with_one_more(answers: Any) -> Any:
    if isinstance(answers, list):
        return [*answers, first(answers) | {"name": "c9"}]
    return answers | {"c9": first(answers)}


def set_shares(answers: Any, change: Callable[[list[float]], list[float]]) -> Any:
    """Change the probabilities of the first criterion; it has two options."""
    shares = first(answers)["probabilities"]
    rows = shares if isinstance(shares, list) else [{"probability": p} for p in shares.values()]
    new = change([row["probability"] for row in rows])
    if isinstance(shares, list):
        for row, share in zip(shares, new, strict=True):
            row["probability"] = share
    else:
        shares.update(zip(shares, new, strict=True))
    return answers


def rename_option(answers: Any, old: int, label: str) -> Any:
    shares = first(answers)["probabilities"]
    if isinstance(shares, list):
        shares[old]["label"] = label
    else:
        shares[label] = shares.pop(str(old))
    return answers


def drop_option(answers: Any) -> Any:
    shares = first(answers)["probabilities"]
    shares.pop(-1 if isinstance(shares, list) else "1")
    return answers


def replace_first(answers: Any, answer: Any) -> Any:
    if isinstance(answers, list):
        return [answer, *answers[1:]]
    return answers | {"c1": answer}


SPOILT: dict[str, Callable[[Any], Any]] = {
    "a criterion is missing": without_last,
    "a question is extra": with_one_more,
    "a criterion has no probabilities": lambda a: replace_first(a, {"type": "score"}),
    "a probability is NaN": lambda a: set_shares(a, lambda p: [math.nan, p[1]]),
    "a probability is negative": lambda a: set_shares(a, lambda p: [-0.2, 1.2]),
    "they sum to less than 1": lambda a: set_shares(a, lambda p: [0.3, 0.3]),
    "they sum to more than 1": lambda a: set_shares(a, lambda p: [0.9, 0.9]),
    "an option has another name": lambda a: rename_option(a, 1, "perhaps"),
    "an option is missing": drop_option,
}


def score_one(reward: JudgeReward, text: str = "response") -> Score:
    (score,) = score_all(reward, [rollout(1, text, CRITERIA)])
    return score


@pytest.mark.parametrize("wire", ["openai", "gemini"])
@pytest.mark.parametrize("what", SPOILT)
def test_a_reply_that_lacks_a_grade_gives_no_score(
    what: str, wire: str, make: Make, server: JudgeServer
) -> None:
    """As in text mode it is asked for again twice; then the row is masked, not 0 or a part."""
    server.spoil = SPOILT[what]
    reward = make(wire)
    reward.start([])
    score = score_one(reward)
    assert score.value is None and score.failure
    assert "probabilit" in score.failure or "not one answer for each of c1, c2" in score.failure
    assert server.count == 3
    metrics = reward.pop_metrics()
    assert metrics["judge/unread"] == 1.0 and metrics["judge/tokens_in"] == server.tokens


@pytest.mark.parametrize("output", ["json", "text"])
def test_a_repeated_request_names_no_form_of_a_written_answer(output: Output) -> None:
    material = Material("What is 1 + 1?", "Reply with ONE JSON object and nothing else", "2")
    question = replace(load_preset("math"), output=output).question(material)
    repeated = replace(question, user=f"{question.user}\n\n{build_reminder(question)}")
    text = decision_input(question)
    assert decision_input(repeated) == text and text.endswith("from 1 (worst) to 10 (best).")
    assert text.count("ONE JSON object") == 1, "that of the response"


@pytest.mark.parametrize("wire", ["openai", "gemini"])
def test_one_bad_reply_is_asked_for_again(wire: str, make: Make, server: JudgeServer) -> None:
    value, _ = worth("response", CRITERIA)
    bad = iter([without_last])
    server.spoil = lambda answers: next(bad, lambda good: good)(answers)
    assert score_one(make(wire)).value == pytest.approx(value, abs=1e-9)
    assert server.count == 2


def test_one_criterion_that_the_judge_declines_masks_the_row(
    make: Make, server: JudgeServer
) -> None:
    server.spoil = lambda answers: replace_first(answers, {"type": "refusal", "name": "c1"})
    score = score_one(make("openai"))
    assert score.value is None and "declined to decide c1" in str(score.failure)
    assert server.count == 1


def test_votes_cache_and_separate_calls(make: Make, server: JudgeServer) -> None:
    value, credits = worth("response", CRITERIA)
    score = score_one(make("openai", votes=3))
    assert (server.count, score.info["votes"]) == (3, pytest.approx([value] * 3))
    again = score_one(make("openai", votes=3))
    assert (server.count, again.value, again.info["cached"]) == (3, score.value, True)
    assert again.info["criteria"] == pytest.approx(credits)
    each = score_one(make("openai", rubric_calls="each"))
    assert each.value == pytest.approx(value, abs=1e-9) and server.count == 3 + 8


def test_the_estimate_of_a_request_covers_what_the_endpoint_reads(
    make: Make, server: JudgeServer
) -> None:
    reward = make("openai")
    score_one(reward)
    material = build_material(rollout(1, "response").prompt, "response")
    question = reward.template.question(material, rubric=read_rubric(CRITERIA, "here"))
    assert question.scale == Scale(0, 1)
    assert server.tokens <= worst_case(question).input <= 4 * server.tokens


@pytest.mark.parametrize("follows", [True, False])
def test_a_judge_is_tried_on_criteria_with_known_grades(
    follows: bool, make: Make, server: JudgeServer, tmp_path: Path
) -> None:
    def decide(text: str, asked: Asked) -> list[float]:
        hit = "price" not in asked.instructions
        last = len(asked.options) - 1
        return [0.9 if (i == last * (hit is follows)) else 0.1 / last for i in range(last + 1)]

    server.decide = decide
    (tmp_path / "r.yaml").write_text(json.dumps(CRITERIA))
    notes: list[str] = []
    reward = make("openai", rubric=str(tmp_path / "r.yaml"), canary_every=50)
    reward.start([rollout(1, "").prompt], tell=notes.append)
    assert ("answers 1 of 1 questions with a known answer right" in notes[0]) is follows
    assert ("answers only 0 of 1" in notes[0]) is not follows
