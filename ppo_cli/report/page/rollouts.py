"""Responses of a run for the page: an index without texts, filtered rows, samples for reports."""

from __future__ import annotations

import math
import re
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ppo_cli.errors import DataError, UserError
from ppo_cli.report.labels import compute_response_id, write_label
from ppo_cli.run_folder import (
    PREFIXES,
    read_lines,
    rollout_file,
    rollout_steps,
)
from ppo_cli.thoughts import find_thoughts

# Limits that keep the page fast.
SNIPPET_CHARS = 200  # characters of a text in the table
MAX_TEXT_CHARS = 100_000  # characters of a text in the reading pane, unless the user asks for all
MAX_REPORT_TEXT_CHARS = 20_000  # characters of a text in a report
MAX_HISTORY = 60  # responses to one prompt over the run
SEARCH_S = 30.0  # time limit of a search over all texts
TEXTS = ("prompt", "response", "reason")


Place = tuple[str, int]  # split and step


class Row(NamedTuple):
    """Index entry of a response.

    `line` is its place in the file of the step, `disputed` the gap between its parts or its
    judges, and `size` the approximate bytes of its line.
    """

    split: str
    step: int
    line: int
    uid: str
    sample: int
    source: str
    score: float | None
    failure: str
    tokens: int
    disputed: float
    size: int

    @property
    def id(self) -> str:
        """The id of a response in the page: `split:step:line`."""
        return f"{self.split}:{self.step}:{self.line}"


class Rollouts:
    """Index of the responses of one run folder; new and changed files are read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unread = 0  # steps that are not read yet
        # Requests come in threads. `_files` has the size and time of each file and its rows,
        # `_ends` the first and last step of each prompt with its mean scores there.
        self._lock = threading.Lock()
        self._files: dict[Place, tuple[tuple[int, int], list[Row]]] = {}
        self.indexed_rows: list[Row] = []  # the last result of `rows`
        self._ends: dict[tuple[str, str], tuple[int, float, int, float]] = {}

    def rows(self, seconds: float = math.inf) -> list[Row]:
        """Return the index, oldest responses first.

        After `seconds` it stops reading files and returns what it has, the newest steps; the next
        call continues.
        """
        with self._lock:
            states = {
                (split, step): state
                for split in PREFIXES
                for step in rollout_steps(self.folder, split)
                if (state := _file_state(rollout_file(self.folder, step, split)))
            }
            unchanged = {
                key: file for key, file in self._files.items() if states.get(key) == file[0]
            }
            same = states.keys() == unchanged.keys() == self._files.keys()
            # Forget files that changed or are gone, as a resumed run repeats steps.
            if len(unchanged) < len(self._files):  # a step was written again
                self._files, self._ends = unchanged, {}
                for key, (_, rows) in unchanged.items():
                    self._record_first_and_last(key, rows)
            unread = sorted(states.keys() - unchanged.keys(), key=lambda key: (key[1], key[0]))
            ends = time.monotonic() + seconds
            # The newest steps first, as users look at them.
            while unread:
                key = unread.pop()
                self._files[key] = (states[key], list(_index_step(self.folder, *key)))
                self._record_first_and_last(key, self._files[key][1])
                if time.monotonic() > ends:
                    break
            self.unread = len(unread)
            if not same:
                in_order = sorted(self._files, key=lambda key: (key[1], key[0]))
                self.indexed_rows = [row for key in in_order for row in self._files[key][1]]
            return self.indexed_rows

    def _record_first_and_last(self, key: Place, rows: Iterable[Row]) -> None:
        """Update the first and last step of each prompt, and its mean scores there."""
        split, step = key
        scores: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            if row.score is not None:
                scores[row.uid].append(row.score)
        for uid, values in scores.items():
            mean = sum(values) / len(values)
            first, before, last, after = self._ends.get((split, uid), (step, mean, step, mean))
            if step < first:
                first, before = step, mean
            elif step > last:
                last, after = step, mean
            self._ends[split, uid] = (first, before, last, after)

    def score_change(self, row: Row) -> float:
        """Return the change of the mean score of a row's prompt from its first to its last step."""
        _, before, _, after = self._ends.get((row.split, row.uid), (0, 0.0, 0, 0.0))
        return round(abs(after - before), 6)

    def select(self, query: Mapping[str, str], seconds: float = math.inf) -> list[Row]:
        """Return the rows that match a query of the page, sorted; UserError for a bad query.

        Like `rows`, it returns only the newest steps after `seconds`, except for text searches.
        """
        rows = self.rows(math.inf if query.get("pattern") else seconds)
        fits = _make_filter(query)
        chosen = [row for row in rows if fits(row)]
        if pattern := query.get("pattern"):
            chosen = list(self._search(chosen, pattern, query.get("where", "")))
        # Sort; rows are in the order of steps already.
        sort, down = query.get("sort", "step"), query.get("order") == "down"
        keys: dict[str, Any] = {
            "step": lambda r: (r.step, r.split),
            "score": lambda r: r.score,
            "tokens": lambda r: r.tokens,
            "disputed": lambda r: r.disputed,
            "changed": self.score_change,
        }
        if sort not in keys:
            raise UserError(f"Rows cannot be sorted by '{sort}'; sort by {', '.join(keys)}.")
        if sort == "score":  # rows without a score come last in both orders
            without = [row for row in chosen if row.score is None]
            chosen = [row for row in chosen if row.score is not None]
        else:
            without = []
        return sorted(chosen, key=keys[sort], reverse=down) + without

    def read(self, rows: Sequence[Row], max_chars: int | None) -> list[dict[str, Any]]:
        """Return the full lines of rows in their order; texts are cut to `max_chars` characters."""
        # Read each file once.
        by_file: dict[tuple[str, int], list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            by_file[row.split, row.step].append(place)
        responses: list[dict[str, Any]] = [{}] * len(rows)
        for (split, step), places in by_file.items():
            lines = _read_step(self.folder, split, step)
            for place in places:
                row = rows[place]
                if row.line < len(lines):
                    line = truncate_texts(lines[row.line], max_chars)
                    full_line = lines[row.line] | {"split": split, "step": step}
                    responses[place] = line | {
                        "id": row.id, "response_id": compute_response_id(full_line), "split": split,
                        "step": step, "disputed": row.disputed, "changed": self.score_change(row),
                        "thoughts": _find_thought_spans(line),
                    }  # fmt: skip
        return responses

    def row_of_id(self, name: str) -> Row:
        """Return the row with this id; UserError if there is none."""
        split, _, rest = name.partition(":")
        step, line = map(parse_whole_number, rest.partition(":")[::2])
        place = split, -1 if step is None else step
        # Usually the file is indexed already; else read all.
        self.rows(0.0)
        if place not in self._files:
            self.rows()
        indexed = self._files.get(place)
        if indexed is None or line is None or line >= len(indexed[1]):
            raise UserError(f"There is no response '{name}'.")
        return indexed[1][line]

    def through_time(self, row: Row) -> list[Row]:
        """Return responses to the same prompt, oldest first; at most MAX_HISTORY, evenly spaced."""
        same = [r for r in self.rows() if r.uid == row.uid and r.split == row.split]
        return thin_evenly(same, MAX_HISTORY)

    def _search(self, rows: Sequence[Row], pattern: str, where: str) -> Iterator[Row]:
        """Yield the rows whose texts match a regular expression, ignoring case."""
        # Unlike `re`, the package regex has a time limit: patterns of users may take forever.
        import regex

        try:
            expression = regex.compile(pattern, regex.IGNORECASE)
        except (regex.error, RecursionError) as error:
            raise UserError(f"The pattern cannot be read: {error}.") from error
        # Search one field or all.
        names = (where,) if where in TEXTS else TEXTS
        by_file: dict[tuple[str, int], list[Row]] = defaultdict(list)
        for row in rows:
            by_file[row.split, row.step].append(row)
        seconds_left = SEARCH_S
        try:
            for (split, step), group in by_file.items():
                lines = _read_step(self.folder, split, step)
                start = time.monotonic()
                for row in group:
                    line = lines[row.line] if row.line < len(lines) else {}
                    texts = (str(line.get(name) or "") for name in names)
                    if any(expression.search(text, timeout=seconds_left) for text in texts):
                        yield row
                seconds_left -= time.monotonic() - start
                # The time limit is for the search as a whole.
                if seconds_left <= 0:
                    raise TimeoutError
        except (TimeoutError, MemoryError) as error:
            raise UserError("The pattern takes too long on these texts.") from error


def _find_thought_spans(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (start, end) of each thought in a response's text; the page folds them."""
    opened, text = str(line.get("opened") or ""), str(line.get("response") or "")
    thoughts = find_thoughts(opened + text, cut=line.get("finish_reason") == "length")
    return [
        (max(0, thought.start - len(opened)), thought.end - len(opened)) for thought in thoughts
    ]


def _file_state(file: Path) -> tuple[int, int] | None:
    """Return size and modification time of a file; None if it does not exist."""
    with suppress(FileNotFoundError):  # a run that resumes from an earlier step removes it
        state = file.stat()
        return state.st_size, state.st_mtime_ns
    return None


def _read_step(folder: Path, split: str, step: int) -> list[dict[str, Any]]:
    """Return the lines of a step; DataError for a link that leads out of the run folder."""
    file = rollout_file(folder, step, split)
    if not file.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{file} leads out of the run folder, so it is not read.")
    return read_lines(file)


def _index_step(folder: Path, split: str, step: int) -> Iterator[Row]:
    """Yield the index entries of a step; wrong types in the file become empty values."""
    for number, line in enumerate(_read_step(folder, split, step)):
        score = line.get("score")
        yield Row(
            split, step, number,
            str(line.get("uid", "")), _integer_or_zero(line.get("sample")),
            str(line.get("data_source") or ""),
            float(score) if isinstance(score, int | float) else None,
            str(line.get("failure") or ""), _integer_or_zero(line.get("tokens")),
            _dispute_gap(line),
            60 + sum(30 + (len(v) if isinstance(v, str) else 20) for v in line.values()),
        )  # fmt: skip


def _integer_or_zero(value: Any) -> int:
    """Return an integer unchanged, and 0 for anything else."""
    return value if isinstance(value, int) else 0


def _dispute_gap(line: Mapping[str, Any]) -> float:
    """Return the largest gap: of scaled parts, to the second judge, or twice the vote spread."""
    parts = line.get("parts")
    scores = parts.values() if isinstance(parts, dict) else ()
    scaled = [part.get("scaled") for part in scores if isinstance(part, dict)]
    numbers = [float(v) for v in scaled if isinstance(v, int | float)]
    gaps = [max(numbers) - min(numbers)] if len(numbers) > 1 else [0.0]
    mixture = line.get("mixture")
    # In a mixture each judge has its own facts.
    for facts in [line, *(mixture.values() if isinstance(mixture, dict) else ())]:
        if isinstance(facts, dict):
            factors = {2: facts.get("vote_spread"), 1: facts.get("monitor_gap")}
            gaps += [n * float(gap) for n, gap in factors.items() if isinstance(gap, int | float)]
    return round(max(gaps), 6)


def _make_filter(query: Mapping[str, str]) -> Callable[[Row], bool]:
    """Return a predicate for the query's filters that need only the index."""
    low, high = _parse_number(query, "from_step"), _parse_number(query, "to_step")
    least, greatest = _parse_number(query, "min"), _parse_number(query, "max")
    split, source, why = (query.get(name, "") for name in ("split", "source", "why"))
    # Filters apply only if the query has their name with a value.
    predicates: dict[str, Callable[[Row], bool]] = {
        "from_step": lambda row: low is None or row.step >= low,
        "to_step": lambda row: high is None or row.step <= high,
        "split": lambda row: row.split == split,
        "source": lambda row: row.source == source,
        "min": lambda row: least is None or (row.score is not None and row.score >= least),
        "max": lambda row: greatest is None or (row.score is not None and row.score <= greatest),
        "failed": lambda row: (row.score is None) == (query["failed"] == "yes"),
        "why": lambda row: why.lower() in row.failure.lower(),
    }
    checks = [check for name, check in predicates.items() if query.get(name)]
    return lambda row: all(check(row) for check in checks)


def _parse_number(query: Mapping[str, str], name: str) -> float | None:
    """Return a finite number of the query; None if it is empty, UserError if it is not a number."""
    text = query.get(name, "").strip()
    if not text:
        return None
    with suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    raise UserError(f"'{text}' is not a number ({name}).")


def parse_whole_number(text: str) -> int | None:
    """Return a text of digits as an integer; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def truncate_texts(line: Mapping[str, Any], max_chars: int | None) -> dict[str, Any]:
    """Return a line with texts cut to `max_chars` characters; `cut` has their full lengths."""
    shortened, lengths = dict(line), {}
    for name, value in line.items():
        if max_chars is not None and isinstance(value, str) and len(value) > max_chars:
            shortened[name], lengths[name] = value[:max_chars], len(value)
    return shortened | ({"cut": lengths} if lengths else {})


def make_table_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the page's table shows, with shortened texts."""
    names = ("id", "response_id", "split", "step", "uid", "sample", "data_source", "score",
             "tokens", "changed", "disputed")  # fmt: skip
    texts = {name: str(line.get(name) or "")[:SNIPPET_CHARS] for name in (*TEXTS, "failure")}
    return {name: line.get(name) for name in names} | texts


def thin_evenly(rows: Sequence[Row], count: int) -> list[Row]:
    """Return at most `count` evenly spaced rows, including the first and the last."""
    if len(rows) <= count:
        return list(rows)
    return (
        [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)] if count > 1 else []
    )


def choose_sample(rollouts: Rollouts, most_bytes: int) -> list[Row]:
    """Choose the rows of a report: all, or the most interesting ones that fit in `most_bytes`.

    A quarter of the bytes goes to the best, worst, most disputed and failed rows, a quarter to
    rows from all parts of the run, and half to histories of prompts.
    """
    rows = rollouts.rows()
    if sum(_estimate_bytes(row) for row in rows) <= most_bytes:
        return list(rows)
    # Best and worst are taken in turn with disputed and failed ones.
    extremes = [
        sorted((r for r in rows if r.score is not None), key=lambda r: r.score or 0.0),
        sorted((r for r in rows if r.score is not None), key=lambda r: -(r.score or 0.0)),
        sorted(rows, key=lambda r: -r.disputed),
        [r for r in rows if r.score is None],
    ]
    histories: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        histories[row.split, row.uid].append(row)
    # The most changed prompts first; equal ones in a fixed order that is independent of the file's.
    prompts = sorted(
        histories,
        key=lambda p: (-rollouts.score_change(histories[p][0]), zlib.crc32(repr(p).encode())),
    )
    mean = max(1.0, sum(map(_estimate_bytes, rows)) / len(rows))
    wishes = (
        (most_bytes / 4, (row for group in zip_longest(*extremes) for row in group if row)),
        (most_bytes / 4, iter(thin_evenly(rows, int(most_bytes / 4 / mean)))),
        (most_bytes / 2, (row for p in prompts for row in thin_evenly(histories[p], MAX_HISTORY))),
    )  # fmt: skip
    chosen: dict[str, Row] = {}
    # A row that would fill a quarter of its room is skipped, so that others fit.
    for room, wished in wishes:
        bytes_left = room
        for row in wished:
            if row.id not in chosen and _estimate_bytes(row) < room / 4:
                bytes_left -= _estimate_bytes(row)
                if bytes_left < 0:
                    break
                chosen[row.id] = row
    return sorted(chosen.values(), key=lambda r: (r.step, r.split, r.line))


def _estimate_bytes(row: Row) -> float:
    """Return the approximate bytes of a row in a report."""
    return min(row.size, 3 * MAX_REPORT_TEXT_CHARS)


def set_label(
    rollouts: Rollouts, name: str, response: str | None, label: float | None, comment: str
) -> dict[str, Any]:
    """Write a label or comment to the run folder; without both, the label is removed.

    `response` is the id of the response that the page shows; UserError if the run has replaced it
    by another one.
    """
    # The page may be older than the file.
    (line,) = rollouts.read([rollouts.row_of_id(name)], None)
    if not line or response not in (None, line["response_id"]):
        raise UserError(
            "This response is no longer in the run, which resumed from an earlier step. "
            "Reload the page."
        )
    return write_label(rollouts.folder, line, label, comment)
