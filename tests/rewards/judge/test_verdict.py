"""Replies of judges count when they have the form that was asked for, and are never guessed at.

`verdicts.jsonl` holds rows `{"id", "asked": "json"|"text", "scale": [low, high], "reply",
"truncated", "right": number or null, "kind": "realistic"|"contrived", "note"}`, `right` being the
score that a careful reader would take; `unread` marks those that the strict rule does not read
all the same. Any other `*.jsonl` here is measured in the same way, without that mark; its
contrived rows with `only_meaning` have exactly the form that was asked for, and only what their
words mean ("What follows is false.") tells that the score does not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards.judge.calls import JudgeError, Output, Question, Reply, Scale, Usage
from ppo_cli.rewards.judge.verdict import build_reminder, read_answer
from ppo_cli.rewards.remote.failures import Failure

HERE = Path(__file__).parent
TEN = Scale(1, 10)
CAUSES = {"empty", "truncated", "thought", "form", "ambiguous", "out_of_range"}
CONTRIVED_WRONG = 0.02  # of contrived replies that form tells; of realistic ones none
ONLY_MEANING_READ = 43  # replies that no form tells; no more of them than today
Row = dict[str, Any]


class Findings(NamedTuple):
    """Rows that were read as a wrong number, and rows that were not read though they could be."""

    wrong: list[Row]
    needless: list[Row]


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_verdict(reply: Reply, scale: Scale, output: Output = "json") -> tuple[float, str]:
    return read_answer(reply, Question("", "", "", scale, output=output))[:2]


def read_row(row: Row) -> float | None:
    reply = Reply(row["reply"], Usage(5, 3), truncated=row["truncated"])
    try:
        return read_verdict(reply, Scale(*row["scale"]), row["asked"])[0]
    except JudgeError as error:
        assert error.kind is Failure.UNPARSED and error.cause in CAUSES, row["id"]
        assert (error.usage, error.reply) == (Usage(5, 3), row["reply"]), row["id"]
        return None


def assess(rows: Iterable[Row]) -> Findings:
    """Read every reply and compare it with what a careful reader takes."""
    found = Findings([], [])
    for row in rows:
        value = read_row(row)
        if value is not None and value != row["right"]:
            found.wrong.append(row | {"got": value})
        elif value is None and row["right"] is not None:
            found.needless.append(row)
    return found


def test_own_corpus() -> None:
    rows = rows_of(HERE / "verdicts.jsonl")
    found = assess(rows)
    assert found.wrong == []
    unread = {row["id"] for row in rows if row.get("unread")}
    assert {row["id"] for row in found.needless} ^ unread == set()
    assert len({row["id"] for row in rows}) == len(rows) > 800


@pytest.mark.parametrize("path", sorted(HERE.glob("*.jsonl")), ids=lambda path: path.name)
def test_any_corpus_keeps_the_bar(path: Path) -> None:
    rows = rows_of(path)
    found = assess(rows)
    contrived = [row for row in rows if row["kind"] == "contrived" and not row.get("only_meaning")]
    told = {row["id"] for row in contrived}
    wrong = [row for row in found.wrong if row["id"] in told]
    meant = [row["id"] for row in found.wrong if row.get("only_meaning")]
    print(
        f"{path.name}: {len(rows)} rows, silently wrong {len(found.wrong)}, by meaning {len(meant)}"
    )
    for row in (*found.wrong, *found.needless):
        print(row["id"], row["kind"], repr(row["reply"][-80:]), row["right"], row.get("got"))
    assert [row for row in found.wrong if row["kind"] == "realistic"] == []
    assert len(wrong) <= CONTRIVED_WRONG * len(contrived), wrong
    assert len(meant) <= ONLY_MEANING_READ, f"{len(meant)} rows of only_meaning are read: {meant}"


def read(text: str, output: Output = "json", scale: Scale = TEN, **kwargs: Any) -> float:
    return read_verdict(Reply(text, **kwargs), scale, output)[0]


def refused(text: str, output: Output = "json", **kwargs: Any) -> JudgeError:
    with pytest.raises(JudgeError) as caught:
        read(text, output, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("output", "text", "reason"),
    [
        ("json", '{"reason": "mostly right", "score": 8}', "mostly right"),
        ("json", '{"score": 8, "explanation": "clear"}', "clear"),
        ("text", "Reason: it skips a step\nScore: 8", "Reason: it skips a step"),
        ("text", "It skips a step.\n\n**Score:** 8", "It skips a step."),
        ("text", "8", ""),
    ],
)
def test_the_reason_is_the_judges_own_words(output: Output, text: str, reason: str) -> None:
    assert read_verdict(Reply(text), TEN, output) == (8.0, reason)


OTHER_SCORES = (
    "It is wrong, so the score must be 1.", "The score should therefore be a 3.", "Deserves 3/10.",
    "I'd give this a four.", "My rating: two out of ten.", "Half is missing, so 4.", "3/10.",
    "Final mark 3.", "Bewertung: 3 von 10.", "Note : 3 sur 10.", "Puntuación: 3 sobre 10.",
    "Оценка: 3 из 10.", "最终评分应为三分。", "我给三分。", "総合点は３点とする。",
    "Sc\u200bore: 3", "S\u0441ore: 3", "S c o r e : 3", "On a 0-100 scale.", "Out of 20 points.",
    "1 is best, 10 is worst.", "0 = perfect, 10 = useless.", "Severity, 10 being catastrophic.",
    "Lower scores are better here.", "All scores here are percentages.", "I rank it place 8 of 10.",
)  # fmt: skip
ONE_SCORE = (
    "It is written at a grade 8 level.", "The team won 3 to 2.", "Misses 2 of the 5 points.",
    "Covers three of the five points, so one is lost.", "I checked steps 1 to 3.",
    "It returns 1 = true, as asked.", "评分标准明确，十分清楚。",
    "On a scale of 1 to 10 it is good.", "The answer has 10 items.", "Deserves one more source.",
)  # fmt: skip


def test_a_reason_with_another_score_or_scale_voids_the_score() -> None:
    taken = set()
    for said in (*OTHER_SCORES, *ONE_SCORE):
        whole = json.dumps({"reason": said, "score": 8}), f"{said}\n\nScore: 8"
        for reply, output in zip(whole, ("json", "text"), strict=True):
            row = {"id": said, "reply": reply, "truncated": False, "scale": [1, 10]}
            if read_row(row | {"asked": output}) == 8:
                taken.add((said, output))
    assert taken == {(said, output) for said in ONE_SCORE for output in ("json", "text")}
    criteria = "Style 6/10. Facts 9/10."
    assert read(json.dumps({"reason": criteria, "score": 8})) == 8
    assert read(f"{criteria}\n\nOverall score: 8", "text") == 8


@pytest.mark.parametrize(
    ("text", "output", "cause"),
    [
        ("", "json", "empty"),
        ("1.", "text", "form"),
        ("Score: $8", "text", "form"),
        ('{"reason": "...", "score": 5}', "json", "form"),
        ('<think>It ends with "</think>\n\nScore: 10', "text", "thought"),
        ("<think>maybe 8", "json", "thought"),
        ("<cot>maybe</cot>8", "text", "thought"),
        ("Score: 8", "json", "form"),
        ('{"score": 8, "confidence": 1}', "json", "form"),
        ('{"score": 11}', "json", "out_of_range"),
        ("Score: 3.\nScore: 8", "text", "ambiguous"),
    ],
)
def test_the_cause_says_what_is_wrong(text: str, output: Output, cause: str) -> None:
    assert refused(text, output).cause == cause


def test_the_message_names_the_trouble_and_shows_a_short_excerpt() -> None:
    error = refused("blah " * 500 + '{"score": 8}')
    assert "it is not one JSON object and nothing else, in the judge's reply 'blah" in str(error)
    assert len(str(error)) < 300


def test_the_reminder_names_the_form_and_the_scale() -> None:
    asked = Question("", "", "", Scale(0, 5))
    assert (
        '{"reason": "...", "score_0_to_5": N}\nN is one whole number from 0 to 5'
        in build_reminder(asked)
    )
    asked = Question("", "", "", TEN, output="text")
    assert "\nScore: N\nN is one whole number from 1 to 10" in build_reminder(asked)


@pytest.mark.parametrize(
    ("scale", "key"),
    [(TEN, "score_1_to_10"), (Scale(0, 5), "score_0_to_5"), (Scale(-2, 2), "score_minus_2_to_2")],
)
def test_the_key_names_the_scale(scale: Scale, key: str) -> None:
    assert scale.key == key
    assert read_verdict(Reply(f'{{"reason": "So.", "{key}": 2}}'), scale)[0] == 2.0


@pytest.mark.parametrize(
    "text",
    [
        '{"reason": "So.", "score_1_to_100": 8}',
        '{"reason": "So.", "score_0_to_10": 8}',
        '{"reason": "So.", "rank": 8}',
        '{"reason": "So.", "score": 8, "score_1_to_10": 8}',
    ],
)
def test_a_score_under_another_name_does_not_count(text: str) -> None:
    assert refused(text).cause == "form"


# Decision mode

ONLY = dict.fromkeys(TEN.levels(), 0.0)


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ({1: 0.5, 10: 0.5}, 5.5),
        ({7: 1.0}, 7.0),
        ({7: 0.6, 8: 0.3, 9: 0.1}, 7.5),
        ({7: 0.59, 8: 0.3, 9: 0.1}, 7.505),
        ({10: 0.985}, 10.0),
        ({10: 1}, 10.0),
    ],
)
def test_probabilities_give_their_mean(probabilities: dict[int, float], expected: float) -> None:
    value, reason = read_verdict(Reply("", probabilities=ONLY | probabilities), TEN)
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
        ({7: 0.97}, "unparsed"),
        ({0: 0.5, 1: 0.5}, "out_of_range"),
        ({11: 1.0}, "out_of_range"),
    ],
)
def test_doubtful_probabilities_are_refused(probabilities: dict[int, float], cause: str) -> None:
    whole = ONLY | probabilities if probabilities else {}
    assert refused("", probabilities=whole).cause == cause


def test_a_level_without_a_probability_is_refused() -> None:
    assert refused("", probabilities=dict.fromkeys((1, 2), 0.5)).cause == "unparsed"


@given(st.lists(st.floats(0.001, 1.0), min_size=10, max_size=10))
def test_a_mean_never_leaves_the_scale(weights: list[float]) -> None:
    total = sum(weights)
    spread = {level: w / total for level, w in zip(TEN.levels(), weights, strict=True)}
    assert 1.0 <= read("", probabilities=spread) <= 10.0


# Replies by chance

OUTPUTS = st.sampled_from(["json", "text"])
TOKENS = st.sampled_from(
    [
        *("{", "}", "[", "]", '"', "'", "score", '"score"', ":", ",", "8", "3", "85", "/10", "\n"),
        *(" ", "Score: ", "Final score: ", "<think>", "</think>", "```", "json", "<score>"),
        *("</score>", "true", "null", "NaN", "-", ".", "reason", "|", "**", "(", ")", "满分", "分"),
        *("out of 10", '{"score": ', "{'score': "),
    ]
)


@given(st.text(max_size=300) | st.lists(TOKENS, max_size=30).map("".join), OUTPUTS)
def test_any_text_is_either_on_the_scale_or_refused(text: str, output: Output) -> None:
    try:
        assert 1.0 <= read(text, output) <= 10.0
    except JudgeError as error:
        assert error.kind is Failure.UNPARSED and error.cause in CAUSES


@given(reason=st.text(max_size=200), score=st.integers(1, 10), ascii_only=st.booleans())
def test_nothing_quoted_in_a_reason_can_change_the_score(
    reason: str, score: int, ascii_only: bool
) -> None:
    told = reason.replace('"', "")
    for text in (f"<think>{reason}", f'It says "{told} Final score: 10 {told}"'):
        reply = json.dumps({"reason": text, "score": score}, ensure_ascii=ascii_only)
        assert read(reply) == score


@given(st.integers(1, 10), st.integers(0, 60), OUTPUTS)
def test_a_cut_verdict_is_never_read(score: int, cut: int, output: Output) -> None:
    whole = json.dumps({"reason": "is long", "score": score})
    assert refused(whole[:cut], output, truncated=True).cause == "truncated"
    if cut < len(whole):
        assert refused(whole[:cut], output).cause in CAUSES


DEEP = '{"score":' + "[" * 50_000


@pytest.mark.timeout(300)
def test_hostile_lengths_take_no_time_and_never_kill_a_run() -> None:
    for text in (
        "{" * 20_000, '{"a":' * 10_000, "[{" * 10_000, "<think>" * 20_000, " x" * 20_000, DEEP,
        "<think>" * 4000 + "</think>" * 4000, "a" + " " * 40_000 + "b", "|" * 20_000,
        '{"score":' + "9" * 10_000 + "}", "Score: " + "1" * 10_000, "{'score':" + "(" * 5000,
        "<score>" * 20_000, "Score: 8\n" * 5000, '{"score": 8}\n' * 400, "." * 20_000 + " ",
        '{"score": 8}\n' + "x: 8 " * 20_000, '{"score": 8}\n' + ":" * 20_000,
        "“" * 20_000 + "\nScore: 8", "final" + " " * 20_000 + "\nScore: 8", "```\n" * 10_000,
        '{"reason": "' + "“" * 20_000 + '", "score": 8}', "scale " * 20_000 + "\nScore: 8",
        "." * 20_000 + "x\nScore: 8", '{"reason": "' + "I " * 10_000 + '", "score": 8}',
        "final: " * 20_000 + ".\nScore: 8", ". " * 10_000 + "Score: 8", "-\n" * 20_000 + "8",
    ):  # fmt: skip
        for output in ("json", "text"):
            try:
                assert read(text, output) == 8, text[:20]
            except JudgeError as error:
                assert len(str(error)) < 500
