"""Reads JSON, JSONL (also gzipped), parquet and hub sets to records with their row numbers.

A new file format is one line in FORMATS.

A row that does not parse becomes a problem with its place, so that all bad rows are reported at
once; a file that cannot be read at all is a DataError. A hub set is `OWNER/NAME` or
`OWNER/NAME/CONFIG`, each with `:SPLIT` if wanted.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from ppo_cli.errors import DataError, did_you_mean, first_line, ppo

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


HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?"
)


@dataclass(frozen=True)
class HubName:
    """A hub set in parts; the split is `train` when none is given."""

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """Return a short name for the uids of its rows."""
        parts = [self.name.rsplit("/", 1)[-1], self.config, self.split]
        return "-".join(part for part in parts if part)


def is_hub_name(source: str) -> bool:
    """Tell whether a source that is no file on this disk can be the name of a hub set."""
    if source.startswith((".", "/", "~")) or Path(source).expanduser().exists():
        return False
    of_files = (*SUFFIXES, ".csv", ".tsv", ".txt", ".gz", ".arrow")
    return not file_suffix(Path(source)).endswith(of_files) and bool(HUB_NAME.fullmatch(source))


def parse_hub_name(source: str) -> HubName:
    """Split `OWNER/NAME/CONFIG:SPLIT` into its parts."""
    match = HUB_NAME.fullmatch(source)
    if match is None:
        raise DataError(f"'{source}' is neither a file nor OWNER/NAME[/CONFIG][:SPLIT] on the hub.")
    return HubName(match["name"], match["config"], match["split"] or "train")


def read_hub(source: str) -> Records:
    """Load one split of a hub set; every failure is reported in one sentence."""
    hub = parse_hub_name(source)
    from datasets import load_dataset

    try:
        rows = load_dataset(hub.name, hub.config, split=hub.split).to_list()
    except (OSError, ValueError, RuntimeError) as error:
        config = f", config '{hub.config}'" if hub.config else ""
        near = nearest_file(Path(source))
        raise DataError(
            f"'{source}' is no file here, and the hub set '{hub.name}'{config}, split "
            f"'{hub.split}' did not load ({first_line(error)}); a local JSON, JSONL or parquet "
            f"file works without the hub.{near if 'Did you mean' in near else ''}"
        ) from error
    if not rows:
        raise DataError(f"{source}: split '{hub.split}' of the hub set holds no rows.")
    found = tuple((Place(source, number), row) for number, row in enumerate(rows, start=1))
    return Records(source, hub.label, found)


SHOWN_FILES = 5
SETS = ("gsm8k", "hh_rlhf", "humaneval", "math")  # that `ppo data prepare` makes
SPLITS = ("train", "test")
NO_DATA_FILE = "it holds no JSON, JSONL or parquet file"
Record = Mapping[str, Any]
Found = tuple[list[tuple[Place, Record]], list[RowProblem]]


@dataclass(frozen=True)
class Records:
    """What one source holds: parsed records with their places, and the rows that do not parse."""

    source: str
    label: str
    records: tuple[tuple[Place, Record], ...]
    problems: tuple[RowProblem, ...] = ()


def file_suffix(path: Path) -> str:
    """Return `.jsonl.gz` for a gzipped file, the last suffix for any other, in lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def split_sources(source: str) -> dict[str, list[str]]:
    """Return the sources of each split: files of a folder, one file, or names on the hub.

    A file belongs to the split that its name, or a folder around it, says last
    (`train-00000.parquet`, `test/algebra/1.json`); a file given by itself is `train` otherwise.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return {_split_of(path.name) or SPLITS[0]: [str(path)]}
    if not path.is_dir():
        return {split: [f"{source}:{split}"] for split in SPLITS}
    found: dict[str, list[str]] = {}
    for file in sorted(path.rglob("*")):
        if file_suffix(file) in SUFFIXES and file.is_file():
            found.setdefault(_split_of(str(file.relative_to(path))), []).append(str(file))
    named = {split: found[split] for split in SPLITS if split in found}
    if not named:
        raise DataError(
            f"{path} holds no file of a split; expected train.jsonl and test.jsonl (.gz too), "
            "parquet files, or folders `train` and `test`."
        )
    return named


def _split_of(name: str) -> str:
    words = [word for word in re.findall("[a-z]+", name.lower()) if word in SPLITS]
    return words[-1] if words else ""


def read_file(source: str, at_most: int | None = None) -> Records:
    """Read one local file, or its first lines or rows; its suffix chooses the reader."""
    path = Path(source).expanduser()
    check_readable(path)
    suffix = file_suffix(path)
    found, problems = BY_SUFFIX[suffix].read(path, at_most)
    if not found and not problems:
        raise DataError(f"{path} holds no rows. Give a file with at least one prompt.")
    name = path.name
    return Records(str(path), name[: len(name) - len(suffix)], tuple(found), tuple(problems))


def check_readable(path: Path) -> None:
    """Raise a DataError for a missing file, a folder or a suffix without a reader."""
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if file_suffix(p) in SUFFIXES)
        hint = f"name a file in it: {', '.join(inside[:SHOWN_FILES])}" if inside else NO_DATA_FILE
        raise DataError(f"{path} is a folder; {hint}.")
    if not path.exists():
        raise DataError(f"{path}: no such file.{nearest_file(path)}")
    if not path.is_file():
        raise DataError(f"{path} is a pipe or a device. Write the rows to a file and name that.")
    if file_suffix(path) not in SUFFIXES:
        kind = file_suffix(path) or "no suffix"
        raise DataError(
            f"{path}: files of this kind ({kind}) are not read. "
            f"Convert it to one of {', '.join(SUFFIXES)}."
        )


def nearest_file(path: Path) -> str:
    """Suggest a data file beside a missing file, or say that the folder lacks."""
    folder = path.parent
    if not folder.is_dir():
        command = ppo(f"data prepare {folder.name} --out {shlex.quote(str(folder))}")
        makes = f" `{command}` makes it." if folder.name in SETS else ""
        return f" The folder {folder} does not exist either.{makes}"
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    data = [name for name in names if file_suffix(Path(name)) in SUFFIXES]
    near = did_you_mean(path.name, data)
    there = f" Data files there: {', '.join(data[:SHOWN_FILES])}." if data else ""
    return near or there


def read_parquet(path: Path, at_most: int | None = None) -> Found:
    """Read the rows of a parquet file as plain Python values."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            table = file.read() if at_most is None else _first_rows(file, at_most)
            problems: list[RowProblem] = []
            try:
                rows = table.to_pylist()
            except UnicodeDecodeError:
                rows, problems = _row_by_row(path, table)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)}).") from error
    places = (Place(str(path), number) for number in range(1, len(rows) + 1))
    return [pair for pair in zip(places, rows, strict=True) if pair[1] is not None], problems


def _first_rows(file: Any, most: int) -> Any:
    """Read no more row groups of a parquet file than its first rows need."""
    groups, rows = 0, 0
    while groups < file.num_row_groups and rows < most:
        rows += file.metadata.row_group(groups).num_rows
        groups += 1
    return file.read_row_groups(range(groups)).slice(0, most)


def _row_by_row(path: Path, table: Any) -> tuple[list[Record | None], list[RowProblem]]:
    """Read a table in which some text is not UTF-8; a row with such text is None."""
    rows: list[Record | None] = [{} for _ in range(table.num_rows)]
    problems: list[RowProblem] = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        for index, cell in enumerate(column):
            try:
                value = cell.as_py()
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                problem = f"is not UTF-8 (byte 0x{byte:02x})"
                problems.append(RowProblem(Place(str(path), index + 1), name, problem))
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


def read_json(path: Path, at_most: int | None = None) -> Found:
    """Read a JSON list of rows, or an object whose `data` is one; or JSONL of the wrong suffix."""
    data = read_bytes(path)
    try:
        document, twice = parse_json(data)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and data.lstrip().startswith(b"{"):
            found, problems = read_lines(path, data)
            return found[:at_most], problems
        where = f"line {error.lineno} column {error.colno}"
        raise DataError(f"{path} {where}: not JSON ({error.msg}).") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line}: {json_problem(error)}") from error
    except RecursionError as error:
        raise DataError(f"{path}: {json_problem(error)}") from error
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
    found, problems = [], []
    for number, row in enumerate(rows, start=1):
        place = Place(str(path), number)
        try:
            found.append((place, as_record(row, twice)))
        except ValueError as error:
            problems.append(RowProblem(place, "", str(error)))
    return found[:at_most], problems


def _count_json(path: Path) -> int | None:
    with _opened(path) as file:
        rows = json.load(file)
    if isinstance(rows, dict):
        rows = rows.get("data")
    return len(rows) if isinstance(rows, list) else None


def read_jsonl(path: Path, at_most: int | None = None) -> Found:
    """Read JSONL, or a JSON list that has the wrong suffix."""
    data = read_bytes(path, at_most)
    return read_json(path, at_most) if data.lstrip().startswith(b"[") else read_lines(path, data)


def _count_jsonl(path: Path) -> int:
    with _opened(path) as file:
        return sum(1 for line in file if line.strip())


def _opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path) if file_suffix(path).endswith(".gz") else path.open("rb")


def read_bytes(path: Path, lines: int | None = None) -> bytes:
    """Return the bytes of a file or of its first lines, unzipped, without a byte order mark."""
    try:
        with _opened(path) as file:
            data = file.read() if lines is None else b"".join(islice(file, lines))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: broken gzip data ({first_line(error)}). Copy it anew.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16. Save it as UTF-8.")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path} is empty. Give a file with at least one prompt.")
    return data


def read_lines(path: Path, data: bytes) -> Found:
    """Parse one JSON object a line; blank lines count as lines but hold no row."""
    found: list[tuple[Place, Record]] = []
    problems: list[RowProblem] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = Place(str(path), number, "line")
        try:
            row, twice = parse_json(line)
            found.append((place, as_record(row, twice)))
        except (ValueError, RecursionError) as error:
            problems.append(RowProblem(place, "", json_problem(error)))
    return found, problems


def parse_json(data: bytes) -> tuple[Any, dict[int, str]]:
    """Parse JSON; also return a key that stands twice for each such object, by `id`."""
    twice: dict[int, str] = {}

    def pairs_to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice[id(found)] = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return found

    return json.loads(data.decode("utf-8"), object_pairs_hook=pairs_to_dict), twice


def _repeated_key(value: Any, twice: Mapping[int, str]) -> str | None:
    """Return a key that stands twice in an object, or in one inside of it."""
    if isinstance(value, dict):
        if id(value) in twice:
            return twice[id(value)]
        value = list(value.values())
    inner = (_repeated_key(item, twice) for item in value) if isinstance(value, list) else ()
    return next((key for key in inner if key is not None), None)


def as_record(value: Any, twice: Mapping[int, str]) -> Record:
    """Return a row that is a JSON object without repeated keys; else raise ValueError."""
    if isinstance(value, dict):
        if twice and (key := _repeated_key(value, twice)) is not None:
            raise ValueError(f"the key {key!r} stands twice in one object; keep one of them")
        return value
    raise ValueError(f'the row is {name_type(value)}, not an object such as {{"prompt": …}}')


def json_problem(error: Exception) -> str:
    """Say in a few words why a text is not a JSON row."""
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
    """Name the type of a JSON value in plain words."""
    name = type(value).__name__
    return TYPE_NAMES.get(name, f"a {name}")


@dataclass(frozen=True)
class Format:
    """A format of local files: its suffixes, and how rows are read and counted.

    `read` takes the most rows that are wanted; `count` returns None for what is not rows.
    """

    suffixes: tuple[str, ...]
    read: Callable[[Path, int | None], Found]
    count: Callable[[Path], int | None]


FORMATS = (
    Format((".json", ".json.gz"), read_json, _count_json),
    Format((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), read_jsonl, _count_jsonl),
    Format((".parquet",), read_parquet, _count_parquet),
)
BY_SUFFIX = {suffix: found for found in FORMATS for suffix in found.suffixes}
SUFFIXES = tuple(sorted(BY_SUFFIX, key=lambda suffix: suffix.endswith(".gz")))


def count_rows(path: str) -> int | None:
    """Return the number of rows in a local file; None when it is no file that can be counted."""
    file = Path(path).expanduser()
    found = BY_SUFFIX.get(file_suffix(file))
    if found is None or not file.is_file():
        return None
    try:
        return found.count(file)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
