"""Finding and reading answers in text."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards import answers, values


def last_box(text: str) -> str | None:
    boxes = answers.list_boxes(text)
    return boxes[-1][1] if boxes else None


def read_number(text: str) -> Fraction | None:
    quantity = values.read_quantity(text)
    return None if quantity is None or quantity.unit not in ("", "$", "€", "£") else quantity.value


FOUND: dict[Callable[[str], object], list[tuple[str, object]]] = {
    last_box: [
        (r"so \boxed{7}", "7"),
        (r"\boxed{3} no, \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and \boxed{7", "5"),
        (r"\boxed{a\}}", r"a\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"$\boxed{1}$ and $y = \boxed{2}$", "1, 2"),
        (r"\boxed{1} no no no no no \boxed{2}", "2"),
        (r"} \boxed{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed 3.", "3"),
        (r"\boxed{", None),
        ("boxed{3}", None),
        ("", None),
    ],
    answers.find_after_hashes: [
        ("a + b\n#### 72", "72"),
        ("#### 71\nno:\n#### 72", "72"),
        ("#### $1,200.", "$1,200"),
        ("#### 72 clips", "72 clips"),
        ("####72", "72"),
        ("#### **72**", "72"),
        ("#### 5 or 6", "5 or 6"),
        ("### 72", None),
        ("72", None),
    ],
    read_number: [
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
        ("1½", Fraction(3, 2)),
        ("1 000", 1000),
        (r"1\,000", 1000),
        (r"11,\! 111,\! 100", 11_111_100),
        ("1,00,000", 100_000),
        ("1.234,5", Fraction("1234.5")),
        ("0,111", Fraction("0.111")),
        ("1e-05", Fraction(1, 100_000)),
        ("1e+16", 10**16),
        (r"1.2\times10^{-3}", Fraction("0.0012")),
        ("1.2 × 10⁻³", Fraction("0.0012")),
        ("10^{-3}", Fraction(1, 1000)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"1\frac12", Fraction(3, 2)),
        (r"0.\overline{3}", Fraction(1, 3)),
        ("$1.5 million", 1_500_000),
        ("3万", 30_000),
        ("32, 349", None),
        ("2,74", None),
        ("3t", None),
        ("5!", None),
        ("204_5", None),
        ("5/0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
        ("nan", None),
        ("abc", None),
        ("", None),
    ],
    answers.read_leading_choice: [
        ("(D) because B is wrong", "D"),
        ("B. 12", "B"),
        ("**C**, as the mass is constant", "C"),
        ("option (b)", "B"),
        ("A, I think", "A"),
        ("A or B", None),
        ("A, B and C", None),
        ("A cat", None),
        ("E = mc^2", None),
        ("B cells", None),
    ],
    answers.find_closing_expression: [
        ("12 + 30 = 42", "12 + 30 = 42"),
        ("It is 42.", "42"),
        ("it is -5", "-5"),
        ("So she has 18 eggs left.", "18 eggs left"),
        ("Hence x = 2\\sqrt{3}", "x = 2\\sqrt{3}"),
        ("the point is (2, 3)", "(2, 3)"),
        ("\\[\n x = 5 \n\\]", "x = 5"),
        ("30% of 50 = 15", "15"),
        ("It is 3 or 4", "3 or 4"),
        ("I like 5", None),
        ("It is not 5", None),
        ("Is it 5?", None),
        ("AZYUK2A", None),
        ("between 3 and 5", None),
        ("Since $a=3$ and $b=4$, we stop", None),
        ("none", None),
        ("", None),
    ],
    answers.read_choice: [
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
    assert read_number(f"{number:,}.00") == number


@given(st.text())
def test_nothing_raises_on_any_text(text: str) -> None:
    others = (values.normalise_maths, values.normalise_words, values.repetition)
    for look in (*FOUND, *others, answers.extract_answer):
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
        ("It costs 1,000 dollars", "1000", True),
        ("It is 5.0", "5", True),
        ("1/2", "2", False),
        ("-5", "5", False),
        ("x", "", False),
    ):
        assert values.contains_answer(text, answer) is found, text


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert values.repetition("one two three four five six") == 0
    assert values.repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert values.repetition("too short") == 0


QUANTITIES = [
    ("5 cm", "5", True),
    ("5", r"5\text{ cm}", True),
    ("100 cm", "1 m", True),
    ("50 mph", "50 miles per hour", True),
    ("$0.50", "50 cents", True),
    ("5 km", "5 m", False),
    ("$5", "€5", False),
    ("50%", "50", True),
    (r"50\%", "0.5", True),
    ("0.5%", "50%", False),
    ("0.3333333", "1/3", True),
    ("0.33", "1/3", False),
    ("1e-7", "2e-7", False),
    ("0.30000000000000004", "0.3", True),
    ("10000000001", "10000000000", False),
    ("0.0000001", "0", False),
]


def test_quantities_are_equal_by_value_and_unit() -> None:
    wrong = []
    for one, other, equal in QUANTITIES:
        pair = values.read_quantity(one), values.read_quantity(other)
        assert pair[0] is not None and pair[1] is not None, (one, other)
        if values.same_quantity(pair[0], pair[1]) is not equal:
            wrong.append((one, other))
    assert wrong == []


def test_a_comma_divides_decimals_only_where_it_is_asked_for() -> None:
    read = values.read_quantity("2,74", decimal_comma=True)
    assert read is not None and read.value == Fraction("2.74")


PIECES = (
    *("\\boxed{", "{", "(", "$", "$$", "\\[", "\\(", "<answer>", "9", "1,", "1 ", "#### "),
    *(
        "answer is ",
        "the answer is 5 ",
        "Answer: A ",
        "\\text{",
        "答案是",
        "选B",
        "(A) ",
        "A ",
        "= ",
    ),
    *("is the answer ", "\\boxed{1} and ", " and ", "\n", " ", "²", "\\", "not ", "**"),
)


@pytest.mark.parametrize("piece", PIECES)
def test_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    text = (piece * 100_000)[:100_000]
    started = time.process_time()
    for form in ("{}", "The answer is {}", "<answer>{}</answer>"):
        answers.extract_answer(form.format(text))
        answers.extract_answer(form.format(text), choice=True)
    values.normalise_maths(text)
    values.contains_answer(text, "72")
    # Quadratic work on this text takes minutes.
    assert time.process_time() - started < 8
