"""What scripts/check says of tests that fail or are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pathlib, pytest
def test_right(): pass
def test_wrong(): assert False
def test_skipped(): pytest.skip("no GPU")
@pytest.mark.parametrize("words", ["a b::c.d"])
def test_late(words):
    before = pathlib.Path("ran")
    late = not before.exists()
    before.touch()
    assert not late
"""


@pytest.mark.slow
def test_failed_tests_run_again_alone_and_skips_are_counted(root: Path, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    environ = {key: text for key, text in os.environ.items() if key != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, root / "scripts/run_tests.py", "-n", "0", "--outcome", "outcome.json"],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    wrong, late = "test_some.py::test_wrong", "test_some.py::test_late[a b::c.d]"
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert done.returncode == 1, done.stderr
    assert outcome == {"passed": 1, "skipped": 1, "failed": [wrong, late], "alone": [wrong]}
    for line in (f"fails: {wrong}", f"passes alone: {late}", "    1  no GPU"):
        assert line in done.stdout.splitlines()
