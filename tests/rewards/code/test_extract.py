"""Which part of a response is the code, and what is tried to make a program of it."""

from __future__ import annotations

import time

import pytest

from ppo_cli.rewards.code.extract import defines, find_code, list_attempts

FENCE = "```"
PROMPT = 'import math\n\ndef solve(n):\n    """Square."""\n'


def fenced(code: str, language: str = "python") -> str:
    return f"{FENCE}{language}\n{code}\n{FENCE}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("    return n\n", "    return n"),
        (f"Here:\n{fenced('x = 1')}\nDone.", "x = 1"),
        (fenced("x = 1", "py"), "x = 1"),
        (fenced("x = 1", "Python3 title=a"), "x = 1"),
        (fenced("x = 1", ""), "x = 1"),
        (f"{fenced('x = 1')}\nand\n{fenced('x = 2')}", "x = 2"),
        (f"{fenced('x = 1', 'Python')}\n{fenced('ls', 'bash')}", "x = 1"),
        (f"{FENCE}python\nx = 1", "x = 1"),
        ("~~~\nx = 1\n~~~", "x = 1"),
        (f"````python\ns = '''\n{FENCE}\n'''\n````", f"s = '''\n{FENCE}\n'''"),
        (f"<think>{fenced('x = 1')}</think>\n{fenced('x = 2')}", "x = 2"),
        (f"<think>x = 0</think>{fenced('x = 1')}", "x = 1"),
        ("So:\n<answer>\nx = 1\n</answer> Done.", "x = 1"),
        ("<answer>x = 1</answer>", "x = 1"),
        (f"{fenced('x = 0')}\n<answer>\n{fenced('x = 1')}\n</answer>", "x = 1"),
        (f"<answer>\n{fenced('x = 1')}\n</answer>\n{fenced('x = 0')}", "x = 1"),
        (f"<answer>{FENCE}python\nx = 1\n{FENCE}</answer>", "x = 1"),
        (f"<answer>\n{FENCE}python\nx = 1\n{FENCE}</answer>", "x = 1"),
        (f"<answer>\n{FENCE}python\nx = 1\n</answer>", "x = 1"),
        ("<answer>x = 0</answer> No: <answer>x = 1</answer>", "x = 1"),
        ("<think><answer>x = 0</answer></think><answer>x = 1</answer>", "x = 1"),
        (fenced("print('<answer>5</answer>')"), "print('<answer>5</answer>')"),
        ("<answer> </answer>", ""),
        (f"<answer>\n{fenced('x = 1')}", "x = 1"),
        (fenced("x = 1\ny = 2").replace("\n", "\r\n"), "x = 1\ny = 2"),
        ("x = 1\r\ny = 2\r\n", "x = 1\ny = 2"),
        (fenced("x = 1\ny = 2").replace("\n", "\r"), "x = 1\ny = 2"),
        (fenced(""), ""),
        ("", ""),
    ],
)
def test_the_code_of_a_response(text: str, code: str) -> None:
    assert find_code(text) == code


def test_long_lines_take_time_in_proportion_to_their_length() -> None:
    slow = []
    for unit in (
        "`",
        "```",
        f"{' ' * 30}{FENCE}",
        f"{FENCE} ",
        f"{FENCE}\n",
        "~",
        " ",
        "\n~~~~ ",
        "<answer>",
        "</answer>",
        f"{FENCE}\n<answer>\n</answer>",
    ):
        taken = []
        for length in (20_000, 320_000):
            text = unit * (length // len(unit))
            turns = []
            for _ in range(3):
                start = time.process_time()
                find_code(text)
                turns.append(time.process_time() - start)
            taken.append(min(turns))
        # 16 times as long; were it by the square, 256.
        if taken[1] > 150 * max(taken[0], 0.001):
            slow.append((unit, taken))
    assert slow == []


def test_the_block_that_defines_the_function_wins() -> None:
    text = f"{fenced('def solve(n): return 1')}\nUse it so:\n{fenced('print(solve(3))')}"
    assert find_code(text, "solve") == "def solve(n): return 1"
    assert find_code(text, "other") == "print(solve(3))"


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("def solve(n): ...", True),
        ("async  def solve(n): ...", True),
        ("class solve: ...", True),
        ("class A:\n    def solve(self): ...", True),
        ("solve = lambda n: n", True),
        ("solve: object = 1", True),
        ("solve == 1", False),
        ("solver = 1", False),
        ("def solved(n): ...", False),
        ("print(solve(1))", False),
    ],
)
def test_defines(code: str, answer: bool) -> None:
    assert defines(code, "solve") is answer


def test_a_whole_function_stands_alone() -> None:
    assert list_attempts("def solve(n): return n", PROMPT, "solve") == ["def solve(n): return n"]


@pytest.mark.parametrize(
    "body",
    [
        "    return n * n",
        "return n * n",
        "    return n * n\n\nprint(1)\nThat is it!",
        "x = n\n    ",
    ],
)
def test_a_body_goes_on_where_the_prompt_stops(body: str) -> None:
    for attempt in list_attempts(body, PROMPT, "solve"):
        try:
            compile(attempt, "x", "exec")
        except SyntaxError:
            continue
        assert attempt.startswith(PROMPT.rstrip())
        break
    else:
        pytest.fail("no attempt is Python")


def test_the_first_line_may_have_lost_its_indent() -> None:
    attempts = list_attempts("x = n\n    return x", PROMPT, "solve")
    assert f"{PROMPT}    x = n\n    return x" in attempts
