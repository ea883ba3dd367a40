"""Data rows that hold responses: read to rollouts for any reward, written with their scores."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ppo_cli.data_sets.files import Record, Records, file_suffix, name_type
from ppo_cli.data_sets.messages import as_plain
from ppo_cli.data_sets.problems import Place, RowError, RowProblem, raise_problems
from ppo_cli.data_sets.rows import (
    find_columns,
    list_names,
    prompt_of,
    read_row,
    read_source,
    tell_aliases,
)
from ppo_cli.errors import DataError, UserError, did_you_mean
from ppo_cli.records import Prompt, Rollout

RESPONSE = "response"
RESPONSE_ALIASES = ("completion", "output", "generation", "solution_str", "reply", "prediction")
OURS = ("score", "failure", "reason", "parts", "info")


@dataclass(frozen=True)
class Answered:
    """One row with its response; `record` is the row as it stands in the file."""

    place: Place
    record: Record
    rollout: Rollout


@dataclass(frozen=True)
class AnsweredSet:
    """The rows of a file, and what its reader should know."""

    source: str
    rows: tuple[Answered, ...]
    notes: tuple[str, ...] = ()

    @property
    def rollouts(self) -> list[Rollout]:
        """What a reward is given, in the order of the file."""
        return [row.rollout for row in self.rows]

    @property
    def data_sources(self) -> set[str]:
        """Every data_source of the rows."""
        return {row.rollout.prompt.data_source for row in self.rows}


def read_answered(
    file: str,
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    response_key: str | None = RESPONSE,
) -> AnsweredSet:
    """Read a file of rows; every bad row is named at once.

    With `response_key` None rows need no response; one that they have is taken all the same.
    """
    raw = read_source(file)
    if not raw.records:
        raise_problems(raw.problems)
    columns = find_columns(raw, prompt_key, _known_source(raw, source_key))
    if response_key is not None:
        _check_column(raw, response_key)
    rows: list[Answered] = []
    problems = list(raw.problems)
    for place, record in raw.records:
        try:
            response = _response(record, response_key or RESPONSE, needed=response_key is not None)
            row = read_row(place, record, columns)
            rows.append(Answered(place, record, rollout_of(prompt_of(raw.label, row), response)))
        except RowError as error:
            problems.append(RowProblem(place, error.column, str(error)))
    problems.sort(key=lambda problem: problem.place.number)
    raise_problems(problems)
    notes = [*tell_aliases(raw.source, columns, prompt_key), *_replaced(raw)]
    # Without responses each row is a task of its own.
    grouped = rows if response_key is None else _in_groups(rows)
    return AnsweredSet(raw.source, tuple(grouped), tuple(notes))


def _in_groups(rows: Sequence[Answered]) -> Iterator[Answered]:
    """Make rows with the same prompt samples of one prompt, as in training."""
    uids: dict[str, str] = {}
    count: Counter[str] = Counter()
    for row in rows:
        prompt = row.rollout.prompt
        asked = json.dumps(as_plain(prompt.messages), default=str)
        uid = uids.setdefault(asked, prompt.uid)
        same = replace(prompt, uid=uid)
        yield replace(row, rollout=rollout_of(same, row.rollout.text, count[uid]))
        count[uid] += 1


def _known_source(raw: Records, source_key: str) -> str:
    # A data_source column named in the settings belongs to the training files.
    return source_key if any(source_key in record for _, record in raw.records) else "data_source"


def _check_column(raw: Records, response_key: str) -> None:
    names = list(dict.fromkeys(name for _, record in raw.records for name in record))
    if response_key in names:
        return
    other = [name for name in RESPONSE_ALIASES if name in names]
    near = f" It may be {list_names(other)}." if other else did_you_mean(response_key, names)
    raise DataError(
        f"{raw.source}: no column '{response_key}'. Its columns: {list_names(names)}.{near} "
        "Name the column that holds the responses with --response_key."
    )


def _response(record: Record, column: str, *, needed: bool) -> str:
    value = record.get(column)
    if value is None and not needed:
        return ""
    if value is None:
        raise RowError(column, "is missing or null")
    if not isinstance(value, str):
        raise RowError(column, f"is {name_type(value)}, not text")
    return value


def rollout_of(prompt: Prompt, response: str, sample: int = 0) -> Rollout:
    """Build the rollout of a response that was written elsewhere."""
    return Rollout(
        prompt=prompt,
        sample=sample,
        token_ids=(),
        sampler_logprobs=np.empty(0, dtype=np.float32),
        text=response,
        finish_reason="stop",
    )


def _replaced(raw: Records) -> Iterable[str]:
    names = dict.fromkeys(name for _, record in raw.records for name in record if name in OURS)
    if names:
        yield f"Columns that the new scores replace in what is written: {', '.join(names)}."


def scored_file(source: str) -> Path:
    """Where the scores of a file go by default: beside it; those of a hub set: here."""
    path = Path(source).expanduser()
    path = path if path.exists() else Path(path.name)
    suffix = file_suffix(path)
    return path.with_name(f"{path.name[: len(path.name) - len(suffix)]}.scored.jsonl")


def check_out(out: Path, source: str) -> None:
    """Refuse a place that cannot be written, before anything is paid for."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; name a file in it.")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}.")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: the folder {out.parent} cannot be written.")
    if out.exists() and Path(source).expanduser().exists() and out.samefile(source):
        raise UserError(f"--out {out} is the file that is read; give another name.")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL under another name, then give the file its own."""
    fresh = path.with_name(f".unfinished-{path.name}")
    try:
        with fresh.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(as_plain(row), ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        fresh.unlink(missing_ok=True)
