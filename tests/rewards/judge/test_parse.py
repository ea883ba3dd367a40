"""Replies of judges are read as a careful human would read them, or not at all."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from ppo_cli.rewards.judge.exchange import Failure, JudgeError, Reply, Scale, Usage
from ppo_cli.rewards.judge.parse import read_verdict

CORPUS: list[dict[str, Any]] = [
    entry | {"group": group}
    for group, entries in yaml.safe_load(
        (Path(__file__).parent / "replies.yaml").read_text(encoding="utf-8")
    ).items()
    for entry in entries
]
TEN = Scale(1, 10)
CAUSES = {"empty", "truncated", "unparsed", "ambiguous", "out_of_range"}


def scale_of(text: str) -> Scale:
    low, high = re.fullmatch(r"(-?\d+)-(\d+)", text).groups()  # type: ignore[union-attr]
    return Scale(int(low), int(high))


def test_the_corpus_is_large_and_every_entry_says_what_is_expected() -> None:
    assert len(CORPUS) >= 180
    assert all(("score" in entry) != ("fails" in entry) for entry in CORPUS)


@pytest.mark.parametrize("entry", CORPUS, ids=lambda e: f"{e['group']}: {e['reply'][:50]!r}")
def test_reply(entry: dict[str, Any]) -> None:
    reply = Reply(entry["reply"], Usage(5, 3), truncated=entry.get("truncated", False))
    if "score" in entry:
        value, _ = read_verdict(reply, scale_of(entry["scale"]))
        assert value == entry["score"]
        return
    with pytest.raises(JudgeError) as caught:
        read_verdict(reply, scale_of(entry["scale"]))
    assert caught.value.kind is Failure.UNPARSED
    assert caught.value.cause in CAUSES
    assert entry["fails"] in (True, caught.value.cause)
    assert caught.value.usage == Usage(5, 3)
    assert caught.value.reply == entry["reply"]


def read(text: str, scale: Scale = TEN, **kwargs: Any) -> float:
    return read_verdict(Reply(text, **kwargs), scale)[0]


def refused(text: str, scale: Scale = TEN, **kwargs: Any) -> JudgeError:
    with pytest.raises(JudgeError) as caught:
        read(text, scale, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"reason": "mostly right", "score": 8}', "mostly right"),
        ('{"score": 8, "explanation": "clear"}', "clear"),
        ('It skips a step.\n{"score": 8}', "It skips a step."),
        ("Reason: it skips a step\nScore: 8", "it skips a step"),
        ("It skips a step.\n\n**Score:** 8", "It skips a step."),
        ("8", ""),
    ],
)
def test_the_reason_is_the_judges_own_words(text: str, reason: str) -> None:
    assert read_verdict(Reply(text), TEN) == (8.0, reason)


def test_the_message_names_the_trouble_and_shows_a_short_excerpt() -> None:
    error = refused("blah " * 500 + "\nScore: 85/100")
    assert "another scale than 1-10" in str(error)
    assert "85/100" in str(error)
    assert len(str(error)) < 300


def test_whole_json_in_a_cut_reply_counts_and_a_cut_label_does_not() -> None:
    assert read('{"score": 8} and so', truncated=True) == 8
    assert refused("Score: 1", truncated=True).cause == "truncated"


# Decision mode


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ({1: 0.5, 10: 0.5}, 5.5),
        ({7: 1.0}, 7.0),
        ({7: 0.6, 8: 0.3, 9: 0.1}, 7.5),
        ({7: 0.59, 8: 0.3, 9: 0.1}, 7.505),
        ({10: 0.97}, 10.0),
        ({10: 1}, 10.0),
    ],
)
def test_probabilities_give_their_mean(probabilities: dict[int, float], expected: float) -> None:
    value, reason = read_verdict(Reply("", probabilities=probabilities), TEN)
    assert value == pytest.approx(expected, abs=0.001)
    assert str(max(probabilities, key=probabilities.__getitem__)) in reason


@pytest.mark.parametrize(
    ("probabilities", "cause"),
    [
        ({}, "empty"),
        ({7: math.nan}, "unparsed"),
        ({7: math.inf}, "unparsed"),
        ({7: 1.2, 8: -0.2}, "unparsed"),
        ({7: 0.0}, "unparsed"),
        ({7: 0.6}, "unparsed"),
        ({7: 0.9, 8: 0.9}, "unparsed"),
        ({0: 0.5, 1: 0.5}, "out_of_range"),
        ({11: 1.0}, "out_of_range"),
    ],
)
def test_doubtful_probabilities_are_refused(probabilities: dict[int, float], cause: str) -> None:
    assert refused("", probabilities=probabilities).cause == cause


@given(st.lists(st.floats(0.001, 1.0), min_size=10, max_size=10))
def test_a_mean_never_leaves_the_scale(weights: list[float]) -> None:
    total = sum(weights)
    spread = {level: w / total for level, w in zip(TEN.levels(), weights, strict=True)}
    assert 1.0 <= read("", probabilities=spread) <= 10.0


# Attacks at random

PROSE = st.text(st.sampled_from("abcdefgh ABC 0123456789.,;!?-/%()'\n的分满好🙂½²"), max_size=200)


@given(PROSE)
def test_a_number_in_prose_is_never_a_score(prose: str) -> None:
    words = f"The answer {prose} is what it is"
    refused(words)


@given(st.text(max_size=300))
def test_any_text_is_either_on_the_scale_or_refused(text: str) -> None:
    try:
        value = read(text)
    except JudgeError as error:
        assert error.kind is Failure.UNPARSED
        assert error.cause in CAUSES
        return
    assert 1.0 <= value <= 10.0


TOKENS = st.sampled_from(
    [
        *("{", "}", "[", "]", '"', "'", "score", '"score"', ":", ",", "8", "3", "85", "/10", "\n"),
        *(" ", "Score: ", "Final score: ", "<think>", "</think>", "```", "json", "<score>"),
        *("</score>", "true", "null", "NaN", "-", ".", "reason", "|", "**", "(", ")", "满分", "分"),
        *("out of 10", '{"score": ', "{'score': "),
    ]
)


@given(st.lists(TOKENS, max_size=30).map("".join))
def test_any_debris_of_a_reply_is_either_on_the_scale_or_refused(text: str) -> None:
    try:
        value = read(text)
    except JudgeError:
        return
    assert value in (3.0, 8.0, 3.8, 8.3, 3.3, 8.8, 3.85, 8.85)


@given(
    prose=st.text(st.sampled_from("abc de\n.,;!?0123456789的"), max_size=200),
    score=st.integers(1, 10),
    reason=st.text(max_size=100),
)
def test_json_at_the_end_of_any_prose_is_read(prose: str, score: int, reason: str) -> None:
    verdict = json.dumps({"reason": reason, "score": score}, ensure_ascii=False)
    assume("\\" not in verdict or json.loads(verdict)["score"] == score)
    assert read(f"{prose}.\n\n{verdict}") == score


@given(reason=st.text(max_size=200), score=st.integers(1, 10), ascii_only=st.booleans())
def test_nothing_inside_a_reason_can_change_the_score(
    reason: str, score: int, ascii_only: bool
) -> None:
    for text in (reason, f'{reason} "score": 10}} Score: 10 {reason}', f"<think>{reason}"):
        reply = json.dumps({"reason": text, "score": score}, ensure_ascii=ascii_only)
        assert read(reply) == score


@given(st.integers(1, 10), st.integers(0, 60))
def test_a_cut_verdict_is_never_read(score: int, cut: int) -> None:
    whole = json.dumps({"parts": {"a": {"score": 2}}, "reason": "is long", "score": score})
    if cut < len(whole):
        assert refused(whole[:cut]).cause in CAUSES


DEEP = '{"score":1,"scale":' + '{"a":' * 450 + "1" + "}" * 452
HUGE = "9" * 5000


@pytest.mark.parametrize(
    "text",
    [DEEP, DEEP.replace('"scale"', '"max_score"'), DEEP.replace('"scale"', '"final"'),
     DEEP.replace('"a"', '"score"'), '{"score": 8, "scale": ' + HUGE + "}",
     '{"score": 8, "total": 1' + "0" * 400 + "}", '{"score": 8}\n' + HUGE,
     "{'score': " + HUGE + "}", "Score: " + HUGE,
     '{"score": 8, "a": ' + "[" * 990 + "]" * 990 + "}"],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_depth_and_size_never_kill_a_run(text: str) -> None:
    try:
        assert read(text) in (1.0, 8.0)
    except JudgeError as error:
        assert error.kind is Failure.UNPARSED


LEAVES = st.none() | st.booleans() | st.floats() | st.integers() | st.integers(10**300, 10**400)
KEYS = st.sampled_from(["score", "final", "scale", "max_score", "result", "total", "a", "penalty"])
NESTED = st.recursive(
    LEAVES | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(NESTED, st.integers(0, 300), st.booleans())
def test_any_nested_json_is_on_the_scale_or_refused(inner: Any, depth: int, listed: bool) -> None:
    left, right = ("[", "]") if listed else ('{"result":', "}")
    whole = left * depth + json.dumps(inner) + right * depth
    for text in (whole, f'{{"score": 8, "scale": {whole}}}', f'{{"score": 8, "final": {whole}}}'):
        try:
            assert 1.0 <= read(text) <= 10.0
        except JudgeError as error:
            assert error.kind is Failure.UNPARSED


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "hostile",
    ["{" * 100_000, '{"a":' * 50_000, "[{" * 50_000, "<think>" * 20_000, " x" * 100_000,
     "<think>" * 9000 + "</think>" * 9000, "a" + " " * 200_000 + "b", "|" * 100_000,
     '{"score":' + "9" * 50_000 + "}", "Score: " + "1" * 50_000, "{'score':" + "(" * 5000,
     "<score>" * 20_000, "Score: 8\n" * 5000, '{"score": 8}\n' * 400, "." * 100_000 + " ",
     '{"score": 8}' + "\n" * 100_000, '{"score": 8}\n' + "x: 8 " * 20_000,
     '{"score": 8}\n' + ":" * 100_000, "Score: 8\n" + "- 8\n" * 20_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_hostile_lengths_take_no_time(hostile: str) -> None:
    try:
        assert read(hostile) == 8
    except JudgeError as error:
        assert len(str(error)) < 500
