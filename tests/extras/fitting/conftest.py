"""Pairs of sums, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write_sums(tmp_path: Path) -> Callable[[int], str]:
    """Write so many pairs in which the right sum is chosen over 7; returns the file."""

    def write(pairs: int) -> str:
        file = tmp_path / "sums.jsonl"
        rows = (
            {"prompt": f"What is {a} + 20?", "chosen": str(a + 20), "rejected": "7"}
            for a in range(10, 10 + pairs)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write
