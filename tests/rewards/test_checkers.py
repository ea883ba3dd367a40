"""Finding and reading answers in text."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards import rules

FOUND: dict[Callable[[str], object], list[tuple[str, object]]] = {
    rules.find_boxed: [
        (r"so \boxed{7}", "7"),
        (r"\boxed{3} no, \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and \boxed{7", "5"),
        (r"\boxed{a\}}", r"a\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"} \boxed{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed 3.", "3"),
        (r"\boxed{", None),
        ("boxed{3}", None),
        ("", None),
    ],
    rules.find_after_hashes: [
        ("a + b\n#### 72", "72"),
        ("#### 71\nno:\n#### 72", "72"),
        ("#### $1,200.", "1,200"),
        ("#### 72 clips", "72"),
        ("####72", "72"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),
        ("#### ７２", "72"),
        ("#### **72**", "72"),
        ("#### 50%", "50%"),
        ("#### 1/2", "1/2"),
        ("#### 3.50", "3.50"),
        ("#### 72" + " x" * 200, None),
        ("### 72", None),
        ("#### seventy", None),
        ("72", None),
    ],
    rules.find_last_number: [
        ("12 + 30 = 42", "42"),
        ("12 - 5", "5"),
        ("12-5", "5"),
        ("it is -5", "-5"),
        ("=-5", "-5"),
        ("4.2", "4.2"),
        ("It is 42.", "42"),
        ("3,4", "4"),
        ("10,000,000 in all", "10,000,000"),
        ("$1,234.50 total", "$1,234.50"),
        ("half is 1/2", "1/2"),
        ("none", None),
        ("", None),
    ],
    rules.read_number: [
        ("72", 72),
        ("72.0", 72),
        ("72.", 72),
        (" $1,234.50 ", Fraction("1234.5")),
        ("\\$5", 5),
        ("50%", 50),
        ("50\\%", 50),
        ("1/2", Fraction(1, 2)),
        ("½", Fraction(1, 2)),
        ("- 3", -3),
        ("−3", -3),
        ("+7", 7),
        (".5", Fraction(1, 2)),
        ("１２", 12),
        ("1,2,3", None),
        ("1 2", None),
        ("1½", None),
        ("5/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("nan", None),
        ("abc", None),
        ("", None),
    ],
    rules.find_choice: [
        ("I like A. So (C)", "C"),
        ("The answer: B", "B"),
        ("(D) because B is wrong", "D"),
        ("A cat", None),
        ("I think so", None),
        ("BAD", None),
        ("It is A", "A"),
    ],
    rules.read_choice: [
        (text, "B") for text in ("B", "(b)", "[B]", "B.", r"\text{B}", r"\text{(B)}", " $B$ ")
    ],
}


def test_what_is_found_in_a_text() -> None:
    wrong = [
        (find.__name__, text, find(text), wanted)
        for find, cases in FOUND.items()
        for text, wanted in cases
        if find(text) != wanted
    ]
    assert wrong == []


@given(st.integers(-(10**12), 10**12))
def test_thousands_and_trailing_zeros_do_not_matter(number: int) -> None:
    assert rules.read_number(f"{number:,}.00") == number


@given(st.text())
def test_nothing_raises_on_any_text(text: str) -> None:
    others = (rules.normalise_maths, rules.normalise_words)
    for look in (*FOUND, *others, rules.repetition):
        look(text)


def test_contains_answer() -> None:
    for text, answer, found in (
        ("The capital is Paris.", "paris", True),
        ("Parisian", "Paris", False),
        ("1420", "42", False),
        ("4.2", "4", False),
        ("It is 3.5.", "5", False),
        ("It is 4.", "4", True),
        ("首都是北京。", "北京", True),
        ("New   York\ncity", "new york", True),
        ("a+b", "a+b", True),
        ("x", "", False),
    ):
        assert rules.contains_answer(text, answer) is found, text


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert rules.repetition("one two three four five six") == 0
    assert rules.repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert rules.repetition("too short") == 0


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "{", "9", "1,", "#### ", "answer is ", r"\text{", "("]
)
def test_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    text = piece * 20_000
    started = time.process_time()
    rules.find_boxed(text)
    rules.find_after_hashes(text)
    rules.find_last_number(text)
    rules.normalise_maths(text)
    # Quadratic work on this text takes minutes.
    assert time.process_time() - started < 20
