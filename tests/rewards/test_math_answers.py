"""The answers that graders get wrong, and plenty that they should get right."""

from __future__ import annotations

import pytest

from ppo_cli.rewards.algebra import decide
from ppo_cli.rewards.answers import extract_answer
from ppo_cli.rewards.rules import compare_algebra, score_math
from tests.rewards.tables import table

RIGHT = table(__file__, "right")
WRONG = table(__file__, "wrong")


HEDGES = table(__file__, "several values")
EMPTY_WORDS = table(__file__, "no value")


def test_right_answers_score_one_and_wrong_ones_zero() -> None:
    empty = [(rf"\boxed{{{answer}}}", "72") for answer in HEDGES + EMPTY_WORDS]
    cases = [(case, 1.0) for case in RIGHT] + [(case, 0.0) for case in WRONG + empty]
    wrong = []
    for (reply, gold), score in cases:
        result = score_math(reply, gold, {}) or compare_algebra(reply, gold, {})
        assert result is not None
        if result["score"] != score:
            wrong.append((reply, gold, result))
    assert wrong == []


@pytest.mark.parametrize(("reply", "answer"), table(__file__, "last mark"))
def test_the_last_mark_gives_its_whole_content(reply: str, answer: str | None) -> None:
    extraction = extract_answer(reply)
    assert extraction.text == answer
    assert bool(extraction.reason) == (answer is None)


def test_what_math_verify_would_guess_at_is_unreadable() -> None:
    for answer, fragment in table(__file__, "unreadable"):
        returned = compare_algebra(rf"\boxed{{{answer}}}", "x+1", {})
        assert (returned["score"], returned["extracted"]) == (0.0, answer)
        assert returned["reason"].startswith("unreadable: ") and fragment in returned["reason"]


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [("7", "7", True), ("1,000", "1000", True), ("8", "7", False), (None, "7", False),
     ("x" * 301, "y", False), ("y", "x" * 301, False), ("x" * 301, "x" * 301, True),
     ("x+" * 149 + "x", "y+" * 149 + "y", None), ("B", "C", False), ("(B) 12", "B", True),
     ("10,000", "10001", False), (r"\sqrt{4}", "2", None)],
)  # fmt: skip
def test_text_settles_what_it_can_and_leaves_algebra(
    answer: str | None, truth: str, verdict: bool | None
) -> None:
    assert decide(answer, truth) is verdict
