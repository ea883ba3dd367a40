"""Pairs of sums, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scoring.scripted import write_rows


@pytest.fixture
def write_sums(tmp_path: Path) -> Callable[[int], Path]:
    """Write so many pairs in which the right sum is chosen over 7; returns the file."""

    def write(pairs: int) -> Path:
        rows = (
            {"prompt": f"What is {a} + 20?", "chosen": str(a + 20), "rejected": "7"}
            for a in range(10, 10 + pairs)
        )
        return Path(write_rows(tmp_path / "sums.jsonl", *rows))

    return write
