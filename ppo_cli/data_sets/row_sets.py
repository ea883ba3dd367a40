"""Read the rows of sources: files, hub sets and episodes without a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from ppo_cli.data_sets.facts import RowFacts, check_records
from ppo_cli.data_sets.files import (
    Place,
    Record,
    RowError,
    RowProblem,
    StoredRecords,
    count_episodes,
    raise_problems,
)
from ppo_cli.data_sets.rows import (
    Columns,
    Row,
    RowPrompt,
    column_notes,
    find_columns,
    has_nan_truth,
    is_media,
    list_answer_like,
    read_row,
)
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError

BLOCK_ROWS = 4096  # whose prompts are read together
MAX_SAME = 5  # files that are named with the same note


class EpisodeRows(Sequence[Row]):
    """Rows without a prompt, for an environment that opens the episodes by their numbers."""

    def __init__(self, source: str, tasks: range) -> None:
        self.source, self.tasks = source, tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        task = self.tasks[index]
        if isinstance(task, range):
            return EpisodeRows(self.source, task)
        return Row(Place(self.source, task + 1), (), None, "", {"task": task})


class StoredRows(Sequence[Row]):
    """The usable rows of a large source, read from its records each time that they are needed."""

    def __init__(
        self, records: StoredRecords, files: tuple[Path, ...],
        read: Callable[[Place, Record], Row], usable: Sequence[int], facts: RowFacts,
        prompt_column: str,
    ) -> None:  # fmt: skip
        self.records, self.files, self.facts = records, files, facts
        self._read, self._usable, self._prompt_column = read, usable, prompt_column

    def __len__(self) -> int:
        return len(self._usable)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._read(*self.records[self._usable[index]])
        return [self[i] for i in range(*index.indices(len(self)))]

    def __iter__(self) -> Iterator[Row]:
        usable = iter(self._usable)
        following = next(usable, None)
        for index, (place, record) in enumerate(self.records):
            if following is None:
                return
            if index == following:
                yield self._read(place, record)
                following = next(usable, None)

    def limit(self, count: int) -> StoredRows:
        """Return the first rows."""
        first = copy(self)
        first._usable = self._usable[:count]
        return first

    def place(self, index: int) -> Place:
        """Return the place of a row, without reading it."""
        return self.records.place(self._usable[index])

    def prompts(self, chosen: Any) -> Iterator[list[RowPrompt]]:
        """Yield the prompts of rows in blocks, those of plain rows as their column has them.

        `chosen` is an array that is True for the rows which are read.
        """
        records, end = self.records, 0
        for numbers, batch in records.batches():
            begin, end = end, bisect_left(self._usable, numbers.stop, end)
            for start in range(begin, end, BLOCK_ROWS):
                rows = (chosen[start : min(start + BLOCK_ROWS, end)].nonzero()[0] + start).tolist()
                indices = [self._usable[row] for row in rows]
                plain = [batch is not None and self.facts.plain[row] for row in rows]
                stored: Iterator[Any] = iter(())
                if any(plain):
                    inside = [index - numbers.start for index in compress(indices, plain)]
                    column = batch.column(self._prompt_column).take(inside)
                    stored = iter(column.to_pylist())
                others = [i for i, is_plain in zip(indices, plain, strict=True) if not is_plain]
                read = map(self._read, map(records.place, others), records.decode_some(others))
                yield [_as_prompt(next(stored)) if p else next(read).prompt for p in plain]


def _as_prompt(value: Any) -> RowPrompt:
    """Return the prompt of a plain row, without the null fields of its messages."""
    if isinstance(value, str):
        return value
    return tuple({k: v for k, v in message.items() if v is not None} for message in value)


@dataclass(frozen=True)
class RowSet:
    """The rows of one source, its bad rows, and notes for the user."""

    source: str
    label: str
    rows: Sequence[Row]
    problems: tuple[RowProblem, ...]
    columns: Columns
    notes: tuple[str, ...] = ()


def list_notes(sets: Sequence[RowSet]) -> list[str]:
    """Return the notes of sets; of many files with the same one only the first is named."""
    notes = [(f"{Path(rows.source).name}: ", note) for rows in sets for note in rows.notes]
    counts = Counter(note.removeprefix(file) for file, note in notes)
    shown: dict[str, None] = {}
    for file, note in notes:
        text = note.removeprefix(file)
        if text != note and counts[text] > MAX_SAME:
            first = next(name for name, other in notes if other == f"{name}{text}")
            note = f"{first[:-2]} and {counts[text] - 1} more files: {text}"
        shown[note] = None
    return list(shown)


def load_sets(
    sources: Sequence[str],
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    keep_columns: bool = False,
    max_samples: int = -1,
    at_most: int | None = None,
) -> list[RowSet]:
    """Read files or hub sets as rows; DataError with all bad rows if there are any.

    `max_samples` keeps the first rows over all sources. `at_most` limits the rows that are read,
    but at least one row of every source is read. `keep_columns`: rows keep all their columns.
    """
    # `at_most` is for a quick look: it is shared by the sources.
    sets: list[RowSet] = []
    remaining = at_most
    for source in sources:
        keys: dict[str, Any] = {
            "prompt_key": prompt_key, "source_key": source_key, "answer_key": answer_key,
            "keep_columns": keep_columns,
        }  # fmt: skip
        sets.append(load_rows(source, **keys, at_most=remaining))
        remaining = None if remaining is None else max(1, remaining - len(sets[-1].rows))
    # All bad rows of all sources are one error.
    raise_problems([problem for rows in sets for problem in rows.problems])
    if max_samples >= 0:
        limited: list[RowSet] = []
        for rows in sets:
            limit = max_samples - sum(len(earlier.rows) for earlier in limited)
            first = (
                rows.rows.limit(limit) if isinstance(rows.rows, StoredRows) else rows.rows[:limit]
            )
            limited.append(replace(rows, rows=first))
        sets = limited
    # No rows at all: say why.
    if any(rows.rows for rows in sets):
        return sets
    if not sources:
        raise DataError("No prompt files were given. Name some with --train_files.")
    if max_samples == 0:
        raise DataError(
            "The sample limit 0 leaves no prompts; -1 uses all (data.train_max_samples)."
        )
    raise DataError(f"{', '.join(sources)}: no usable rows.")


def load_rows(
    source: str,
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    keep_columns: bool = False,
    at_most: int | None = None,
) -> RowSet:
    """Read one file or hub set as rows; bad rows are collected as problems."""
    if episodes := count_episodes(source):
        opened = EpisodeRows(source, range(min(episodes, at_most or episodes)))
        return RowSet(source, "episodes", opened, (), Columns(prompt_key, "", source_key, ()))
    # A source without records has no columns to find.
    raw = read_source(source, at_most)
    if not raw.records:
        columns = Columns(prompt_key, "", source_key, ())
        return RowSet(raw.source, raw.label, (), raw.problems, columns)
    columns = find_columns(raw, prompt_key, source_key, answer_key)
    read = partial(read_row, columns=columns, keep_columns=keep_columns)
    problems = list(raw.problems)
    answered, nans = False, 0

    def read_checked(place: Place, record: Record) -> Row | None:
        nonlocal answered, nans
        try:
            row = read(place, record)
        except RowError as error:
            problems.append(RowProblem(place, error.column, str(error)))
            return None
        if row.ground_truth is not None:
            answered = True
        else:
            nans += has_nan_truth(record, columns.ground_truth)
        return row

    rows: Sequence[Row]
    if isinstance(raw.records, StoredRecords):
        # Other columns take time to decode.
        needed = [n for n in raw.names if keep_columns or n not in columns.unused or is_media(n)]
        records = raw.records.select(needed)
        facts, usable, in_columns = check_records(records, columns, read_checked)
        rows = StoredRows(records, raw.files, read, usable, facts, columns.prompt)
        answered = answered or in_columns
    else:
        read_rows = (read_checked(place, record) for place, record in raw.records)
        rows = tuple(row for row in read_rows if row is not None)
    problems.sort(key=lambda problem: problem.place.number)
    if rows and not answered:
        columns = replace(columns, answers=tuple(list_answer_like(raw, columns)))
    notes = (*raw.notes, *column_notes(raw, columns, prompt_key))
    if nans:
        notes += (
            f"{Path(raw.source).name}: NaN is no ground truth: {nans:,} of {len(raw.records):,} "
            "rows have none.",
        )
    return RowSet(raw.source, raw.label, rows, tuple(problems), columns, notes)
