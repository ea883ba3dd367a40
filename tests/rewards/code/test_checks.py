"""How asserts are counted, and which names tests want, in this process and without a sandbox."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ppo_cli.rewards.code.processes import count_files
from ppo_cli.rewards.code.tester import (
    MAX_SOURCE_CHARS,
    RECORD,
    AssertLog,
    free_names,
    record_asserts,
    used_modules,
)


def test_files_behind_a_link_are_not_those_of_a_response(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "system").mkdir()
    for n in range(9):
        (tmp_path / "system" / str(n)).write_text("x")
    (tmp_path / "own" / "link").symlink_to(tmp_path / "system", target_is_directory=True)
    assert count_files(str(tmp_path / "own"), [])[1] == 1


def ran(*texts: str) -> AssertLog:
    """Run texts of tests one after another, as the tester does."""
    checks = AssertLog()
    for text in texts:
        since = len(checks.passed)
        tree = record_asserts(ast.parse(text), checks)
        try:
            exec(compile(tree, "tests", "exec"), {RECORD: checks})
        except Exception as error:
            checks.abort(since, error)
        else:
            checks.finish(since)
    return checks


COUNTED = [
    ("assert 1 == 1\nassert 2 == 3\nassert 3 == 4", 1, 3, "AssertionError at `assert 2 == 3`"),
    ("assert True, 'always'\nassert 1 == 1", 1, 1, ""),
    ("assert False", 0, 1, "AssertionError at `assert False`"),
    ("for n in (0, 1):\n    assert n", 0, 1, "AssertionError at `assert n`"),
    ("for n in (1, 2):\n    assert n", 1, 1, ""),
    ("if 0:\n    assert 1 == 2\nassert 2 == 2", 1, 1, ""),
    ("for n in ():\n    assert n", 0, 1, "no assert was reached"),
    ("x = 1", 1, 1, ""),
    ("assert 1 / 0\nassert 1 == 1", 1, 2, "ZeroDivisionError: division by zero at `assert 1 / 0`"),
    ("assert 1 == 1\n1 / 0\nassert 2 == 2", 1, 2,
     "ZeroDivisionError: division by zero outside the asserts"),
    ("assert 1 == 1\nraise KeyError", 1, 2, "KeyError outside the asserts"),
    ("raise KeyError", 0, 1, "KeyError outside the asserts"),
    ("try:\n    {}[1]\n    assert 1 == 2\nexcept KeyError:\n    pass", 1, 1, ""),
    ("try:\n    assert 1 == 2\nexcept KeyError:\n    pass\nassert 1 == 1", 1, 2,
     "AssertionError at `try: assert 1 == 2 except KeyError: pass`"),
    ("try:\n    assert 1 == 2\n    assert 3 == 3\nfinally:\n    x = 1", 1, 2,
     "AssertionError at `assert 1 == 2`"),
    ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    assert 'zero' in str(e)", 1, 1, ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "passed", "total", "first"), COUNTED)
def test_every_assert_counts_once(text: str, passed: int, total: int, first: str) -> None:
    checks = ran(text)
    assert (*checks.count(), checks.first) == (passed, total, first)


def test_texts_count_by_themselves_and_the_first_failure_is_told() -> None:
    checks = ran(
        "assert 1 == 1", "1 / 0", "if 0:\n    assert 1 == 1", "x = 2", "assert 3 == 4\n{}[1]"
    )
    assert checks.count() == (2, 6)
    assert checks.first.startswith("ZeroDivisionError")


def test_what_is_told_is_short() -> None:
    source, message = "x" * 400, "y" * 400
    first = ran(f"assert '{source}' == 1").first
    assert first.endswith("...`") and len(first) == len("AssertionError at ``") + MAX_SOURCE_CHARS
    assert ran(f"raise ValueError('{message}\\n  z')").first == (
        f"ValueError: {'y' * 200} outside the asserts"
    )


def test_the_names_that_tests_want_of_a_response() -> None:
    wanted = {
        "assert f(1) == 2": ["f"],
        "x = 5\nassert g(x) == f(x)": ["f", "g"],
        "assert np.allclose(f(1), 5)": ["f"],
        "assert sum(2, 5) == 10": ["sum"],
        "assert len(sum([1])) == 1": [],
        "assert len(f(1)) == 1": ["f"],
        "import math\nassert math.floor(g(1)) == 1": ["g"],
        "import os.path\nassert f(os)": ["f"],
        "from a.b import c as d\nassert d(f)": ["f"],
        "def h(n):\n    return n\nassert h(f)": ["f"],
        "class A:\n    pass\nassert f(A)": ["f"],
        "assert (lambda q: q)(f)": ["f"],
        "assert Pair(1, 2).total() == 3": ["Pair"],
        "for n in range(3):\n    assert n": ["range"],
    }
    assert {text: free_names([ast.parse(text)]) for text in wanted} == wanted
    assert free_names([ast.parse("x = f(1)"), ast.parse("assert x == g(2)")]) == ["f", "g"]


def test_standard_modules_that_tests_use_without_importing_them() -> None:
    wanted = {
        "assert math.isclose(f(1), 1)": ["math"],
        "import math\nassert math.isclose(f(1), 1)": [],
        "assert os.path.join(re.escape('a'))": ["os", "re"],
        "assert numpy.ones(1)": [],
        "math = f(1)\nassert math.x": [],
        "assert math": [],
    }
    assert {text: used_modules([ast.parse(text)]) for text in wanted} == wanted
