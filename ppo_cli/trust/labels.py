"""Labels that people gave to responses: numbers, true and false, or two words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.data_sets.files import name_type
from ppo_cli.data_sets.messages import as_plain
from ppo_cli.data_sets.problems import RowProblem, raise_problems
from ppo_cli.data_sets.rows import list_names
from ppo_cli.errors import DataError, did_you_mean
from ppo_cli.trust.rows import Answered, AnsweredSet

GOOD_WORDS = ("true", "1", "good", "yes", "chosen", "correct", "right", "safe", "accepted")
MOST_WORDS = 8


@dataclass(frozen=True)
class Labelled:
    """Rows with their labels as numbers; `positive` is None where labels are not two classes."""

    rows: tuple[Answered, ...]
    values: NDArray[np.float64]
    positive: NDArray[np.bool_] | None
    said: str
    notes: tuple[str, ...] = ()


def read_labels(found: AnsweredSet, column: str, positive: str | None = None) -> Labelled:
    """Read the label of each row; rows without one are left out, and that is said."""
    names = list(dict.fromkeys(name for row in found.rows for name in row.record))
    if column not in names:
        raise DataError(
            f"{found.source}: no column '{column}' (--labels). Its columns: {list_names(names)}."
            f"{did_you_mean(column, names)}"
        )
    cells = [as_plain(row.record.get(column)) for row in found.rows]
    kept = [(row, cell) for row, cell in zip(found.rows, cells, strict=True) if cell is not None]
    if not kept:
        raise DataError(f"{found.source}: the column '{column}' (--labels) is empty.")
    rows = tuple(row for row, _ in kept)
    values = [cell for _, cell in kept]
    _check_kind(rows, values, column)
    without = len(cells) - len(kept)
    notes = (f"{without} rows have no label and are left out.",) if without else ()
    if positive is None and not any(isinstance(value, str) for value in values):
        return _numbers(rows, values, notes)
    return _words(rows, values, column, positive, notes)


def _check_kind(rows: Sequence[Answered], values: Sequence[Any], column: str) -> None:
    raise_problems(
        [
            RowProblem(row.place, column, said)
            for row, value in zip(rows, values, strict=True)
            if (said := _unfit(value))
        ]
    )


def _unfit(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "is NaN or infinite"
    if isinstance(value, bool | int | float | str):
        return ""
    return f"is {name_type(value)}, not a number, true, false or a word"


def _numbers(rows: tuple[Answered, ...], values: Sequence[Any], notes: tuple[str, ...]) -> Labelled:
    numbers = np.asarray([float(value) for value in values])
    levels = np.unique(numbers)
    if len(levels) == 2:
        positive = numbers == levels[1]
        said = f"{_word(values, levels[1])} is good ({int(positive.sum())} of {len(rows)})"
        return Labelled(rows, numbers, positive, said, notes)
    said = f"{len(levels)} levels from {levels[0]:g} to {levels[-1]:g}"
    return Labelled(rows, numbers, None, said, notes)


def _word(values: Sequence[Any], level: float) -> str:
    return next(str(value) for value in values if float(value) == level).lower()


def _words(
    rows: tuple[Answered, ...],
    values: Sequence[Any],
    column: str,
    positive: str | None,
    notes: tuple[str, ...],
) -> Labelled:
    words = [str(value).strip().casefold() for value in values]
    kinds = list(dict.fromkeys(words))
    if len(kinds) > 2 and positive is None:
        more = ", …" if len(kinds) > MOST_WORDS else ""
        raise DataError(
            f"The labels in '{column}' are {len(kinds)} different words: "
            f"{', '.join(kinds[:MOST_WORDS])}{more}. Give numbers or two words, or say with "
            "--positive VALUE which word is good; all others are then bad."
        )
    good = _positive(kinds, column, positive)
    flags = np.asarray([word == good for word in words])
    said = f"{good!r} is good ({int(flags.sum())} of {len(rows)})"
    return Labelled(rows, flags.astype(np.float64), flags, said, notes)


def _positive(kinds: Sequence[str], column: str, given: str | None) -> str:
    if given is not None:
        wanted = given.strip().casefold()
        if wanted not in kinds:
            raise DataError(
                f"--positive {given}: no label in '{column}' is that. "
                f"There are: {', '.join(kinds[:MOST_WORDS])}.{did_you_mean(wanted, kinds)}"
            )
        return wanted
    known = [kind for kind in kinds if kind in GOOD_WORDS]
    if len(known) == 1:
        return known[0]
    raise DataError(
        f"The labels in '{column}' are {' and '.join(map(repr, kinds))}; say with "
        "--positive VALUE which one is good."
    )
