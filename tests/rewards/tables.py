"""Tables of cases in JSON lines next to the tests that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table(test_file: str, section: str) -> list[Any]:
    """Return the rows of a section (lines `[section, *cells]`); a row of one cell is that cell."""
    path = Path(test_file)
    path = path.with_name(f"{path.stem.removeprefix('test_')}.jsonl")
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    rows = [tuple(cells) for name, *cells in lines if name == section]
    assert rows, f"{path} has no section {section}"
    return [row if len(row) > 1 else row[0] for row in rows]


def read_blocks(name: str) -> dict[str, str]:
    """Return the blocks of NAME.txt here, each after a line `=== heading`, by their headings."""
    text = (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")
    blocks = (block.partition("\n") for block in text.split("=== ")[1:])
    return {heading.strip(): content for heading, _, content in blocks}
