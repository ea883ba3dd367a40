"""Corpora of texts with what becomes of each: a JSON object in each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def read_corpus(name: str, *fields: str) -> list[dict[str, Any]]:
    """Return the rows of a corpus that have all these fields."""
    lines = (HERE / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    return [row for row in rows if set(fields) <= row.keys()]
