"""Tests of a row in all the forms that data sets have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppo_cli.rewards.base import CannotScore
from ppo_cli.rewards.code.extract import RowTests, read_tests

HUMANEVAL = {"test": "def check(candidate): ...", "entry_point": "f", "prompt": "def f(): ..."}


@pytest.mark.parametrize(
    ("truth", "extra", "found"),
    [
        (HUMANEVAL, None, RowTests("asserts", "f", "def f(): ...", "", (HUMANEVAL["test"],))),
        (
            json.dumps(HUMANEVAL),
            {"task_id": "1"},
            RowTests("asserts", "f", "def f(): ...", "", (HUMANEVAL["test"],)),
        ),
        (None, HUMANEVAL, RowTests("asserts", "f", "def f(): ...", "", (HUMANEVAL["test"],))),
        (["assert f(1)"], None, RowTests("asserts", tests=("assert f(1)",))),
        ('["assert f(1)"]', None, RowTests("asserts", tests=("assert f(1)",))),
        ("assert f(1)", None, RowTests("asserts", tests=("assert f(1)",))),
        (
            {
                "test_list": ["assert f(1)"],
                "test_setup_code": "a = 1",
                "test_imports": ["import re"],
            },
            None,
            RowTests("asserts", setup="import re\na = 1", tests=("assert f(1)",)),
        ),
        (
            '{"inputs": ["1\\n", ["2", "3"]], "outputs": ["1\\n", 5]}',
            None,
            RowTests("programs", pairs=(("1\n", "1\n"), ("2\n3", "5"))),
        ),
        (
            {"inputs": [[1, 2], "3\n[4]"], "outputs": [[3], "7"], "fn_name": "add"},
            None,
            RowTests("calls", "add", pairs=(([1, 2], [3]), ([3, [4]], 7))),
        ),
        (
            '[{"input": "1", "output": "2", "testtype": "stdin"}]',
            None,
            RowTests("programs", pairs=(("1", "2"),)),
        ),
        (
            [{"input": "1", "output": "2", "type": "function_call", "fn_name": "f"}],
            None,
            RowTests("calls", "f", pairs=(([1], 2),)),
        ),
        (  # what a ground truth does not say, the extra facts may; what both say, it decides
            {"tests": ["assert f(1)"], "test_setup_code": "a = 1"},
            {"tests": ["assert g(2)"], "test_setup_code": "b = 2", "entry_point": "f"},
            RowTests("asserts", "f", setup="a = 1", tests=("assert f(1)",)),
        ),
    ],
)
def test_forms(truth: Any, extra: Any, found: RowTests) -> None:
    assert read_tests(truth, extra) == found


@pytest.mark.parametrize(
    ("truth", "words"),
    [
        (None, "no tests"),
        ("72", "no tests"),
        ({"test": ""}, "no tests"),
        ([], "no tests"),
        ([1, 2], "no texts"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
        ({"inputs": ["1"]}, "no tests"),
        ({"outputs": ["1"]}, "no tests"),
        ([{"input": "1", "output": "2", "type": "functional"}], "no fn_name"),
    ],
)
def test_rows_without_tests_are_told(truth: Any, words: str) -> None:
    with pytest.raises(CannotScore, match=words):
        read_tests(truth, None)
