"""Every form of tests, what it counts, and what is told of a response that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ppo_cli.records import Score
from ppo_cli.rewards.code.sandboxes import Sandbox
from tests.rewards.tables import table

RunCode = Callable[..., Score]
# Rows of `right`: name, code, row, tests; of `wrong`: name, code, row, (passed, tests), reason.
RIGHT = table(__file__, "right")


def run_all(run: RunCode, cases: Sequence[tuple[str, Any]], **settings: Any) -> list[Score]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: run(*case, **settings), cases))


def counts_of(score: Score) -> tuple[int, int]:
    return score.info["passed"], score.info["total"]


@pytest.mark.usefixtures("no_trace")
@pytest.mark.parametrize(
    "right", [RIGHT[::4], pytest.param(RIGHT, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_right_answers(right: list[Any], run_code: RunCode) -> None:
    scores = run_all(run_code, [(code, truth) for _, code, truth, _ in right])
    wrong = [
        (name, score)
        for (name, _, _, total), score in zip(right, scores, strict=True)
        if (score.value, score.failure, score.reason) != (1.0, "", "")
        or counts_of(score) != (total, total)
    ]
    assert wrong == []


WRONG = table(__file__, "wrong")


def test_wrong_answers(run_code: RunCode) -> None:
    scores = run_all(run_code, [(code, truth) for _, code, truth, *_ in WRONG], score="share")
    wrong = [
        (name, score)
        for (name, _, _, counts, reason), score in zip(WRONG, scores, strict=True)
        if (score.value, score.failure) != (counts[0] / max(counts[1], 1), "")
        or counts_of(score) != tuple(counts)
        or reason not in score.reason
    ]
    assert wrong == []
    _, code, truth, counts, _ = WRONG[0]
    strict = run_code(code, truth)
    assert (strict.value, strict.failure, counts_of(strict)) == (0.0, "", tuple(counts))


FAULTS = table(__file__, "faults")


def test_faults_of_the_row_are_failures(run_code: RunCode) -> None:
    scores = run_all(run_code, [("def f(n): return n", truth) for truth, _ in FAULTS])
    wrong = [
        (reason, score)
        for (_, reason), score in zip(FAULTS, scores, strict=True)
        if score.value is not None or reason not in score.failure
    ]
    assert wrong == []


def test_a_response_computes_nothing_for_the_tests(run_code: RunCode) -> None:
    """What the tests use as a module never comes from the response."""
    fake = "class np:\n    allclose = isclose = lambda *a, **k: True\nmath = np\ndef f(n): return 0"
    for test in ("assert np.allclose(f(1), 5)", "assert math.isclose(f(1), 5)"):
        assert run_code(fake, [test]).value == 0.0


@pytest.mark.parametrize(("answer", "row"), table(__file__, "completions"))
def test_a_completion_continues_the_prompt(answer: str, row: Any, run_code: RunCode) -> None:
    assert run_code(answer, row).value == 1.0


def test_prompts_helpers_serve_tests_and_answers_alike(run_code: RunCode) -> None:
    row = {
        "prompt": "def double(n):\n    return 2 * n\n\ndef half(n):\n    '''Undo double.'''\n",
        "test": "def check(candidate):\n    assert candidate(double(4)) == 4\n",
        "entry_point": "half",
    }
    assert run_code("def half(n): return n // double(1)", row).value == 1.0
    # A response's own `double` is not the one that tests use.
    cheat = "def double(n): return n\ndef half(n): return n"
    assert run_code(cheat, row).value == 0.0


def test_chance_is_the_same_every_time(run_code: RunCode) -> None:
    code = "import random\ndef f(): return random.random(), list({'a', 'b', 'c', 'd'})"
    code += "\ndef g(): raise ValueError(f())"
    for test in ("assert f() == 1, str(f())", "assert g()"):
        assert len({run_code(code, [test]).reason for _ in range(3)}) == 1
    program = "import random\nprint(random.random())"
    same = {"inputs": ["", ""], "outputs": [str(random.Random(0).random())] * 2}
    assert run_code(program, same).value == 1.0


@pytest.mark.parametrize("name", ["bwrap", "sandlock", "none"])
def test_some_threads_are_fine(
    name: str, run_code: RunCode, make_sandbox: Callable[[str], Sandbox]
) -> None:
    code = (
        "import threading, time\ndef f(n):\n"
        "    threads = [threading.Thread(target=time.sleep, args=(1.5,)) for _ in range(n)]\n"
        "    for one in threads: one.start()\n    for one in threads: one.join()\n    return n"
    )
    assert run_code(code, ["assert f(4) == 4"], make_sandbox(name), processes=4).value == 1.0
    score = run_code(code, ["assert f(7) == 7"], make_sandbox(name), processes=4)
    assert (score.value, score.reason) == (0.0, "killed: more than 4 processes and threads")
