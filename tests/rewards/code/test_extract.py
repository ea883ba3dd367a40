"""Which part of a response is the code, and what is tried to make a program of it."""

from __future__ import annotations

import time
import timeit
from contextlib import suppress
from functools import partial

import pytest

from ppo_cli.rewards.code.extract import defines, find_code, list_attempts
from tests.rewards.tables import table

FENCE = "```"
PROMPT = 'import math\n\ndef solve(n):\n    """Square."""\n'


def fenced(code: str, language: str = "python") -> str:
    return f"{FENCE}{language}\n{code}\n{FENCE}"


@pytest.mark.parametrize(("text", "code"), table(__file__, "find_code"))
def test_the_code_of_a_response(text: str, code: str) -> None:
    assert find_code(text) == code


@pytest.mark.slow
def test_long_lines_take_time_in_proportion_to_their_length() -> None:
    slow = []
    for unit in table(__file__, "units"):
        times = [
            min(timeit.repeat(partial(find_code, unit * (length // len(unit))), number=1, repeat=3,
                              timer=time.process_time))
            for length in (20_000, 320_000)
        ]  # fmt: skip
        # 16 times as long; were it by the square, 256.
        if times[1] > 150 * max(times[0], 0.001):
            slow.append((unit, times))
    assert slow == []


def test_the_block_that_defines_the_function_wins() -> None:
    text = f"{fenced('def solve(n): return 1')}\nUse it so:\n{fenced('print(solve(3))')}"
    assert find_code(text, "solve") == "def solve(n): return 1"
    assert find_code(text, "other") == "print(solve(3))"


@pytest.mark.parametrize(("code", "answer"), table(__file__, "defines"))
def test_defines(code: str, answer: bool) -> None:
    assert defines(code, "solve") is answer


def test_a_whole_function_stands_alone() -> None:
    assert list_attempts("def solve(n): return n", PROMPT, "solve") == ["def solve(n): return n"]


BODIES = (
    "    return n * n",
    "return n * n",
    "    return n * n\n\nprint(1)\nThat is it!",
    "x = n\n    ",
)


@pytest.mark.parametrize("body", BODIES)
def test_a_body_goes_on_where_the_prompt_stops(body: str) -> None:
    for attempt in list_attempts(body, PROMPT, "solve"):
        with suppress(SyntaxError):
            compile(attempt, "x", "exec")
            assert attempt.startswith(PROMPT.rstrip())
            return
    pytest.fail("no attempt is Python")


def test_the_first_line_may_have_lost_its_indent() -> None:
    attempts = list_attempts("x = n\n    return x", PROMPT, "solve")
    assert f"{PROMPT}    x = n\n    return x" in attempts
