"""How asserts are counted, and which names tests want, in this process and without a sandbox."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ppo_cli.rewards.code import tester
from ppo_cli.rewards.code.processes import count_files
from ppo_cli.rewards.code.tester import RECORD, AssertLog, free_names, record_asserts, used_modules
from tests.rewards.tables import table


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


COUNTED = table(__file__, "counts")


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
    assert (
        first.endswith("...`")
        and len(first) == len("AssertionError at ``") + tester.MAX_SOURCE_CHARS
    )
    assert ran(f"raise ValueError('{message}\\n  z')").first == (
        f"ValueError: {'y' * 200} outside the asserts"
    )


def test_the_names_that_tests_want_of_a_response() -> None:
    expected = dict(table(__file__, "free names"))
    assert {text: free_names([ast.parse(text)]) for text in expected} == expected
    assert free_names([ast.parse("x = f(1)"), ast.parse("assert x == g(2)")]) == ["f", "g"]


def test_standard_modules_that_tests_use_without_importing_them() -> None:
    expected = dict(table(__file__, "modules"))
    assert {text: used_modules([ast.parse(text)]) for text in expected} == expected
