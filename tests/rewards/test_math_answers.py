"""The answers that graders get wrong, and plenty that they should get right."""

from __future__ import annotations

import pytest

from ppo_cli.rewards.algebra import decide
from ppo_cli.rewards.answers import extract_answer
from ppo_cli.rewards.rules import compare_algebra, score_math

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
    (r"<think>a</think><answer>\frac{1}{2}</answer>", "0.5"),
    (r"<answer>The answer is $x = 5$.</answer>", "5"),
    (r"<answer>Tuesday</answer>", "tuesday"),
    ("<answer>.5</answer>", "0.5"),
    ("So $x = .5$", "0.5"),
    ("<answer>5 = x</answer>", "5"),
    ("We conclude $k \\le 8$.", r"k \leq 8"),
    (r"\boxed{1, 2, \ldots, 10}", r"1,2,\dots,10"),
    (r"\boxed{\{1, 2, \cdots, 10\}}", r"\{1, 2, ..., 10\}"),
    (r"\boxed{(1,234)}", "(1, 234)"),
    (r"The answer is \frac{10}{9}", "10/9"),
    ("Thus $x <= 2$ is our answer.", r"x \leq 2"),
    ("Hence x = 2\\sqrt{3}", r"2\sqrt{3}"),
    ("The solutions are $x=2$ and $x=3$.", "2,3"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1,2"),
    (r"\boxed{x<1 \text{ or } x>2}", r"(-\infty,1)\cup(2,\infty)"),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", "x<1 or x>2"),
    (r"\boxed{\{x \mid x > 2\}}", r"(2,\infty)"),
    (r"\boxed{1, 2, \dots, n}", r"1,2,\dots,n"),
    (r"\boxed{y=-\frac{1}{2}x+\frac{3}{4}}", "2x+4y-3=0"),
    (r"\boxed{1.2 \times 10^{-3}}", "0.0012"),
    (r"\boxed{5}", r"5 \mathrm{~cm}"),
    (r"\boxed{10\sqrt{2}\text{ m}}", r"10\sqrt2"),
    (r"\boxed{0.\overline{3}}", r"\frac13"),
    (r"\boxed{3:4}", r"\frac{3}{4}"),
    (r"\boxed{0.5x}", r"\frac{x}{2}"),
    (r"\boxed{0.00001}", 1e-05),
    (r"\boxed{7}", 7.0),
    ("答えは $\\sqrt{2}$ です。", r"\sqrt{2}"),
    ("答案是x=3或x=4", "3,4"),
    ("Final Answer: The largest $n$ is 34.", "34"),
    ("Answer: (C) 12", "C"),
    (r"\boxed{18}", r"\$18"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{1,2,3}", "1,2,3"),
    (r"\boxed{3,2,1}", "1,2,3"),
    (r"\boxed{3,4}", "4,3"),
    ("\\boxed{12:30}", "12:30"),
    (r"\boxed{\text{no solution}}", "no solution"),
    (r"\boxed{\text{Evelyn}}", "Evelyn"),
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
    (r"unclosed \boxed{7", "7"),
    ("it costs $5 and then $18", "18"),
    ("Hence x = 2\\sqrt{3}", "3"),
    ("So we get x^2 + 1", "1"),
    ("72 or 73", "73"),
    ("AZYUK2A", "2"),
    (r"<answer>\frac{1}{2}</answer>", "2"),
    (r"<answer>5", "5"),
    (r"\boxed{1}, \boxed{2}", "2"),
    (r"\boxed{x=1 or x=2}", "2"),
    (r"\boxed{x^2-2x=0}", "0"),
    (r"\boxed{2x+4=10}", "10"),
    (r"\boxed{x^2=4x}", "4x"),
    (r"Recall that $\sin 30 = 0.5$ is used above", "0.5"),
    (r"\boxed{3t}", "3"),
    (r"\boxed{3 4}", "7"),
    (r"\boxed{1 2}", "12"),
    (r"\boxed{12:30}", r"\frac{2}{5}"),
    (r"\boxed{2\mathrm{e}}", "2"),
    (r"\boxed{204_6}", "204_5"),
    (r"\boxed{2,1}", "(1,2)"),
    (r"\boxed{\{1,2\}}", "(1,2)"),
    (r"\boxed{1,2,\dots,10}", "1,2,10"),
    (r"\boxed{1,2,\ldots,10}", r"1,2,\dots,n"),
    (r"\boxed{1,3,\ldots,9}", r"1,2,\dots,9"),
    ("<answer>.5</answer>", "5"),
    ("The answer is .25.", "25"),
    ("<answer>5π</answer>", "5"),
    ("<answer>0.333...</answer>", "0.333"),
    (r"\boxed{10,000}", "(10, 0)"),
    (r"\boxed{(1,234)}", "1234"),
    ("so $-x = 5$", "5"),
    ("so x + y = 5 and xy = 6", "6"),
    (r"\boxed{5} is wrong.", "5"),
    (r"$\boxed{\frac{1}{2}}$ is not right", "0.5"),
    ("1. Add.\n2. Multiply.\n3.", "3"),
    ("Some say the answer is 5, but it is 6.", "5"),
    (r"\boxed{x>2}", "x<1 or x>2"),
    (r"\boxed{10^{-7}}", r"2\times10^{-7}"),
    (r"\boxed{1/2004!}", "1/2006!"),
    (r"\boxed{1+10^{-20}}", "1"),
    (r"\boxed{5\text{ km}}", r"5\text{ m}"),
    (r"\boxed{x^2+1 \text{ for } x>0}", "x^2+1"),
    ("We have $a=3$ and $b=4$, so the triangle is right.", "4"),
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
    ("reply", "answer"),
    [
        ("#### 3\nThe answer is 4.", "4"),
        ("The answer is 4.\n#### 3", "3"),
        (r"\boxed{3}. This answer is consistent with the data.", "3"),
        (r"The answer is 3. Or rather \boxed{4}.", "4"),
        ("#### Step 2\nThe answer is 4.\n#### Remarks", "4"),
        ("The answer is x = 7", "x = 7"),
        ("nothing here", None),
        ("The answer is about 42 apples.", "42 apples"),
        ("The answer is the red house.", "the red house"),
        ("The answer is 3 or 4 apples.", "3 or 4"),
        ("The answer is 5, because 3 + 2 = 5.", "5"),
        ("The answer is not 5.", None),
        ("The wrong answer is 5.", None),
        ("### Final Answer\n\n12", "12"),
        ("Die Antwort lautet 42.", "42"),
        ("La réponse est 42.", "42"),
        ("La respuesta es 42.", "42"),
        ("정답은 42입니다.", "42"),
        ("答案：４２", "42"),
        ("正解は42です。", "42"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("we get $y=5$ in the end", "y=5"),
        ("we get $y+1$ in 3 steps", None),
    ],
)
def test_the_last_mark_gives_its_whole_content(reply: str, answer: str | None) -> None:
    extraction = extract_answer(reply)
    assert extraction.text == answer
    assert bool(extraction.reason) == (answer is None)


def test_what_math_verify_would_guess_at_is_unreadable() -> None:
    for answer, words in (
        (r"1, 2, \dots, 10", "a list with dots"),
        ("3 4", "numbers without an operator"),
        ("12:30", "a time of day"),
        (r"x^2 \text{ for } x>0", "words within an expression"),
        ("x^2 + 2x = 0", "an equation, not a value"),
        (r"\begin{cases}1\\2\end{cases}", "within an expression"),
    ):
        returned = compare_algebra(rf"\boxed{{{answer}}}", "x+1", {})
        assert (returned["score"], returned["extracted"]) == (0.0, answer)
        assert returned["reason"].startswith("unreadable: ") and words in returned["reason"]


def test_text_settles_what_it_can_and_leaves_algebra() -> None:
    assert decide("7", "7") is True
    assert decide("1,000", "1000") is True
    assert decide("8", "7") is False
    assert decide(None, "7") is False
    assert decide("x" * 301, "y") is False
    assert decide("y", "x" * 301) is False
    assert decide("x+" * 149 + "x", "y+" * 149 + "y") is None
    assert decide("x" * 301, "x" * 301) is True
    assert decide("B", "C") is False
    assert decide("(B) 12", "B") is True
    assert decide("10,000", "10001") is False
    assert decide(r"\sqrt{4}", "2") is None
