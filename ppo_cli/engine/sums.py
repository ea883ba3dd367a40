"""Metrics as (sum, count): what micro-batches, mini-batches and ranks can add exactly."""

from __future__ import annotations

from ppo_cli.engine.base import Sums


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

    def sums(self) -> Sums:
        """All sums; a name that only ever had count 0 counts as one."""
        return {name: (total, count or 1.0) for name, (total, count) in self._sums.items()}
