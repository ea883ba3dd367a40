"""Metrics as (sum, count): what micro-batches, mini-batches and ranks can add exactly."""

from __future__ import annotations

from collections.abc import Sequence

from ppo_cli.engine.base import Sums
from ppo_cli.engine.ranks import Ranks

# Sums of one rank before they are added up: a count may still be 0.
Table = dict[str, tuple[float, float]]


class SumTable:
    """Adds up named sums within one optimizer step.

    A quantity that is already normalised by the whole mini-batch (a loss) is added with
    count 0 by each micro-batch, and counts once.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum and its count."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def table(self) -> Table:
        """All sums and counts as they are."""
        return {name: (total, count) for name, (total, count) in self._sums.items()}


def own_rows(ranks: Ranks, table: SumTable) -> Table:
    """Sums over rows, told by one of the tensor-parallel ranks that saw the same ones."""
    return table.table() if ranks.speaks else {}


def only_first(ranks: Ranks, table: Table) -> Table:
    """What is the same on every rank, told once."""
    return table if ranks.rank == 0 else {}


def merge_sums(tables: Sequence[Table]) -> Sums:
    """Add up the tables of all ranks; a name that only ever had count 0 counts as one."""
    whole = SumTable()
    for table in tables:
        for name, (total, count) in table.items():
            whole.add(name, total, count)
    return {name: (total, count or 1.0) for name, (total, count) in whole.table().items()}
