"""Parameters of a test that are left to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_only(values: Iterable[str], *quick: str) -> list[Any]:
    """Of these values, only those that are named are quick."""
    return [x if x in quick else pytest.param(x, marks=pytest.mark.slow) for x in values]
