"""Tests of a row in all the forms that data sets have."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from dataclasses import asdict
from typing import Any

import pytest

from ppo_cli.rewards.base import CannotScore
from ppo_cli.rewards.code.extract import RowTests, read_tests
from tests.rewards.tables import table

NO_LISTS = {"tests": [], "pairs": [], "imports": []}


@pytest.mark.parametrize(("truth", "extra", "fields"), table(__file__, "forms"))
def test_forms(truth: Any, extra: Any, fields: dict[str, Any]) -> None:
    tests = asdict(read_tests(truth, extra))
    assert json.loads(json.dumps(tests)) == asdict(RowTests(fields["kind"])) | NO_LISTS | fields


def test_the_keys_of_the_first_argument_are_numbers_again() -> None:
    truth = {"input_output": '{"fn_name": "f", "inputs": [[{"1": 2}, 3]], "outputs": [[4]]}'}
    tests = read_tests(truth, {"starter_code": "def f(a, b):\n"})
    assert tests == RowTests("calls", "f", "def f(a, b):\n", pairs=(([{1: 2}, 3], [4]),))


@pytest.mark.parametrize(("truth", "fragment"), table(__file__, "no tests"))
def test_rows_without_tests_are_told(truth: Any, fragment: str) -> None:
    with pytest.raises(CannotScore, match=fragment):
        read_tests(truth, None)


def test_packed_tests_run_no_code() -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, ("attacked",)

    packed = base64.b64encode(zlib.compress(pickle.dumps(Attack()))).decode()
    with pytest.raises(CannotScore, match="is not text"):
        read_tests({"private_test_cases": packed}, None)
    assert not os.path.exists("attacked")
