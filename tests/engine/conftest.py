"""Runs that sample ahead, on the small engine of `ahead_runs.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.ahead_runs import Run


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Begin runs; all of them are closed in the end, and no thread is left."""
    runs: list[Run] = []

    def make(*args: Any, **settings: Any) -> Run:
        runs.append(Run(*args, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()
    assert [t for t in threading.enumerate() if t.name == "sampling-ahead"] == []
