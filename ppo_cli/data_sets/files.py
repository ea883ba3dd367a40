"""Read JSON, JSONL (also gzipped), parquet and Arrow files as records with their row numbers.

A new file format is one line in FORMATS. A saved set is a folder of `Dataset.save_to_disk`.

A row that does not parse becomes a problem with its place, so that all bad rows are reported at
once; a file that cannot be read at all is a DataError.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shlex
import weakref
import zlib
from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO, Any

from ppo_cli.errors import DataError, did_you_mean, first_line, ppo
from ppo_cli.machine.memory import host_memory, own_memory
from ppo_cli.paths import load_json, read_text, user_path

SHOWN = 5  # causes in a message, and row numbers of each


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
        """Store the column with the message."""
        super().__init__(message)
        self.column = column


def group_problems(problems: Iterable[RowProblem], limit: int = SHOWN) -> list[str]:
    """Return a line for each cause: the first row in full, the numbers of the next, a count."""
    # The same problem in many rows of a file is one cause.
    groups: dict[tuple[str, str, str], list[RowProblem]] = {}
    for problem in problems:
        cause = (problem.place.file, problem.column, problem.message)
        groups.setdefault(cause, []).append(problem)
    lines = []
    for first, *others in groups.values():
        # Only the first rows of a cause are listed.
        numbers = ", ".join(str(problem.place.number) for problem in others[: limit - 1])
        if len(others) >= limit:
            numbers += f" and {len(others) - limit + 1} more"
        also = f" (also {first.place.unit} {numbers})" if others else ""
        lines.append(f"{first}{also}")
    return lines


def raise_problems(problems: Sequence[RowProblem], check_flags: Sequence[str] | None = ()) -> None:
    """Raise one DataError with the number of bad rows and the first causes, if there are any.

    `check_flags` are the flags with which `ppo data check` finds the same problems; None if it does
    not: it knows neither responses nor labels.
    """
    if not problems:
        return
    rows = len({problem.place for problem in problems})
    causes = group_problems(problems)
    lines = causes[:SHOWN]
    if len(causes) > SHOWN:
        lines.append(f"… and {len(causes) - SHOWN} more.")
    if rows > 1:
        lines.insert(0, f"{rows} bad rows:")
    # The command that lists every bad row.
    if check_flags is None:
        lines.append("Correct or remove them.")
    else:
        files = dict.fromkeys(problem.place.file for problem in problems)
        command = ppo(shlex.join(["data", "check", *files, *check_flags]))
        lines.append(f"Correct or remove them; `{command}` names them all.")
    raise DataError("\n".join(lines))


def count_episodes(source: str) -> int | None:
    """Return N of the source `episodes:N`, rows without a prompt; None for any other source."""
    name, _, number = source.partition(":")
    return int(number) if name == "episodes" and number.isdecimal() else None


SHOWN_FILES = 5
# What `ppo data prepare` writes.
SETS = (
    "aime", "big_math", "dapo", "deepmath", "gsm8k", "hh_rlhf", "humaneval", "kodcode", "math",
    "math_500", "polaris", "skywork", "ultrafeedback",
)  # fmt: skip
SPLITS = ("train", "test")
NO_DATA_FILE = "it contains no JSON, JSONL, parquet or Arrow file"
Record = Mapping[str, Any]
# Rows of larger sources stay as they are stored, and are decoded when they are read.
EAGER_ROWS = 20_000


class StoredRecords(Sequence[tuple[Place, Record]]):
    """The records of a large source, decoded each time that they are read.

    `numbers` are those of their places; `names` are the columns of all of them.
    """

    def __init__(
        self, source: str, unit: str, numbers: Sequence[int], names: Iterable[str]
    ) -> None:
        self.source, self.unit, self.numbers = source, unit, numbers
        self.names = tuple(names)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.place(index), self.decode(index)

    def __iter__(self) -> Iterator[tuple[Place, Record]]:
        for index, record in enumerate(self.decode_some(range(len(self)))):
            yield self.place(index), record

    def select(self, names: Sequence[str]) -> StoredRecords:
        """Return these records, if possible without other columns, which take time to decode."""
        return self

    def place(self, index: int) -> Place:
        """Return the place of a record."""
        return Place(self.source, self.numbers[index], self.unit)

    @abstractmethod
    def batches(self) -> Iterator[tuple[range, Any]]:
        """Yield the numbers of consecutive records, with a batch of Arrow that has these rows.

        None in its place: Arrow does not read them, or not in the same way.
        """

    @abstractmethod
    def decode(self, index: int) -> Record:
        """Return one record."""

    def decode_some(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield records, faster than one by one where that is possible."""
        return map(self.decode, indices)


CHANGED = "the file was changed while it was in use. Start again when it no longer changes."
_decode = json.JSONDecoder().decode


class StoredLines(StoredRecords):
    """Lines of JSONL: in their file, or in memory if that is compressed."""

    def __init__(
        self, path: Path, data: bytes | None, numbers: array[int], starts: array[int],
        lengths: array[int], checksums: array[int], names: Iterable[str],
    ) -> None:  # fmt: skip
        super().__init__(str(path), "line", numbers, names)
        self._data, self._starts, self._lengths = data, starts, lengths
        self._checksums = checksums
        # Kept open: a file of this name that is written later has other lines.
        self._descriptor = None if data is not None else os.open(path, os.O_RDONLY)
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)

    def decode(self, index: int) -> Record:
        """Parse the line again."""
        line = self._read(self._starts[index], self._lengths[index])
        self._check(index, line)
        try:
            record: Record = _decode(line.decode())
        except RecursionError as error:
            raise DataError(f"{self.place(index)}: {json_problem(error)}.") from error
        return record

    def _check(self, index: int, line: bytes | memoryview) -> None:
        # Not the time of the file's last change: lines that are added do no harm.
        if zlib.crc32(line) != self._checksums[index]:
            raise DataError(f"{self.place(index)}: {CHANGED}")

    def _read(self, start: int, length: int) -> bytes:
        if self._descriptor is None:
            return (self._data or b"")[start : start + length]
        return os.pread(self._descriptor, length, start)

    def batches(self) -> Iterator[tuple[range, Any]]:
        """Let Arrow read blocks of lines."""
        end = 0
        while (start := end) < len(self):
            end = bisect_right(self._starts, self._starts[start] + BLOCK_BYTES)
            first, last = self._starts[start], end - 1
            lines = self._read(first, self._starts[last] + self._lengths[last] - first)
            block = memoryview(lines)
            for index in range(start, end):
                at = self._starts[index] - first
                self._check(index, block[at : at + self._lengths[index]])
            yield range(start, end), read_as_arrow(lines, end - start)


class StoredBatches(StoredRecords):
    """Rows in batches of Arrow, without those that cannot be decoded."""

    def __init__(self, source: str, batches: Sequence[Any], numbers: Sequence[int]) -> None:
        super().__init__(source, "row", numbers, dict.fromkeys(batches[0].schema.names))
        self._batches = batches
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)

    def select(self, names: Sequence[str]) -> StoredRecords:
        """Return these records without other columns."""
        batches = [batch.select(names) for batch in self._batches]
        return StoredBatches(self.source, batches, self.numbers)

    def batches(self) -> Iterator[tuple[range, Any]]:
        """Return the batches, but not those with rows that cannot be decoded."""
        for start, batch in zip(self._starts, self._batches, strict=False):
            rows = start + 1, start + batch.num_rows + 1
            numbers = range(*(bisect_left(self.numbers, row) for row in rows))
            yield numbers, batch if len(numbers) == batch.num_rows else None

    def decode(self, index: int) -> Record:
        """Decode one row of its batch."""
        return next(self.decode_some([index]))

    def decode_some(self, indices: Sequence[int]) -> Iterator[Record]:
        """Decode consecutive rows of one batch together."""
        from pyarrow.lib import ArrowNotImplementedError

        rows = (self.numbers[index] - 1 for index in indices)
        for batch, in_batch in groupby(rows, lambda row: bisect_right(self._starts, row) - 1):
            stored = self._batches[batch]
            chosen = [row - self._starts[batch] for row in in_batch]
            try:
                parts = [stored.take(chosen)]
            except ArrowNotImplementedError:  # columns of views, or encoded by runs
                parts = [stored.slice(row, 1) for row in chosen]
            yield from chain.from_iterable(part.to_pylist() for part in parts)


ReadResult = tuple[Sequence[tuple[Place, Record]], list[RowProblem]]


@dataclass(frozen=True)
class Records:
    """The contents of one source: its records with their places, and rows that do not parse.

    `files` are those that hold the rows.
    """

    source: str
    label: str
    records: Sequence[tuple[Place, Record]]
    problems: tuple[RowProblem, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        """The columns that occur in any record, in the order of their first rows."""
        if isinstance(self.records, StoredRecords):
            return list(self.records.names)
        return list(dict.fromkeys(name for _, record in self.records for name in record))


def file_suffix(path: Path) -> str:
    """Return `.jsonl.gz` for a gzipped file, the last suffix for any other, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def read_file(source: str, at_most: int | None = None) -> Records:
    """Read one local file or saved set, or its first rows; the suffix chooses the reader."""
    path = user_path(source)
    check_readable(source)
    if count_episodes(source):
        raise DataError(f"{source} has no prompts: an environment opens them. Name a file of rows.")
    # A saved set has Arrow files; any other source is one file.
    if (saved := find_saved(source)) is not None:
        batches = chain.from_iterable(map(_arrow_batches, saved.files))
        rows, bad_rows = read_batches(source, batches, at_most)
        if not rows and not bad_rows:
            raise DataError(f"{source} holds no rows. Give a set with at least one prompt.")
        return Records(source, saved.label, rows, tuple(bad_rows), saved.notes, saved.files)
    # The suffix chooses the reader; the label is the name without it.
    suffix = file_suffix(path)
    records, problems = BY_SUFFIX[suffix].read(path, at_most)
    if not records and not problems:
        raise DataError(f"{path} holds no rows. Give a file with at least one prompt.")
    name = os.fsencode(path.name).decode("utf-8", "replace")
    label = name[: len(name) - len(suffix)]
    return Records(str(path), label, records, tuple(problems), files=(path,))


def check_readable(source: str) -> None:
    """Raise a DataError for a missing file, a folder of files or a suffix without a reader."""
    if find_saved(source) is not None or count_episodes(source):
        return
    path = user_path(source)
    if path.is_dir():
        # A folder is a mistake: suggest the files in it.
        inside = sorted(p.name for p in path.iterdir() if file_suffix(p) in SUFFIXES)
        hint = f"name a file in it: {', '.join(inside[:SHOWN_FILES])}" if inside else NO_DATA_FILE
        raise DataError(f"{path} is a folder; {hint}.")
    if not path.exists():
        hub = "" if "/" in source or path.suffix else " Data sets of the hub are named OWNER/NAME."
        raise DataError(f"{path}: no such file.{nearest_file(path)}{hub}")
    if not path.is_file():
        raise DataError(f"{path} is a pipe or a device. Write the rows to a file and name that.")
    if file_suffix(path) not in SUFFIXES:
        kind = file_suffix(path) or "no suffix"
        raise DataError(
            f"{path}: files of this kind ({kind}) are not read. "
            f"Convert it to one of {', '.join(SUFFIXES)}."
        )


def nearest_file(path: Path) -> str:
    """Suggest a data file next to a missing file, or say that the folder is missing."""
    folder = path.parent
    if not folder.is_dir():
        command = ppo(f"data prepare {folder.name} --out {shlex.quote(str(folder))}")
        makes = f" `{command}` makes it." if folder.name in SETS else ""
        return f" The folder {folder} does not exist either.{makes}"
    # A similar name, or the data files of the folder.
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    data = [name for name in names if file_suffix(Path(name)) in SUFFIXES]
    near = did_you_mean(path.name, data)
    neighbours = f" Data files there: {', '.join(data[:SHOWN_FILES])}." if data else ""
    return near or neighbours


DATASET_DICT, STATE = "dataset_dict.json", "state.json"  # written by save_to_disk


@dataclass(frozen=True)
class SavedSet:
    """One split of a folder of `save_to_disk`: the Arrow files with its rows, in order."""

    label: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def saved_folder(source: str) -> tuple[Path, str] | None:
    """Return the folder of `save_to_disk` and the split behind FOLDER or FOLDER:SPLIT, if any."""
    # Folder names may contain colons: the whole name is tried first.
    folder, _, split = source.rpartition(":")
    for path, name in ((Path(source), ""), (Path(folder), split)):
        path = user_path(path)
        if any((path / file).is_file() for file in (DATASET_DICT, STATE)) and source != f":{split}":
            return path, name
    return None


def saved_splits(folder: Path) -> list[str]:
    """Return the splits of a folder of `DatasetDict.save_to_disk`, none for any other folder."""
    file = folder / DATASET_DICT
    return _read_list(file, "splits") if file.is_file() else []


def find_saved(source: str) -> SavedSet | None:
    """Return the set at FOLDER or FOLDER:SPLIT; None if no set was saved there.

    In a folder of several splits `train` is the default, as on the hub.
    """
    saved = saved_folder(source)
    if saved is None:
        return None
    folder, split = saved
    # A folder of several splits has a folder for each.
    notes, label = [], folder.name
    if splits := saved_splits(folder):
        names = ", ".join(splits)
        if not split:
            split = splits[0] if len(splits) == 1 else SPLITS[0]
            if len(splits) > 1:
                notes = [f"{folder}: split {split} of {names}; {folder}:SPLIT names another."]
        if split not in splits:
            raise DataError(
                f"{source}: the saved splits are {names}. Name one: {folder}:{splits[0]}."
                f"{did_you_mean(split, splits)}"
            )
        folder, label = folder / split, f"{folder.name}-{split}"
    elif split:
        raise DataError(f"{source}: {folder} was saved without splits. Name {folder} alone.")
    # The state lists the Arrow files; a partial copy lacks some.
    entries = _read_list(folder / STATE, "_data_files")
    files = tuple(folder / str(entry["filename"]) for entry in entries)
    if lost := next((file for file in files if not file.is_file()), None):
        raise DataError(f"{lost}: no such file, and {STATE} names it. Copy the whole folder again.")
    return SavedSet(label, files, tuple(notes))


def _read_list(file: Path, name: str) -> list[Any]:
    """Return a list that `save_to_disk` wrote into one of its JSON files."""
    try:
        # Shuffled or filtered sets refer to an index file, which is not supported.
        facts = load_json(read_text(file))
        if facts.get("_indices_data_files"):
            raise ValueError("rows are chosen by a separate file of indices")
        return list(facts[name])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: not what `save_to_disk` writes today ({first_line(error)}). Save the set "
            "again, or write it with `Dataset.to_parquet`."
        ) from error


BATCH_ROWS = 1024  # fewer are slower, more need more memory for text


@contextmanager
def _wrap_arrow_errors(source: str, kind: str) -> Iterator[None]:
    """Turn Arrow's errors, which have six different base classes, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(
            f"{source}: its rows do not fit into memory ({first_line(error)}). Drop columns that "
            "are not needed, or split the file."
        ) from error
    except Exception as error:
        raise DataError(
            f"{source}: not a readable {kind} file ({first_line(error)}). Copy or write it again; "
            "plain JSONL always works."
        ) from error


def _check_columns(source: str, fields: Iterable[Any], group: str = "") -> None:
    """Raise a DataError if two columns, or two fields of one group, have the same name."""
    names: set[str] = set()
    for field in fields:
        name = f"{group}{field.name}"
        if name in names:
            raise DataError(
                f"{source}: two columns are named '{name}'; rename or drop one of them."
            )
        names.add(name)
        # Structs may repeat names as well.
        if hasattr(field.type, "field"):
            inner = [field.type.field(index) for index in range(field.type.num_fields)]
            _check_columns(source, inner, f"{name}.")


def _parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the rows of a parquet file in batches.

    Arrow cannot return more than 2 GiB of nested text at once; a file with larger batches is read
    row by row.
    """
    from pyarrow.lib import ArrowNotImplementedError
    from pyarrow.parquet import ParquetFile

    with _wrap_arrow_errors(str(path), "parquet"), ParquetFile(path) as file:
        _check_columns(str(path), file.schema_arrow)
        # After the error, continue with the row that was not returned yet.
        rows = 0
        try:
            for batch in file.iter_batches(BATCH_ROWS):
                yield batch
                rows += batch.num_rows
        except ArrowNotImplementedError:
            yield from islice(file.iter_batches(1), rows, None)


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yield the batches of an Arrow file or stream; both use the suffix .arrow."""
    import pyarrow as pa

    with _wrap_arrow_errors(str(path), "Arrow"), pa.memory_map(str(path)) as source:
        # Only files start with the magic bytes.
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches: Iterable[Any] = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = file = pa.ipc.open_stream(source)
        _check_columns(str(path), file.schema)
        for batch in batches:
            batch.validate(full=True)  # flipped bits would end the process, not raise
            yield batch


def read_parquet(path: Path, at_most: int | None = None) -> ReadResult:
    """Read the rows of a parquet file as plain Python values."""
    return read_batches(str(path), _parquet_batches(path), at_most)


def read_arrow(path: Path, at_most: int | None = None) -> ReadResult:
    """Read the rows of an Arrow file or stream as plain Python values."""
    return read_batches(str(path), _arrow_batches(path), at_most)


def read_batches(source: str, batches: Iterable[Any], at_most: int | None = None) -> ReadResult:
    """Read at most `at_most` rows of Arrow batches, numbered across batches.

    Beyond EAGER_ROWS, batches are validated and kept in place of their records.
    """
    records: list[tuple[Place, Record]] = []
    problems: list[RowProblem] = []
    stored: list[Any] = []
    number = 0
    with _wrap_arrow_errors(source, "Arrow"):
        for batch in batches:
            batch = batch if at_most is None else batch.slice(0, at_most - number)
            stored.append(batch)
            if number > EAGER_ROWS and _is_valid(batch):
                number += batch.num_rows
                continue
            # Rows are numbered across all batches.
            places = [Place(source, number + index + 1) for index in range(batch.num_rows)]
            # Text that is not UTF-8 makes only its row bad.
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                rows, bad_rows = _row_by_row(places, batch)
                problems += bad_rows
            records += [pair for pair in zip(places, rows, strict=True) if pair[1] is not None]
            number += batch.num_rows
            if number == at_most:
                break
    if number <= EAGER_ROWS:
        return records, problems
    bad = {problem.place.number for problem in problems}
    numbers = range(1, number + 1)
    good = array("q", (n for n in numbers if n not in bad)) if bad else numbers
    return StoredBatches(source, stored, good), problems


def _is_valid(batch: Any) -> bool:
    """Whether all text of a batch is UTF-8."""
    from pyarrow.lib import ArrowInvalid

    try:
        batch.validate(full=True)
    except ArrowInvalid:
        return False
    return True


def _row_by_row(
    places: Sequence[Place], batch: Any
) -> tuple[list[Record | None], list[RowProblem]]:
    """Read a batch cell by cell, because some text is not UTF-8; rows with such text are None."""
    rows: list[Record | None] = [{} for _ in places]
    problems: list[RowProblem] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for index, cell in enumerate(column):
            try:
                value = cell.as_py()
            except UnicodeDecodeError as error:
                # The other cells of the row are still read: they may be bad too.
                byte = error.object[error.start]
                problem = f"is not UTF-8 (byte 0x{byte:02x})"
                problems.append(RowProblem(places[index], name, problem))
                rows[index] = None
            else:
                rows[index] = None if rows[index] is None else {**(rows[index] or {}), name: value}
    return rows, problems


def _count_parquet(path: Path) -> int:
    from pyarrow.lib import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(path).num_rows)
    except ArrowException as error:
        raise ValueError(str(error)) from None


def _count_arrow(path: Path) -> int:
    return sum(batch.num_rows for batch in _arrow_batches(path))


def read_json(path: Path, at_most: int | None = None) -> ReadResult:
    """Read a JSON list of rows, an object with such a list in `data`, or JSONL with this suffix."""
    data = read_bytes(path)
    try:
        document, twice = parse_json(data)
    except json.JSONDecodeError as error:
        # A JSONL file with the suffix .json.
        if error.msg == "Extra data" and data.lstrip().startswith(b"{"):
            records, problems = read_lines(path, io.BytesIO(data), data)
            return records if at_most is None else records[:at_most], problems
        where = f"line {error.lineno} column {error.colno}"
        raise DataError(f"{path} {where}: not JSON ({error.msg}).") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: {json_problem(error)}") from error
    except RecursionError as error:
        raise DataError(f"{path}: {json_problem(error)}") from error
    # The document is the list, or an object with the list.
    rows = document
    if isinstance(document, dict):
        rows = document.get("data")
        if not isinstance(rows, list):
            keys = ", ".join(map(repr, list(document)[:8])) or "none"
            raise DataError(
                f"{path} is one JSON object (keys: {keys}), not rows. "
                'Give a list of rows, {"data": [rows]}, or one row a line as .jsonl.'
            )
    if not isinstance(rows, list):
        raise DataError(f"{path} holds {name_type(document)}, not a list of rows.")
    records, problems = [], []
    for number, row in enumerate(rows, start=1):
        place = Place(str(path), number)
        try:
            records.append((place, as_record(row, twice)))
        except ValueError as error:
            problems.append(RowProblem(place, "", str(error)))
    return records[:at_most], problems


def _count_json(path: Path) -> int | None:
    with _open(path) as file:
        rows = load_json(file.read())
    if isinstance(rows, dict):
        rows = rows.get("data")
    return len(rows) if isinstance(rows, list) else None


def read_jsonl(path: Path, at_most: int | None = None) -> ReadResult:
    """Read JSONL, or a JSON list with this suffix."""
    large = at_most is None and not path.name.endswith(".gz") and path.stat().st_size > LARGE_BYTES
    data = read_bytes(path, 1 if large else at_most)
    if data.lstrip().startswith(b"["):
        return read_json(path, at_most)
    if large:
        with path.open("rb") as file:
            return read_lines(path, file, None)
    return read_lines(path, io.BytesIO(data), data)


def _count_jsonl(path: Path) -> int:
    with _open(path) as file:
        return sum(1 for line in file if line.strip())


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if file_suffix(path).endswith(".gz") else path.open("rb")


# Shares of the machine's memory for the text of a file, and for this process while it reads rows,
# which take several times as much. A few megabytes of gzip may hold more than that.
TEXT_SHARE, ROWS_SHARE = 8, 2
CHUNK_BYTES = 1 << 24
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGE_BYTES = 1 << 22  # of a file that is read line by line
BLOCK_BYTES = 1 << 22  # of lines that Arrow reads at once
# Names that Arrow reads as numbers and JSON does not know. The search is fast for plain letters.
OTHER_INFINITY = re.compile(rb"Inf(?<=[\s:,\[-]Inf)[\s,\]}]")
OTHER_NAN = re.compile(rb"-NaN(?<=[\s:,\[]-NaN)[\s,\]}]")
# Python limits the digits of a number to 4300: 4301 digits have 16 in a row of each 256th byte.
MANY_DIGITS = re.compile(rb"\d{16}")
KEY = re.compile(rb'"[^"]*"\s*:')  # or the end of one
# From so many lines Arrow infers the columns of a block; fewer first, as there may be too many.
SCHEMA_LINES = 15, 125, 1000
MAX_FIELDS = 256  # each takes memory in all rows of a block
MAX_OPEN = 500  # brackets in a line: Arrow's reader is recursive, without a limit


def _too_large(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what} than fits into this machine's memory. Split the file.")


def _read_all(path: Path, file: IO[bytes] | gzip.GzipFile) -> bytes:
    """Return what is left of a file; in chunks, so that it has a limit and Ctrl-C ends it."""
    data, limit = bytearray(), host_memory() // TEXT_SHARE
    while chunk := file.read(CHUNK_BYTES):
        data += chunk
        if len(data) > limit:
            raise _too_large(
                path, f"more than {limit / 2**30:.3g} GiB of text, whose rows take more"
            )
    return bytes(data)


def read_bytes(path: Path, lines: int | None = None) -> bytes:
    """Return the uncompressed bytes of a file or its first lines, without a byte order mark."""
    try:
        with _open(path) as file:
            data = _read_all(path, file) if lines is None else b"".join(islice(file, lines))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: broken gzip data ({first_line(error)}). Copy it again."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    # Byte order marks.
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16. Save it as UTF-8.")
    data = data.removeprefix(BYTE_ORDER_MARK)
    if not data.strip():
        raise DataError(f"{path} is empty. Give a file with at least one prompt.")
    return data


def read_lines(path: Path, file: IO[bytes], data: bytes | None) -> ReadResult:
    """Parse one JSON object in each line; blank lines are counted and skipped.

    More than EAGER_ROWS records are parsed again when they are read: from `data`, or from the file.
    """
    records: list[tuple[Place, Record]] = []
    problems: list[RowProblem] = []
    numbers, starts, lengths, checksums = array("q"), array("q"), array("q"), array("I")
    names: dict[str, None] = {}
    number = end = 0
    parse, repeated = _make_parser()
    while block := file.readlines(BLOCK_BYTES):
        _, resident = own_memory() or (0, 0)
        if number > EAGER_ROWS and resident > host_memory() // ROWS_SHARE:
            raise _too_large(path, f"more than {number:,} rows, which take more")
        # Of a large file Arrow checks whole blocks, and names their columns.
        batch = None
        if len(numbers) > EAGER_ROWS:
            records.clear()
            batch = read_as_arrow(b"".join(block), sum(1 for line in block if line.strip()))
            names |= dict.fromkeys(batch.schema.names if batch is not None else ())
        for line in block:
            number, start, end = number + 1, end, end + len(line)
            if number == 1 and line.startswith(BYTE_ORDER_MARK):
                start, line = start + len(BYTE_ORDER_MARK), line.removeprefix(BYTE_ORDER_MARK)
            # Blank lines keep their number.
            if not line.strip():
                continue
            if batch is None:
                place = Place(str(path), number, "line")
                try:
                    record = parse(line)
                except (ValueError, RecursionError):
                    record = None
                if type(record) is not dict or repeated:
                    repeated.clear()
                    # Parsed again for the message.
                    try:
                        record = as_record(*parse_json(line.rstrip(b"\n")))
                    except (ValueError, RecursionError) as error:
                        problems.append(RowProblem(place, "", json_problem(error)))
                        continue
                if not record.keys() <= names.keys():
                    names |= dict.fromkeys(record)
                if len(numbers) < EAGER_ROWS:
                    records.append((place, record))
            numbers.append(number)
            starts.append(start)
            lengths.append(len(line))
            checksums.append(zlib.crc32(line))
    if len(numbers) <= EAGER_ROWS:
        return records, problems
    return StoredLines(path, data, numbers, starts, lengths, checksums, names), problems


def read_as_arrow(lines: bytes, count: int) -> Any:
    """Return `count` lines of JSON as a batch of Arrow; None if it may read them otherwise."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    # One object a line: Arrow also reads several in one, and one in several.
    begins = lines.startswith(b"{") + lines.count(b"\n{")
    ends = lines.endswith(b"}") + lines.count(b"}\n") + lines.count(b"}\r\n")
    if not begins == ends == count or MANY_DIGITS.search(lines[::256]):
        return None
    split = lines.split(b"\n")
    heads = [b"\n".join(split[:number]) for number in SCHEMA_LINES]
    if (
        OTHER_INFINITY.search(lines)
        or OTHER_NAN.search(lines)
        or any(len(x) > MAX_OPEN and x.count(b"[") + x.count(b"{") > MAX_OPEN for x in split)
        or len(set(KEY.findall(heads[-1]))) > MAX_FIELDS
    ):
        return None

    def read(text: bytes, schema: Any) -> Any:
        return arrow_json.read_json(
            pa.BufferReader(text),
            arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            arrow_json.ParseOptions(
                explicit_schema=schema,
                unexpected_field_behavior="infer" if schema is None else "error",
            ),
        )

    try:
        lines.decode()  # keys too
        for head in heads:
            schema = read(head, None).schema
            # One line for each field, also inside others.
            if schema.to_string().count("\n") >= MAX_FIELDS:
                return None
        table = read(lines, schema)
        table.validate(full=True)  # UTF-8
    except (UnicodeDecodeError, pa.ArrowException):
        return None
    batches = table.combine_chunks().to_batches()
    return batches[0] if [batch.num_rows for batch in batches] == [count] else None


def _make_parser() -> tuple[Callable[[bytes], Any], list[str]]:
    """Return a fast parser of a line, and the list to which it adds repeated keys."""
    repeated: list[str] = []

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            repeated.append(pairs[0][0])
        return result

    decode = json.JSONDecoder(object_pairs_hook=pairs_to_dict).decode
    return lambda line: decode(line.decode()), repeated


def parse_json(data: bytes) -> tuple[Any, dict[int, str]]:
    """Parse JSON; also return a repeated key of each object that has one, by the object's `id`."""
    twice: dict[int, str] = {}

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # A dictionary keeps only the last value of a repeated key.
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            twice[id(result)] = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return result

    return json.loads(data.decode("utf-8"), object_pairs_hook=pairs_to_dict), twice


def _repeated_key(value: Any, twice: Mapping[int, str]) -> str | None:
    """Return a key that is repeated in an object, or in an object inside it."""
    if isinstance(value, dict):
        if id(value) in twice:
            return twice[id(value)]
        value = list(value.values())
    # Objects inside the row.
    inner = (_repeated_key(item, twice) for item in value) if isinstance(value, list) else ()
    return next((key for key in inner if key is not None), None)


def as_record(value: Any, twice: Mapping[int, str]) -> Record:
    """Return a row that is a JSON object without repeated keys; else raise ValueError."""
    if isinstance(value, dict):
        if twice and (key := _repeated_key(value, twice)) is not None:
            raise ValueError(f"the key {key!r} appears twice in one object; keep one of them")
        return value
    raise ValueError(f'the row is {name_type(value)}, not an object such as {{"prompt": …}}')


def json_problem(error: Exception) -> str:
    """Explain briefly why a text is not a JSON row."""
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at character {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x}). Save the file as UTF-8."
    if isinstance(error, RecursionError):
        return "not readable JSON (nested too deeply)"
    return str(error)


TYPE_NAMES = {
    "str": "text", "int": "a number", "float": "a number", "bool": "true or false",
    "NoneType": "null", "list": "a list", "tuple": "a list", "dict": "an object",
}  # fmt: skip


def name_type(value: object) -> str:
    """Return the type of a JSON value in plain words."""
    name = type(value).__name__
    return TYPE_NAMES.get(name, f"a {name}")


@dataclass(frozen=True)
class Format:
    """A format of local files: its suffixes, and how rows are read and counted.

    `read` gets the maximum number of rows; `count` returns None for a file without rows.
    """

    suffixes: tuple[str, ...]
    read: Callable[[Path, int | None], ReadResult]
    count: Callable[[Path], int | None]


# All formats of local files; lists and messages are made from this table.
FORMATS = (
    Format((".json", ".json.gz"), read_json, _count_json),
    Format((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), read_jsonl, _count_jsonl),
    Format((".parquet",), read_parquet, _count_parquet),
    Format((".arrow",), read_arrow, _count_arrow),
)
BY_SUFFIX = {suffix: format_ for format_ in FORMATS for suffix in format_.suffixes}
SUFFIXES = tuple(sorted(BY_SUFFIX, key=lambda suffix: suffix.endswith(".gz")))


def count_rows(path: str) -> int | None:
    """Return the number of rows in a local file or saved set; None when it cannot be counted."""
    if episodes := count_episodes(path):
        return episodes
    file = user_path(path)
    format_ = BY_SUFFIX.get(file_suffix(file))
    try:
        if (saved := find_saved(path)) is not None:
            return sum(map(_count_arrow, saved.files))
        return format_.count(file) if format_ is not None and file.is_file() else None
    except (OSError, EOFError, ValueError, zlib.error):
        return None
