"""Bad rows, named by file, row and column, and the message that sums them up."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ppo_cli.errors import DataError, ppo

SHOWN = 5


@dataclass(frozen=True)
class Place:
    """A row of a file: a 1-based line of a JSONL file, or a 1-based row of any other."""

    file: str
    number: int
    unit: str = "row"

    def __str__(self) -> str:
        """Return `FILE line 7`."""
        return f"{self.file} {self.unit} {self.number}"


@dataclass(frozen=True)
class RowProblem:
    """One thing wrong with one row; `column` is empty when the row itself does not parse."""

    place: Place
    column: str
    message: str

    def __str__(self) -> str:
        """Return `FILE line 7, column prompt: …`."""
        column = f", column {self.column}" if self.column else ""
        return f"{self.place}{column}: {self.message}"


class RowError(Exception):
    """Raised while one row is read; collected, so that all bad rows are reported at once."""

    def __init__(self, column: str, message: str) -> None:
        """Keep the column beside the message."""
        super().__init__(message)
        self.column = column


def raise_problems(problems: Sequence[RowProblem]) -> None:
    """Raise one DataError that counts the bad rows and names the first few; none: do nothing."""
    if not problems:
        return
    rows = len({problem.place for problem in problems})
    lines = [str(problem) for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"… and {len(problems) - SHOWN} more.")
    if rows > 1:
        lines.insert(0, f"{rows} bad rows:")
    files = " ".join(dict.fromkeys(shlex.quote(problem.place.file) for problem in problems))
    lines.append(f"Correct or remove them; `{ppo(f'data check {files}')}` names them all.")
    raise DataError("\n".join(lines))
