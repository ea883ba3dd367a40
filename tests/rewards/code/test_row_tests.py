"""Tests of a row in all the forms that data sets have."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from typing import Any

import pytest

from ppo_cli.rewards.base import CannotScore
from ppo_cli.rewards.code.extract import RowTests, read_tests
from tests.rewards.tables import table

APPS = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'


def pack(text: str) -> str:
    """Pack private tests as LiveCodeBench does."""
    return base64.b64encode(zlib.compress(pickle.dumps(text))).decode()


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
            RowTests(
                "asserts",
                setup="import re\na = 1",
                tests=("assert f(1)",),
                imports=("import re",),
            ),
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
        # APPS and TACO
        (None, {"input_output": APPS}, RowTests("programs", pairs=(("1\n", "2\n"),))),
        (APPS, None, RowTests("programs", pairs=(("1\n", "2\n"),))),
        (
            {"input_output": '{"fn_name": "f", "inputs": [[{"1": 2}, 3]], "outputs": [[4]]}'},
            {"starter_code": "def f(a, b):\n"},
            RowTests("calls", "f", "def f(a, b):\n", pairs=(([{1: 2}, 3], [4]),)),
        ),
        (  # CodeContests, as parquet files and as a list
            None,
            {
                "public_tests": {"input": ["1\n"], "output": ["2\n"]},
                "private_tests": {"input": [], "output": []},
                "generated_tests": [{"input": "3\n", "output": "4\n"}],
            },
            RowTests("programs", pairs=(("1\n", "2\n"), ("3\n", "4\n"))),
        ),
        (
            {"public_tests": '{"input": ["1"], "output": ["2"]}'},
            None,
            RowTests("programs", pairs=(("1", "2"),)),
        ),
        (  # LiveCodeBench
            None,
            {
                "public_test_cases": json.dumps(
                    [{"input": "[1]\n2", "output": "3", "testtype": "functional"}]
                ),
                "private_test_cases": pack('[{"input": "[4]\\n5", "output": "9"}]'),
                "metadata": '{"func_name": "f"}',
            },
            RowTests("calls", "f", pairs=(([[1], 2], 3), ([[4], 5], 9))),
        ),
        (  # LeetCodeDataset
            {"test": "def check(candidate): ...", "entry_point": "Solution().f"},
            None,
            RowTests("asserts", "f", tests=("def check(candidate): ...",)),
        ),
        (  # tests of the ground truth come before others of the row
            {"inputs": ["1"], "outputs": ["2"]},
            {"test_list": ["assert f(1)"]},
            RowTests("programs", pairs=(("1", "2"),)),
        ),
        (  # imports of the question and of an unfinished prompt
            ["assert f(1)"],
            {
                "question": "Do:\n```python\r\nfrom typing import (\n  List,\n)\n```\nfrom here",
                "prompt": "import math\ndef f(n):",
            },
            RowTests(
                "asserts",
                before="import math\ndef f(n):",
                tests=("assert f(1)",),
                imports=("import math", "from typing import (\n  List,\n)"),
            ),
        ),
        (  # a question that is nothing but the head of the function is what a body goes on from
            {"test": "assert f(1)", "entry_point": "f"},
            {"question": 'def f(n):\n    """One."""\n'},
            RowTests("asserts", "f", before='def f(n):\n    """One."""\n', tests=("assert f(1)",)),
        ),
        (
            {"test": "assert f(1)", "entry_point": "f"},
            {"question": "Complete it:\ndef f(n):\n"},
            RowTests("asserts", "f", tests=("assert f(1)",)),
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


@pytest.mark.parametrize(("truth", "words"), table(__file__, "no tests"))
def test_rows_without_tests_are_told(truth: Any, words: str) -> None:
    with pytest.raises(CannotScore, match=words):
        read_tests(truth, None)


def test_packed_tests_run_no_code() -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, ("attacked",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    with pytest.raises(CannotScore, match="is not text"):
        read_tests({"private_test_cases": packed}, None)
    assert not os.path.exists("attacked")
