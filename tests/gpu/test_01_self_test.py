"""The self-test that users run, first: it says in two minutes what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.weekly  # without a GPU the notebook's test runs it
@pytest.mark.timeout(400)
def test_the_self_test_passes(run_program: Callable[..., str]) -> None:
    run_program("-m", "ppo_cli", "doctor", "--self_test")
