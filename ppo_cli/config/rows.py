"""Count the rows of local prompt files, cheaply: no torch, no tokenizer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Literal

from ppo_cli.config.bundled import prompt_files
from ppo_cli.config.schema import Config


def train_rows(config: Config) -> int | None:
    """Count the rows that a run trains on; None when a file cannot be counted."""
    return _rows(config.data.train_files, "train", config.data.train_max_samples)


def val_rows(config: Config) -> int | None:
    """Count the rows that a run validates on; None when a file cannot be counted."""
    return _rows(config.data.val_files, "val", config.data.val_max_samples)


def fitting_batches(rows: int, batch: int, mini: int) -> tuple[int, int]:
    """Return batch and mini-batch for few rows, with as many mini-batches a step if possible."""
    parts = max(1, batch // mini)
    smaller = max(1, rows // parts)
    return (min(rows, smaller * parts), smaller) if rows >= parts else (rows, 1)


def too_few_rows(rows: int, batch: int, mini: int) -> str:
    """Say that the rows cannot fill a batch, with the whole line that fits them."""
    batch_fits, mini_fits = fitting_batches(rows, batch, mini)
    return (
        f"{rows} prompts cannot fill a batch of {batch}. Use --batch_size {batch_fits} "
        f"--mini_batch_size {mini_fits}, or give more prompts."
    )


def lowered_batches(rows: int, batch: int, mini: int) -> str:
    """Say how batch sizes that nobody chose are fitted to the rows."""
    batch_fits, mini_fits = fitting_batches(rows, batch, mini)
    return (
        f"There are {rows} training rows: --batch_size is lowered to {batch_fits} and "
        f"--mini_batch_size to {mini_fits}."
    )


def _rows(names: Sequence[str], split: Literal["train", "val"], most: int) -> int | None:
    counts = [count_rows(name) for name in prompt_files(names, split)]
    if not counts or None in counts:
        return None
    total = sum(count for count in counts if count is not None)
    return total if most < 0 else min(total, most)


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
