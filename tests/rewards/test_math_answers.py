"""The answers that graders get wrong, and plenty that they should get right."""

from __future__ import annotations

import pytest

from ppo_cli.rewards.rules import compare_algebra, decide_quickly, find_answer, score_math

RIGHT = [
    (r"\boxed{\frac12}", "0.5"),
    (r"\boxed{\dfrac34}", "0.75"),
    (r"\boxed{50\%}", r"\frac{1}{2}"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{25\%}", "0.25"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{\sqrt{3+2\sqrt{2}}}", r"1+\sqrt2"),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{[1,2]}", "[1,2]"),
    (r"\boxed{\{3,1,2\}}", r"\{1,2,3\}"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"),
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{x^2-1}", "(x-1)(x+1)"),
    (r"\boxed{10,000}", "10000"),
    (r"\boxed{10000}", "10,000"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5 \text{ cm}^2}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\boxed{2^{100}}", "1267650600228229401496703205376"),
    (r"\boxed{1\le x<3}", "[1,3)"),
    (r"\boxed{[1,3)}", r"1\le x<3"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1½}", "1.5"),
    (r"\boxed{½}", "0.5"),
    ("\\boxed{−3}", "-3"),
    (r"\boxed{B}", "B"),
    (r"\boxed{(B)}", "B"),
    (r"\boxed{B}", "(B)"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{\text{(B) } 5}", "B"),
    ("so #### 7", "7"),
    (r"first \boxed{3} then \boxed{7}", "7"),
    ("４２", "42"),
    ("\\boxed{４２}", "42"),
    ("答案是42。", "42"),
    ("答案：42", "42"),
    (r"\boxed{x\le 2}", r"x \in (-\infty,2]"),
    (r"\boxed{(-\infty,2]}", r"x \in (-\infty,2]"),
    (r"\boxed{(-\infty,2]}", r"x\le 2"),
    ("\\boxed{x∈(−∞,2]}", r"(-\infty,2]"),
    (r"\boxed{e^{i\pi}}", "-1"),
    (r"\boxed{-1}", r"e^{i\pi}"),
    ("The answer is (B).", "B"),
    ("I think it is (B)", "B"),
    ("Answer: (C) 12", "C"),
    (r"\boxed{18}", r"\$18"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{1,2,3}", "1,2,3"),
    (r"\boxed{3,2,1}", "1,2,3"),
    (r"\boxed{3,4}", "4,3"),
    ("\\boxed{12:30}", "12:30"),
    (r"\boxed{\text{no solution}}", "no solution"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
    (r"unclosed \boxed{7", "7"),
    (r"\boxed{5} and \boxed{7", "5"),
    (r"so $x=\frac12$ .", r"\frac{1}{2}"),
    (r"$$x = \frac{3}{4}$$", "0.75"),
    ("The final answer is $\\frac{1}{2}$. I hope it is correct.", "0.5"),
    ("The answer is 42 apples.", "42"),
    ("The answer is below.\n#### 42", "42"),
    ("**Answer:** 7", "7"),
    (r"\boxed{0.3333333}", "1/3"),
    (r"<think>\boxed{3}</think> so \boxed{4}", "4"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{72.0}", "72"),
    (r"\boxed{1+2i}", "2i+1"),
    (r"\boxed{\pm 2}", "2,-2"),
    (r"\boxed{1.5\times10^3}", "1500"),
    (r"\boxed{(0,1)\cup(2,3)}", r"(2,3)\cup(0,1)"),
    ("\\boxed{2π}", r"2\pi"),
    ("\\boxed{√2}", r"\sqrt2"),
    (r"it costs $5 and then $18", "18"),
    (r"\boxed{7}", 7),
    (r"\boxed{7}", ["6", "7"]),
    (r"\boxed{7}", ["6", r"\sqrt{49}"]),
    (r"\boxed{7}", r"So we get \boxed{7}."),
]
WRONG = [
    (r"\boxed{(1,2)}", "[1,2]"),
    (r"\boxed{(3,4)}", "(4,3)"),
    (r"\boxed{C}", "B"),
    (r"first \boxed{3} then \boxed{7}", "3"),
    (r"\boxed{1.2}", "1,2,3"),
    (r"\boxed{0.33}", "1/3"),
    (r"\boxed{3.14159}", r"\pi"),
    (r"\boxed{2x+1}", "2y+1"),
    (r"\boxed{x<2}", r"x\le 2"),
    (r"\boxed{x^2}", "x^3"),
    (r"\boxed{2}", "[1,2]"),
    (r"\boxed{A}", "A,C"),
    (r"\boxed{}", "5"),
    ("The answer is 3 or 4", "4"),
    ("", "5"),
    ("no idea", "5"),
    (r"\boxed{" + "1+" * 400 + "1}", "401"),
]


HEDGES = ["72,73", r"72 \text{ or } 73", r"\{72,73\}", r"\pm 72", "[0,100]", "72; 73", "x>0"]
EMPTY_WORDS = [
    "",
    "?",
    "nan",
    "0/0",
    r"\infty-\infty",
    "x=x",
    r"\emptyset",
    r"\text{answer}",
    "0.72",
]


def test_right_answers_score_one_and_wrong_ones_zero() -> None:
    empty = [(rf"\boxed{{{answer}}}", "72") for answer in HEDGES + EMPTY_WORDS]
    wanted = [(case, 1.0) for case in RIGHT] + [(case, 0.0) for case in WRONG + empty]
    wrong = []
    for (reply, gold), score in wanted:
        found = score_math(reply, gold, {}) or compare_algebra(reply, gold, {})
        assert found is not None
        if found["score"] != score:
            wrong.append((reply, gold, found))
    assert wrong == []


@pytest.mark.parametrize(
    ("reply", "gold", "found"),
    [
        (r"\boxed{3} hence the answer is 4", "4", "3"),
        ("#### 3\nThe answer is 4.", "4", "4"),
        ("The answer is 4.\n#### 3", "4", "3"),
        ("The answer is x = 7", "7", "x = 7"),
        ("we get 12, so (C)", "C", "C"),
        ("nothing here", "7", None),
        ("The answer is about 42 apples.", "42", "42"),
        ("The answer is the red house.", "the red house", "the red house"),
        ("The answer is 3 or 4 apples.", "3", "3 or 4 apples"),
        ("The answer is B. 12", "B", "B"),
        ("we get $y+1$ in 3 steps", "y+1", "y+1"),
        ("we get $y+1$ in 3 steps", "3", "3"),
        ("we get $y=5$ in the end", "5", "5"),
        ("we get 3, or rather $5$", "5", "5"),
        ("we get $y+1$ in 3 steps", None, "y+1"),
        ("first (A), then 12", ["A", "B"], "A"),
        ("first (A), then 12", ["A", "12"], "12"),
    ],
)
def test_find_answer_takes_the_plainest_mark(reply: str, gold: str, found: str | None) -> None:
    assert find_answer(reply, gold) == found


def test_text_settles_what_it_can_and_leaves_algebra() -> None:
    assert decide_quickly("7", "7") is True
    assert decide_quickly("1,000", "1000") is True
    assert decide_quickly("8", "7") is False
    assert decide_quickly(None, "7") is False
    assert decide_quickly("x" * 301, "y") is False
    assert decide_quickly("y", "x" * 301) is False
    assert decide_quickly("x" * 300, "y" * 300) is None
    assert decide_quickly("x" * 301, "x" * 301) is True
    assert decide_quickly("B", "C") is False
    assert decide_quickly("(B) 12", "B") is True
    assert decide_quickly("10,000", "10001") is False
    assert decide_quickly(r"\frac{1}{2}", "0.5") is None
