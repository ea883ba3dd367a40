"""Every form of tests, what it counts, and what is told of a response that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ppo_cli.records import Score
from ppo_cli.rewards.code.sandboxes import Sandbox

RunCode = Callable[..., Score]
PAIR = """
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
    def total(self):
        return self.a + self.b
def totals(pairs):
    return [pair.total() for pair in pairs]
"""
TYPED = """
class Solution:
    def total(self, numbers: List[int], times: Optional[int] = 1) -> int:
        return sum(k * v for k, v in Counter(numbers).items()) * times
"""
TOTALS = {"fn_name": "total", "inputs": ["[1, 2]\n2", "[4]"], "outputs": ["6", "4"]}
USUAL = (
    "n = int(stdin.readline())\nheap = []\nheappush(heap, gcd(n, inf and 6))\n"
    "print(heap[0], reduce(add, [1, 2]), bisect_left([1, 3], 3), math.pi > pow(3, 1, 5))"
)
DEEP = "def f(n): return n and 1 + f(n - 1)"
# name, code, row, passed, total
RIGHT: list[tuple[str, str, Any, int]] = [
    ("asserts", "def f(n): return n + 1", ["assert f(1) == 2", "assert f(2) == 3"], 2),
    ("one_text", "def f(n): return n + 1", "assert f(1) == 2\nassert f(2) == 3", 2),
    ("setup", "def f(n): return n",
     {"test_list": ["assert f(x) == 5"], "test_setup_code": "x = 5"}, 1),
    ("memory_of_the_tests", "def f(n): return n",
     {"test_list": ["assert f(1) == 1"], "test_setup_code": "kept = bytearray(350 << 20)"}, 1),
    ("own_class", PAIR, ["assert totals([Pair(1, 2), Pair(3, 4)]) == [3, 7]"], 1),
    ("attributes", PAIR, ["p = Pair(1, 2)\np.a = 5\nassert p.total() == 7 and p.a == 5"], 1),
    ("class_in_setup", PAIR,
     {"tests": ["assert totals([p]) == [3]"], "test_imports": "p = Pair(1, 2)"}, 1),
    ("generator", "def f(n): yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"], 1),
    ("map", "def f(n): return map(str, range(n))", ["assert list(f(2)) == ['0', '1']"], 1),
    ("named_as_a_builtin", "def sum(a, b): return a * b", ["assert sum(2, 5) == 10"], 1),
    ("module_of_its_own", "import math\ndef f(n): return n", ["assert math.isclose(f(1), 1)"], 1),
    ("error_is_wanted", "def f(n): return {}[n]",
     ["try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass"], 1),
    ("own_error_is_wanted", "class Bad(ValueError): pass\ndef f(n): raise Bad(n)",
     ["try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == '1'"], 1),
    ("loop", "def f(n): return n", ["for n in range(9):\n    assert f(n) == n"], 1),
    ("no_asserts", "def f(n): return n", ["if f(1) != 1:\n    raise Exception('no')"], 1),
    ("pytest_function", "def f(n): return n",
     "def test_f():\n    assert f(1) == 1\ndef test_g():\n    assert f(2) == 2", 2),
    ("unittest_case", "def f(n): return n",
     "import unittest\nclass TestF(unittest.TestCase):\n    def setUp(self): self.n = 3\n"
     "    def test_a(self): self.assertEqual(f(self.n), 3)\n"
     "    def test_b(self): self.assertTrue(f(1))", 2),
    ("in_place", "def f(x, d):\n    x.sort()\n    d['n'] = len(x)",
     ["x = [3, 1]\nd = {}\nf(x, d)\nassert x == [1, 3] and d == {'n': 2}"], 1),
    ("in_place_within", "def f(g): g[0][1] = 5", ["g = [[1, 2]]\nf(g)\nassert g == [[1, 5]]"], 1),
    ("import_apart", "def f(n): return n", ["import math", "assert math.isclose(f(1), 1)"], 1),
    ("constant", "def f(n): return n", ["assert True, 'fine'\nassert f(1) == 1"], 1),
    ("rich", "def f(): return {1: (2, [3.5, None]), 'a': {1, 2}}",
     ["assert f() == {1: (2, [3.5, None]), 'a': {1, 2}}"], 1),
    ("tuple_is_no_list", "def f(): return (1, 2)", ["assert f() != [1, 2]"], 1),
    ("dataclass", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
     "def f(n): return P(n).x", ["assert f(2) == 2"], 1),
    ("keywords", "def f(*, n=1): return n", ["assert f(n=3) == 3"], 1),
    ("program", "print(int(input()) * 2)", {"inputs": ["2", "3"], "outputs": ["4", "6\n"]}, 2),
    ("main_guard", "import sys\ndef main():\n    for line in sys.stdin: print(line.strip())\n"
     "if __name__ == '__main__':\n    main()", {"inputs": ["a\nb"], "outputs": ["a\nb"]}, 1),
    ("open_0", "print(open(0).read()[::-1])", {"inputs": ["abc"], "outputs": ["cba"]}, 1),
    ("buffer", "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())",
     {"inputs": ["abc"], "outputs": ["abc"]}, 1),
    ("exit_0", "print(1)\nraise SystemExit(0)", {"inputs": [""], "outputs": ["1"]}, 1),
    ("thread", "import threading, time\ndef main():\n    time.sleep(0.05)\n    print(input())\n"
     "threading.Thread(target=main).start()", {"inputs": ["7"], "outputs": ["7"]}, 1),
    ("near", "print(1 / 3)", {"inputs": [""], "outputs": ["0.33333333"]}, 1),
    ("function", "def add(a, b): return a + b",
     {"inputs": [[1, 2], "3\n4"], "outputs": [[3], 7], "fn_name": "add"}, 2),
    ("method", "class Solution:\n    def add(self, a, b): return (a, b)",
     {"inputs": [[1, 2]], "outputs": [[1, 2]], "fn_name": "add"}, 1),
    ("usual_imports", TYPED, TOTALS, 2),
    ("usual_imports_of_asserts", TYPED,
     {"test": "def check(candidate):\n    assert candidate([3]) == 3",
      "entry_point": "Solution().total"}, 1),
    ("usual_imports_of_programs", USUAL, {"inputs": ["9"], "outputs": ["3 3 1 True"]}, 1),
    ("usual_depth", DEEP, {"inputs": [[9000]], "outputs": [9000], "fn_name": "f"}, 1),
    ("setup_of_calls", "def f(n): return n % MOD + twice(n)",
     {"inputs": [[9]], "outputs": [20], "fn_name": "f",
      "test_setup_code": "MOD = 7\ndef twice(n): return 2 * n"}, 1),
    ("setup_of_programs", "print(MOD)",
     {"inputs": [""], "outputs": ["7"], "test_imports": ["MOD = 7"]}, 1),
    ("imports_of_asserts", "def f(n: List[int]): return Counter(n)[1] + m.floor(0.5)",
     {"test_list": ["assert f([1, 1]) == 2"], "test_setup_code": "import math as m",
      "test_imports": ["from collections import Counter"],
      "prompt": "from typing import List\n\ndef f(n: List[int]):"}, 1),
    ("imports_of_a_question", "def f(n): return isqrt(n)",
     {"test_list": ["assert f(9) == 3"], "question": "Use\n```\nfrom math import isqrt\n```"}, 1),
    ("apps", "print(int(input()) * 2)",
     {"input_output": '{"inputs": ["2\\n"], "outputs": ["4\\n"]}'}, 1),
    ("code_contests", "print(int(input()) * 2)",
     {"public_tests": {"input": ["2\n"], "output": ["4\n"]},
      "generated_tests": {"input": ["3\n"], "output": ["6\n"]}}, 2),
]  # fmt: skip


def run_all(run: RunCode, cases: Sequence[tuple[str, Any]], **settings: Any) -> list[Score]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: run(*case, **settings), cases))


def counts_of(score: Score) -> tuple[int, int]:
    return score.info["passed"], score.info["total"]


@pytest.mark.usefixtures("no_trace")
def test_right_answers(run_code: RunCode) -> None:
    found = run_all(run_code, [(code, truth) for _, code, truth, _ in RIGHT])
    wrong = [
        (name, score)
        for (name, _, _, total), score in zip(RIGHT, found, strict=True)
        if (score.value, score.failure, score.reason) != (1.0, "", "")
        or counts_of(score) != (total, total)
    ]
    assert wrong == []


WRONG: list[tuple[str, str, Any, tuple[int, int], str]] = [
    ("one_of_three", "def f(n): return abs(n)",
     ["assert f(1) == 1", "assert f(-1) == -1, 'negative'", "assert f(0) == 0"], (2, 3),
     "1 of 3 tests failed; first: AssertionError at `assert f(-1) == -1, 'negative'`"),
    ("raises", "def f(n): return 1 // n", ["assert f(1) == 1\nassert f(0) == 0\nassert f(2) == 0"],
     (2, 3), "ZeroDivisionError: integer division or modulo by zero at `assert f(0) == 0`"),
    ("outside_the_asserts", "def f(n): return 1 // n", ["assert f(1) == 1\nf(0)\nassert f(2) == 0"],
     (1, 2), "outside the asserts"),
    ("loop_fails_once", "def f(n): return n if n != 5 else 0",
     ["for n in range(9):\n    assert f(n) == n", "assert f(1) == 1"], (1, 2), "1 of 2"),
    ("nothing_reached", "def f(): return []", ["for one in f():\n    assert one == 1"], (0, 1),
     "no assert was reached"),
    ("pytest_function", "def f(n): return 1", "def test_f():\n    assert f(1) == 1\n"
     "    assert f(2) == 2", (1, 2), "AssertionError at `assert f(2) == 2`"),
    ("unittest_case", "def f(n): return 99",
     "import unittest\nclass TestCases(unittest.TestCase):\n"
     "    def test_a(self): self.assertEqual(f(1), 2)", (0, 1), "99 != 2 at `TestCases.test_a`"),
    ("changes_what_it_is_compared_with", "def f(x):\n    x.clear()\n    return []",
     ["x = [2, 1]\nassert f(x) == sorted(x)"], (0, 1), "AssertionError"),
    ("lies_about_what_it_changed",
     "import sys\nframe = sys._getframe()\n"
     "while not hasattr(frame.f_locals.get('self'), 'do_call'): frame = frame.f_back\n"
     "type(frame.f_locals['self']).do_call = lambda self, *call: ([], {0: []})\n"
     "def f(x): return x",
     ["x = [2, 1]\nassert f(x) == sorted(x)"], (0, 1), "AssertionError"),
    ("own_sorted_for_the_tests", "def f(x): return [0]\ndef sorted(x): return [0]",
     ["assert f([2, 1]) == sorted([2, 1])"], (0, 1), "AssertionError"),
    ("ends_the_loop_of_the_tests", "def f(n): raise StopIteration", ["assert all(map(f, [1, 2]))"],
     (0, 1), "StopIteration"),
    ("not_there", "def g(n): return n", ["assert f(1) == 1"], (0, 1), "'f' is not defined"),
    ("program", "print(input())", {"inputs": ["1", "2"], "outputs": ["1", "3"]}, (1, 2),
     "the output differs from the expected one at `'input 2'`"),
    ("program_raises", "print(int(input()))", {"inputs": ["1", "x"], "outputs": ["1", "x"]}, (1, 2),
     "ValueError: invalid literal"),
    ("program_exits", "raise SystemExit(3)", {"inputs": [""], "outputs": [""]}, (0, 1),
     "SystemExit"),
    ("function", "def add(a): return a",
     {"inputs": [[1], [2]], "outputs": [1, 3], "fn_name": "add"},
     (1, 2), "'input 2'"),
    ("usual_import_is_no_answer", "x = 1",
     {"inputs": [[4, 6]], "outputs": [2], "fn_name": "gcd"}, (0, 0), "defines no 'gcd'"),
    ("row's_import_is_no_answer", "x = 1",
     {"tests": ["assert gcd(4, 6) == 2"], "question": "from math import gcd"}, (0, 1),
     "'gcd' is not defined"),
    ("setup_holds_answers", "def f(): return ANSWER",
     {"tests": ["assert f() == ANSWER"], "test_setup_code": "ANSWER = 5"}, (0, 1),
     "'ANSWER' is not defined"),
    ("functions_have_no_usual_imports", "def f(n): return gcd(n, 6)", ["assert f(4) == 2"],
     (0, 1), "'gcd' is not defined"),
    ("one_of_all_contest_tests", "print(4)",
     {"public_tests": {"input": ["2"], "output": ["4"]},
      "private_tests": {"input": ["3"], "output": ["6"]}}, (1, 2), "'input 2'"),
    ("lines_are_the_response's", "import os\nx = (", TOTALS, (0, 0), "line 2"),
    ("true_is_not_one", "def f(a): return True",
     {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, (0, 1), "output differs"),
]  # fmt: skip


def test_wrong_answers(run_code: RunCode) -> None:
    found = run_all(run_code, [(code, truth) for _, code, truth, *_ in WRONG], score="share")
    wrong = [
        (name, score)
        for (name, _, _, counts, words), score in zip(WRONG, found, strict=True)
        if (score.value, score.failure) != (counts[0] / max(counts[1], 1), "")
        or counts_of(score) != counts
        or words not in score.reason
    ]
    assert wrong == []
    _, code, truth, counts, _ = WRONG[0]
    whole = run_code(code, truth)
    assert (whole.value, whole.failure, counts_of(whole)) == (0.0, "", counts)


FAULTS: list[tuple[Any, str]] = [
    ("72", "ground_truth has no tests"),
    (["assert f(1) =="], "not valid Python"),
    (["import no_such_module"], "the tests raised ModuleNotFoundError"),
    ({"test": "def check(candidate): pass"}, "no entry_point"),
    ({"tests": ["assert f(1)"], "test_setup_code": "1 / 0"}, "setup raised ZeroDivisionError"),
    (["assert f(lambda: 1)"], "an object of type function, which cannot be sent"),
    (["raise SystemExit"], "end the interpreter"),
    (["print(f(1))"], "assert nothing"),
    (["import math", "def test_f():\n    f(1)"], "assert nothing"),
    ({"test": "def check(candidate): candidate(1)", "entry_point": "f"}, "assert nothing"),
    (["def test_f(capsys):\n    assert f(1)"], "takes arguments"),
]


def test_faults_of_the_row_are_failures(run_code: RunCode) -> None:
    found = run_all(run_code, [("def f(n): return n", truth) for truth, _ in FAULTS])
    wrong = [
        (words, score)
        for (_, words), score in zip(FAULTS, found, strict=True)
        if score.value is not None or words not in score.failure
    ]
    assert wrong == []


def test_a_response_computes_nothing_for_the_tests(run_code: RunCode) -> None:
    """Whatever the tests use as a module is never the response's own."""
    fake = "class np:\n    allclose = isclose = lambda *a, **k: True\nmath = np\ndef f(n): return 0"
    for test in ("assert np.allclose(f(1), 5)", "assert math.isclose(f(1), 5)"):
        assert run_code(fake, [test]).value == 0.0


def test_a_completion_goes_on_where_the_prompt_stops(run_code: RunCode) -> None:
    row = {
        "prompt": "from math import sqrt\ndef root(n):\n    '''Return the root.'''\n",
        "test": "def check(candidate):\n    assert candidate(9) == 3\n",
        "entry_point": "root",
    }
    for answer in (
        "    return sqrt(n)\n",
        "```python\nreturn sqrt(n)\n```",
        "def root(n): return sqrt(n)",
        "So:\n```python\nfrom math import sqrt\ndef root(n):\n    return sqrt(n)\n```\nDone.",
        "    return sqrt(n)\n\ndef other():\nis not needed",
    ):
        assert run_code(answer, row).value == 1.0, answer


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
    told = {run_code(code, ["assert f() == 1, str(f())"]).reason for _ in range(3)}
    values = {
        run_code(f"{code}\ndef g(): raise ValueError(f())", ["assert g()"]).reason for _ in "ab"
    }
    assert len(told) == len(values) == 1
    program = "import random\nprint(random.random())"
    same = {"inputs": ["", ""], "outputs": [str(random.Random(0).random())] * 2}
    assert run_code(program, same).value == 1.0


@pytest.mark.parametrize("name", ["bwrap", "sandlock", "none"])
def test_some_threads_are_fine(
    name: str, run_code: RunCode, make_sandbox: Callable[[str], Sandbox]
) -> None:
    code = (
        "import threading, time\ndef f(n):\n"
        "    threads = [threading.Thread(target=time.sleep, args=(0.4,)) for _ in range(n)]\n"
        "    for one in threads: one.start()\n    for one in threads: one.join()\n    return n"
    )
    assert run_code(code, ["assert f(4) == 4"], make_sandbox(name), processes=4).value == 1.0
    found = run_code(code, ["assert f(7) == 7"], make_sandbox(name), processes=4)
    assert (found.value, found.reason) == (0.0, "killed: more than 4 processes and threads")
