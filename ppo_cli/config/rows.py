"""The rows of a run's prompt files against its batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ppo_cli.config.bundled import prompt_files
from ppo_cli.config.schema import Config
from ppo_cli.data_sets.files import count_rows


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
