"""Read rows with responses and labels into rollouts, and write rows with their scores."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.atomic import atomic_replace
from ppo_cli.data_sets.files import (
    Place,
    Record,
    Records,
    RowError,
    RowProblem,
    file_suffix,
    find_saved,
    name_type,
    raise_problems,
)
from ppo_cli.data_sets.rows import (
    LAST_TURN,
    ROLES,
    Columns,
    alias_notes,
    as_plain,
    find_columns,
    has_column,
    list_names,
    prompt_of,
    read_content,
    read_plain,
    read_records,
    read_row,
)
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError, UserError, did_you_mean, plural
from ppo_cli.paths import can_write, user_path
from ppo_cli.records import Message, Prompt, Rollout, Turn, mark_validation
from ppo_cli.run_folder.lines import rollout_file, rollout_steps

RESPONSE = "response"
# Other programs' names for the response column, suggested when it is missing.
RESPONSE_ALIASES = ("completion", "output", "generation", "solution_str", "reply", "prediction")
# Columns that scoring writes; those of an earlier scoring are replaced.
SCORE_COLUMNS = ("score", "failure", "reason", "parts", "info")


@dataclass(frozen=True)
class ResponseRow:
    """One row with its response; `record` is the row as it is in the file."""

    place: Place
    record: Record
    rollout: Rollout
    has_response: bool = True


@dataclass(frozen=True)
class ResponseSet:
    """The rows of a file, with notes for the user."""

    source: str
    rows: tuple[ResponseRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts that a reward scores, in the order of the file."""
        return [row.rollout for row in self.rows]

    def as_validation(self) -> ResponseSet:
        """Return the rows as a validation has them: a judge is asked about all criteria."""
        prompts = mark_validation(row.rollout.prompt for row in self.rows)
        rows = (
            replace(row, rollout=replace(row.rollout, prompt=prompt))
            for row, prompt in zip(self.rows, prompts, strict=True)
        )
        return replace(self, rows=tuple(rows))


def read_responses(
    file: str,
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    response_key: str | None = RESPONSE,
    labels: str | None = None,
) -> ResponseSet:
    """Read a file of rows; the DataError for bad rows lists all of them.

    `labels` names a column with people's labels. With `response_key` None rows need no response; a
    `response` column is read if there is one. A row with `turns`, as in a run's files, or with
    `messages` that hold the answers is an episode.
    """
    raw = read_source(file)
    if not raw.records:
        raise_problems(raw.problems)
    names = list(dict.fromkeys(name for _, record in raw.records for name in record))
    column = response_key or RESPONSE
    columns = find_response_columns(raw, prompt_key, source_key, answer_key, column, labels)
    episodes = any(_holds_episode(record, column) for _, record in raw.records)
    if response_key is not None and response_key not in names and not episodes:
        other = [name for name in RESPONSE_ALIASES if name in names]
        near = f" It may be {list_names(other)}." if other else did_you_mean(response_key, names)
        raise DataError(
            f"{raw.source}: no column '{response_key}'. Its columns: {list_names(names)}.{near} "
            "Name the column that holds the responses with --response_key."
        )

    def read(place: Place, record: Record) -> ResponseRow:
        """Return a row; RowError if the response is missing."""
        row = read_response_row(raw.label, place, record, columns, column)
        if response_key is not None and not row.has_response:
            raise RowError(response_key, "is missing or null")
        return row

    # Read all rows first: the error names every bad row.
    rows, problems = read_records(raw, read)
    raise_problems(problems, None)
    notes = alias_notes(raw.source, columns, prompt_key)
    if replaced := [name for name in names if name in SCORE_COLUMNS]:
        notes.append(f"Columns of the output that the new scores replace: {', '.join(replaced)}.")
    # Without responses each row is a separate task.
    grouped = rows if response_key is None else _group_by_prompt(rows)
    return ResponseSet(raw.source, tuple(grouped), tuple(notes))


def find_response_columns(
    raw: Records,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    response_key: str = RESPONSE,
    labels: str | None = None,
) -> Columns:
    """Choose the columns of rows with responses; without responses they are rows of prompts."""
    names = {name for _, record in raw.records for name in record}
    # Columns named in the settings belong to the training files.
    source = source_key if source_key in names else "data_source"
    if answer_key and "ground_truth" in names and not has_column(raw, answer_key):
        answer_key = None
    # Beside a response, a label says whether it is right.
    episodes = [_holds_episode(record, response_key) for _, record in raw.records]
    verdicts = {"label"} if response_key in names or any(episodes) else set()
    columns = find_columns(raw, prompt_key, source, answer_key, verdicts | {labels or ""})
    # The last message of an episode is its response.
    if columns.ground_truth == f"{columns.prompt}{LAST_TURN}" and all(episodes):
        columns = replace(columns, ground_truth="ground_truth")
    return columns


def read_response_row(
    label: str, place: Place, record: Record, columns: Columns, column: str = RESPONSE
) -> ResponseRow:
    """Return the prompt and response of a record; RowError for what is wrong with it."""
    response, turns = read_response(record, column), tuple[Turn, ...]()
    fields = record
    if _holds_episode(record, column):
        opening, turns = read_episode(record)
        fields = {**record, columns.prompt: opening} if opening else record
        response = response or str(turns[-1].text)
    prompt = prompt_of(label, read_row(place, fields, columns, keep_columns=True))
    opened, tools = (str(record.get(name) or "") for name in ("opened", "tools"))
    prompt = replace(prompt, opened=opened, tools=tools)
    # A response that reached the token limit has no end token, which penalties depend on.
    cut = record.get("finish_reason") == "length"
    rollout = replace(rollout_of(prompt, response or "", cut=cut), turns=turns)
    return ResponseRow(place, record, rollout, has_response=response is not None)


def read_run_responses(run: Path, steps: Sequence[int]) -> ResponseSet:
    """Read the training responses of some steps of a run; without steps, of its last one."""
    # Check the steps, then read the files of all of them as one set.
    available = rollout_steps(run)
    if absent := [step for step in steps if step not in available]:
        hint = (
            f"There are {len(available)}, from {available[0]} to {available[-1]}."
            if available
            else ""
        )
        raise DataError(f"--step {absent[0]}: {run} has no rollouts of that step. {hint}".rstrip())
    if not available:
        raise DataError(f"{run}: the folder has no rollouts/step_*.jsonl; name a file or a run.")
    chosen = sorted(set(steps)) or available[-1:]
    files = [read_responses(str(rollout_file(run, step))) for step in chosen]
    named = f"{run}, step {', '.join(map(str, chosen))}"
    return ResponseSet(named, tuple(row for file in files for row in file.rows))


def read_response(record: Record, column: str = RESPONSE) -> str | None:
    """Return the response in a row, or None without one."""
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise RowError(column, f"is {name_type(value)}, not text")
    return value


def _holds_episode(record: Record, response_key: str) -> bool:
    """Whether a row has the turns of an episode, or a conversation that ends with an answer."""
    if record.get("turns"):
        return True
    messages = as_plain(record.get("messages"))
    last = messages[-1] if isinstance(messages, list) and messages else None
    answered = isinstance(last, dict) and last.get("role") == "assistant"
    return record.get(response_key) is None and answered


def read_episode(record: Record) -> tuple[Sequence[Message], tuple[Turn, ...]]:
    """Return the opening and the turns of an episode; the opening is empty if the row has none.

    Raises RowError for a malformed message.
    """
    if not record.get("turns"):
        messages = _read_messages(record, "messages")
        starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [
            Turn(0, 0, messages[i]["content"], messages[i], tuple(messages[i + 1 : end]))
            for i, end in zip(starts, [*starts[1:], len(messages)], strict=True)
        ]
        return messages[: starts[0]], tuple(turns)
    turns = []
    for number, fields in enumerate(read_plain(record["turns"], "turns")):
        column = f"turns[{number}]"
        if not isinstance(fields, Mapping) or "message" not in fields:
            raise RowError(column, "has no message of the assistant")
        (message,) = _read_messages({column: [fields["message"]]}, column)
        turn = Turn(
            0, 0, message["content"], message, tuple(_read_messages(fields, "replies")),
            rewards=fields.get("rewards") or {}, seconds=fields.get("seconds") or 0.0,
            tools=tuple(map(tuple, fields.get("tools") or ())), error=fields.get("error") or "",
            cut=bool(fields.get("cut")),
        )  # fmt: skip
        turns.append(turn)
    return _read_messages(record, "opening"), tuple(turns)


def _read_messages(fields: Record, column: str) -> list[dict[str, Any]]:
    """Return the messages of an episode without null fields; a turn may be empty."""
    messages = []
    for number, item in enumerate(read_plain(fields.get(column), column) or ()):
        where = f"{column}[{number}]"
        if not isinstance(item, Mapping) or item.get("role") not in ROLES:
            raise RowError(where, f"is not a message with a role ({', '.join(ROLES)})")
        message = {name: value for name, value in item.items() if value is not None}
        messages.append(message | {"content": read_content(item.get("content"), where)})
    return messages


def _group_by_prompt(rows: Sequence[ResponseRow]) -> Iterator[ResponseRow]:
    """Number rows with the same prompt as samples of one prompt, as in training."""
    # The same conversation gets the uid of its first row.
    uids: dict[str, str] = {}
    count: Counter[str] = Counter()
    for row in rows:
        prompt = row.rollout.prompt
        question = json.dumps(as_plain(prompt.messages), default=str)
        uid = uids.setdefault(question, prompt.uid)
        same = replace(prompt, uid=uid)
        yield replace(row, rollout=replace(row.rollout, prompt=same, sample=count[uid]))
        count[uid] += 1


def rollout_of(prompt: Prompt, response: str, sample: int = 0, *, cut: bool = False) -> Rollout:
    """Build a rollout from a response that is only text, without tokens or log-probs."""
    return Rollout(
        prompt=prompt,
        sample=sample,
        token_ids=(),
        sampler_logprobs=np.empty(0, dtype=np.float32),
        text=response,
        finish_reason="length" if cut else "stop",
    )


def default_out(source: str) -> Path:
    """Default path of the scores: next to the file or in the run; for a hub set, in this folder."""
    path = user_path(source)
    if path.is_dir() and find_saved(source) is None:
        return path / "scored.jsonl"
    path = path if path.exists() else Path(path.name)
    suffix = file_suffix(path)
    return path.with_name(f"{path.name[: len(path.name) - len(suffix)]}.scored.jsonl")


def check_out(out: Path, source: str, flag: str = "--out") -> None:
    """Raise UserError when `out` cannot be written, before any paid call."""
    # Every reason why the file could not be written at the end.
    user_path(out)
    if out.is_dir():
        raise UserError(f"{flag} {out} is a folder; name a file in it.")
    if not out.parent.is_dir():
        raise UserError(f"{flag} {out}: there is no folder {out.parent}.")
    if not can_write(out.parent):
        raise UserError(f"{flag} {out}: the folder {out.parent} cannot be written.")
    if out.exists() and user_path(source).exists() and out.samefile(source):
        raise UserError(f"{flag} {out} is the input file; choose another name.")


def write_out(out: Path, text: str, flag: str = "--out") -> None:
    """Write the file of a flag in one piece; raises UserError if the disk refuses it."""
    try:
        with atomic_replace(out) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {out} cannot be written: {error.strerror or error}.") from error


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL, atomically."""
    lines = (json.dumps(as_plain(row), ensure_ascii=False, default=str) + "\n" for row in rows)
    try:
        with atomic_replace(path) as fresh, fresh.open("wb") as file:
            # Half a surrogate pair is not valid UTF-8, so it is escaped.
            file.writelines(line.encode("utf-8", "backslashreplace") for line in lines)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error


# Words that mean "good" when a column has two words and --positive does not name one.
POSITIVE_LABELS = ("true", "1", "good", "yes", "chosen", "correct", "right", "safe", "accepted")
MAX_LABELS_SHOWN = 8  # in an error message


@dataclass(frozen=True)
class LabelledRows:
    """Rows with their labels as numbers; `positive` is None unless labels form two classes."""

    rows: tuple[ResponseRow, ...]
    values: NDArray[np.float64]
    positive: NDArray[np.bool_] | None
    description: str
    notes: tuple[str, ...] = ()


def column_cells(responses: ResponseSet, column: str, flag: str) -> list[Any]:
    """The cells of the column that `flag` names; DataError if there is no such column."""
    names = list(dict.fromkeys(name for row in responses.rows for name in row.record))
    if column not in names:
        raise DataError(
            f"{responses.source}: no column '{column}' ({flag}). Its columns: {list_names(names)}."
            f"{did_you_mean(column, names)}"
        )
    return [as_plain(row.record.get(column)) for row in responses.rows]


def read_labels(responses: ResponseSet, column: str, positive: str | None = None) -> LabelledRows:
    """Read the label of each row; rows without a label are left out and counted in a note."""
    cells = column_cells(responses, column, "--labels")
    labelled = [
        (row, cell) for row, cell in zip(responses.rows, cells, strict=True) if cell is not None
    ]
    if not labelled:
        raise DataError(f"{responses.source}: the column '{column}' (--labels) is empty.")
    rows = tuple(row for row, _ in labelled)
    # Numbers with two levels, and two words, are classes; more levels are grades.
    values = [cell for _, cell in labelled]
    problems = []
    for row, value in labelled:
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(RowProblem(row.place, column, "is NaN or infinite"))
        elif not isinstance(value, bool | int | float | str):
            what = f"is {name_type(value)}, not a number, true, false or a word"
            problems.append(RowProblem(row.place, column, what))
    raise_problems(problems, None)
    without = len(cells) - len(labelled)
    notes = (f"{plural(without, 'row')} without a label left out.",) if without else ()
    if positive is None and not any(isinstance(value, str) for value in values):
        numbers = np.asarray([float(value) for value in values])
        levels = np.unique(numbers)
        if len(levels) != 2:
            description = f"{plural(len(levels), 'level')} from {levels[0]:g} to {levels[-1]:g}"
            return LabelledRows(rows, numbers, None, description, notes)
        flags = numbers == levels[1]
        good = str(values[flags.argmax()]).lower()
    else:
        labels = [str(value).strip().casefold() for value in values]
        word = _positive_label(labels, column, positive)
        flags = np.asarray([label == word for label in labels])
        numbers, good = flags.astype(np.float64), repr(word)
    return LabelledRows(
        rows, numbers, flags, f"{good} is good ({flags.sum()} of {len(rows)})", notes
    )


MAX_HELD_OUT = 32  # labelled responses that a judge scores again during a run
MIN_HELD_OUT = 8  # fewer cannot show that a judge has changed


def read_held_out(file: str) -> list[tuple[Rollout, float]]:
    """Read distinct responses with labels (column `label`), at most MAX_HELD_OUT, evenly spaced.

    Raises DataError for bad rows, or for too few labels to tell a change from chance.
    """
    labelled = read_labels(read_responses(file), "label")
    # A response that is in the file twice counts once, with its last label.
    rollouts = [row.rollout for row in labelled.rows]
    once = {(r.prompt.text, r.text, str(r.messages)): i for i, r in enumerate(rollouts)}
    rows = [(labelled.rows[i].rollout, float(labelled.values[i])) for i in once.values()]
    if (count := len(rows)) < MIN_HELD_OUT:
        raise DataError(
            f"{file} has {count} different labelled responses; at least {MIN_HELD_OUT} are "
            "needed (--rm_monitor_labels)."
        )
    # Thin evenly: files are often sorted by label.
    step = max(1.0, count / MAX_HELD_OUT)
    return [rows[int(place * step)] for place in range(min(count, MAX_HELD_OUT))]


def _positive_label(labels: Sequence[str], column: str, positive: str | None) -> str:
    """Return the word that means "good"; DataError if that is unclear."""
    kinds = list(dict.fromkeys(labels))
    shown = ", ".join(kinds[:MAX_LABELS_SHOWN])
    # A word that the user names wins; otherwise two words, one of which means "good".
    if positive is not None:
        label = positive.strip().casefold()
        if label not in kinds:
            raise DataError(
                f"--positive {positive}: no label in '{column}' has this value. "
                f"Labels: {shown}.{did_you_mean(label, kinds)}"
            )
        return label
    if len(kinds) > 2:
        ellipsis = ", …" if len(kinds) > MAX_LABELS_SHOWN else ""
        raise DataError(
            f"The labels in '{column}' are {len(kinds)} different words: {shown}{ellipsis}. Give "
            "numbers or two words, or name the good word with --positive VALUE; all others "
            "are then bad."
        )
    positives = [kind for kind in kinds if kind in POSITIVE_LABELS]
    if len(positives) == 1:
        return positives[0]
    raise DataError(
        f"The labels in '{column}' are {' and '.join(map(repr, kinds))}; name "
        "the good one with --positive VALUE."
    )
