"""Count the rows of local prompt files, cheaply: no torch, no tokenizer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import IO


def count_rows(path: str) -> int | None:
    """Return the number of rows in a local file; None when it is no file that can be counted."""
    file = Path(path).expanduser()
    if not file.is_file():
        return None
    try:
        return _count(file)
    except (OSError, EOFError, ValueError):
        return None


def _count(file: Path) -> int | None:
    kinds = [suffix.lower() for suffix in file.suffixes]
    kind = kinds[-2] if kinds[-1:] == [".gz"] and len(kinds) > 1 else "".join(kinds[-1:])
    if kind == ".parquet":
        return _parquet(file)
    with _opened(file) as content:
        if kind in (".jsonl", ".ndjson"):
            return sum(1 for line in content if line.strip())
        return _json(content) if kind == ".json" else None


def _opened(file: Path) -> IO[bytes] | gzip.GzipFile:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rb")
    return file.open("rb")


def _json(content: IO[bytes] | gzip.GzipFile) -> int | None:
    rows = json.load(content)
    if isinstance(rows, dict):
        rows = rows.get("data")
    return len(rows) if isinstance(rows, list) else None


def _parquet(file: Path) -> int:
    from pyarrow.lib import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(file).num_rows)
    except ArrowException as error:
        raise ValueError(str(error)) from None
