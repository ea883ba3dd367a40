"""The self-test that users run, first: it says in two minutes what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.timeout(400)
def test_the_self_test_passes(on_gpu: bool, variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", "ppo_cli", "doctor", "--self_test"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
