"""Finding and reading answers in text."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.rewards import answers, values
from tests.rewards.tables import table


def last_box(text: str) -> str | None:
    boxes = answers.list_boxes(text)
    return boxes[-1][1] if boxes else None


def read_number(text: str) -> Fraction | None:
    quantity = values.read_quantity(text)
    return None if quantity is None or quantity.unit not in ("", "$", "€", "£") else quantity.value


READERS: tuple[Callable[[str], object], ...] = (
    last_box, answers.find_after_hashes, read_number, answers.read_leading_choice,
    answers.find_closing_expression, answers.read_choice,
)  # fmt: skip


def test_what_is_found_in_a_text() -> None:
    wrong = []
    for read in READERS:
        for text, expected in table(__file__, read.__name__):
            exact = Fraction(expected) if read is read_number and expected else expected
            if read(text) != exact:
                wrong.append((read.__name__, text, read(text), exact))
    assert wrong == []
    assert read_number("9" * 5000) is None


@given(st.integers(-(10**12), 10**12))
def test_thousands_and_trailing_zeros_do_not_matter(number: int) -> None:
    assert read_number(f"{number:,}.00") == number


@given(st.text())
def test_nothing_raises_on_any_text(text: str) -> None:
    others = (values.normalise_maths, values.normalise_words, values.repetition)
    for look in (*READERS, *others, answers.extract_answer):
        look(text)


def test_contains_answer() -> None:
    for text, answer, present in table(__file__, "contains"):
        assert values.contains_answer(text, answer) is present, text


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert values.repetition("one two three four five six") == 0
    assert values.repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert values.repetition("too short") == 0


QUANTITIES = table(__file__, "quantities")


def test_quantities_are_equal_by_value_and_unit() -> None:
    wrong = []
    for first, other, equal in QUANTITIES:
        pair = values.read_quantity(first), values.read_quantity(other)
        assert pair[0] is not None and pair[1] is not None, (first, other)
        if values.same_quantity(pair[0], pair[1]) is not equal:
            wrong.append((first, other))
    assert wrong == []


def test_a_comma_divides_decimals_only_where_it_is_asked_for() -> None:
    read = values.read_quantity("2,74", decimal_comma=True)
    assert read is not None and read.value == Fraction("2.74")


PIECES = (
    "\\boxed{", "{", "(", "$", "$$", "\\[", "\\(", "<answer>", "9", "1,", "1 ", "#### ",
    "answer is ", "the answer is 5 ", "Answer: A ", "\\text{", "答案是", "选B", "(A) ", "A ", "= ",
    "is the answer ", "\\boxed{1} and ", " and ", "\n", " ", "²", "\\", "not ", "**",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    text = (piece * 30_000)[:30_000]
    started = time.process_time()
    for form in ("{}", "The answer is {}", "<answer>{}</answer>"):
        answers.extract_answer(form.format(text))
        answers.extract_answer(form.format(text), choice=True)
    values.normalise_maths(text)
    values.contains_answer(text, "72")
    # Quadratic work on this text takes more than ten seconds.
    assert time.process_time() - started < 4
