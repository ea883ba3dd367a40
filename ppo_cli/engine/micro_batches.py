"""Cut rows into micro-batches: little padding, even work, and a budget that learns from OOM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from ppo_cli.errors import UserError

Result = TypeVar("Result")


@dataclass
class Budget:
    """How much a micro-batch may hold; halved, and kept halved, when memory runs out.

    `tokens` counts padded tokens (rows x longest row), `rows` caps the rows.
    """

    tokens: int
    rows: int | None = None
    halvings: int = 0

    def halve(self, longest: int, most_rows: int) -> None:
        """Shrink below what was just tried; raises UserError when one row is too much."""
        if most_rows <= 1:
            raise UserError(
                f"Out of memory with a single sequence of {longest} tokens. Lower "
                "--max_response_length or --max_prompt_length, switch on "
                "model.enable_gradient_checkpointing, or take a smaller --model."
            )
        self.rows = most_rows // 2
        self.halvings += 1


def plan_micro_batches(lengths: Sequence[int], budget: Budget) -> list[list[int]]:
    """Group row indices by length, longest first, within the budget.

    With the number of micro-batches that the budget needs, the smallest token size that still
    needs no more of them is used, so that all are about equally heavy. A row longer than the
    token budget goes alone.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = len(_fill(order, lengths, budget.tokens, budget.rows))
    low, high = 1, budget.tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle, budget.rows)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(order, lengths, low, budget.rows)


def _fill(
    order: Sequence[int], lengths: Sequence[int], tokens: int, rows: int | None
) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in order:
        group = groups[-1] if groups else None
        full = group is None or (
            (len(group) + 1) * lengths[group[0]] > tokens or len(group) == rows
        )
        if full or group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a smaller micro-batch could work."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    signs = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


@contextmanager
def tell_out_of_memory(what: str, lower: str) -> Iterator[None]:
    """Turn running out of memory into a message that says what to lower."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{what} ran out of memory: lower {lower}.") from error


def run_within_memory(
    lengths: Sequence[int],
    budget: Budget,
    work: Callable[[list[list[int]]], Result],
    restart: Callable[[], None],
) -> Result:
    """Do `work` on micro-batches; when memory runs out, `restart` and try with halves.

    All of the work is done again, never the rest of it: a backward pass that broke off may
    have left half a gradient behind.
    """
    while True:
        plan = plan_micro_batches(lengths, budget)
        try:
            return work(plan)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        restart()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        budget.halve(max(lengths), max(len(group) for group in plan))
