"""Responses of a run for the page: an index without texts, their texts, samples for reports.

The page filters and sorts the index itself (rollouts.js).
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ppo_cli.errors import DataError, UserError
from ppo_cli.report.exploits import name_cause
from ppo_cli.report.labels import compute_response_id, write_label
from ppo_cli.run_folder.lines import (
    PREFIXES,
    Encoded,
    file_state,
    read_lines,
    rollout_file,
    rollout_steps,
)
from ppo_cli.thoughts import find_thoughts

# Limits that keep the page fast.
FIRST_STEPS = 100  # of the index in the first reply; the next ones have as many as all before
MAX_REPORT_TEXT_CHARS = 20_000  # characters of a text in a report
MAX_HISTORY = 60  # responses to one prompt in a report
SEARCH_S = 30.0  # time limit of a search over all texts
TEXTS = ("prompt", "response", "reason")


Place = tuple[str, int]  # split and step


class Row(NamedTuple):
    """Index entry of a response; the page has all fields but the last under the same names.

    `line` is its place in the file of the step, `cause` the kind of failure of an unscored
    response, `disputed` the gap between its parts or its judges, `detailed` 1 if its tokens are
    kept, `turn_count` and `tool_errors` those of an episode, and `size` the approximate bytes of
    its line.
    """

    split: str
    step: int
    line: int
    uid: str
    sample: int
    data_source: str
    score: float | None
    cause: str
    tokens: int
    disputed: float
    detailed: int
    turn_count: int
    tool_errors: int
    size: int

    @property
    def id(self) -> str:
        """The id of a response in the page: `split:step:line`."""
        return f"{self.split}:{self.step}:{self.line}"


class Rollouts:
    """Index of the responses of one run folder; new and changed files are read on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Requests come in threads. `_files` has the size and time of each file and its rows,
        # `_changes` each file in the order in which it was read, or found changed or gone.
        self._lock = threading.Lock()
        self._files: dict[Place, tuple[tuple[int, int], list[Row]]] = {}
        self._changes: list[Place] = []
        self._unread = 0

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
                if (state := file_state(rollout_file(self.folder, step, split)))
            }
            # Forget files that changed or are gone, as a resumed run repeats steps.
            for key in [k for k, (state, _) in self._files.items() if states.get(k) != state]:
                del self._files[key]
                self._changes.append(key)
            unread = sorted(states.keys() - self._files.keys(), key=lambda key: (key[1], key[0]))
            ends = time.monotonic() + seconds
            # The newest steps first, as users look at them.
            while unread:
                key = unread.pop()
                self._files[key] = (states[key], list(_index_step(self.folder, *key)))
                self._changes.append(key)
                if time.monotonic() > ends:
                    break
            self._unread = len(unread)
            in_order = sorted(self._files, key=lambda key: (key[1], key[0]))
            return [row for key in in_order for row in self._files[key][1]]

    def changes(self, since: int, seconds: float) -> tuple[dict[Place, list[Row]], int, int]:
        """Return the index of the next steps that changed after the first `since` changes.

        With it come `since` for the next call, and how many steps are left for that. A step that
        is gone has no rows.
        """
        self.rows(seconds)
        with self._lock:
            changes = self._changes[since : since + max(FIRST_STEPS, since)]
            index = {p: self._files[p][1] if p in self._files else [] for p in changes}
            since += len(changes)
            return index, since, self._unread + len(self._changes) - since

    def read(
        self, rows: Sequence[Row], max_chars: int | None, *, tokens: bool = True
    ) -> list[dict[str, Any]]:
        """Return the full lines of rows in their order; texts are cut to `max_chars` characters.

        Without `tokens` they have neither details of tokens nor turns.
        """
        # Read each file once.
        by_file: dict[Place, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            by_file[row.split, row.step].append(place)
        responses: list[dict[str, Any]] = [{}] * len(rows)
        for (split, step), places in by_file.items():
            lines = _read_step(self.folder, split, step)
            for place in places:
                row = rows[place]
                if row.line < len(lines):
                    line = truncate_texts(lines[row.line], max_chars)
                    details, turns = line.pop("token_details", None), line.pop("turns", None)
                    if tokens and turns:
                        line["turns"] = _list_turns({"turns": turns})
                    if tokens and isinstance(details, dict):
                        line["token_details"] = _mark_encoded(details)
                    full_line = lines[row.line] | {"split": split, "step": step}
                    index = dict(zip(Row._fields[:-1], row[:-1], strict=True))
                    responses[place] = line | index | {
                        "id": row.id, "response_id": compute_response_id(full_line),
                        "thoughts": _find_thought_spans(line),
                    }  # fmt: skip
        return responses

    def rows_of_ids(self, ids: Sequence[str]) -> list[Row]:
        """Return the rows with these ids; UserError if one does not exist."""
        self.rows(0.0)
        rows = []
        for name in ids:
            split, _, rest = name.partition(":")
            step, line = map(parse_whole_number, rest.partition(":")[::2])
            place = split, -1 if step is None else step
            if place not in self._files:  # of a step that is not read yet
                self.rows()
            indexed = self._files.get(place)
            if indexed is None or line is None or line >= len(indexed[1]):
                raise UserError(f"There is no response '{name}'.")
            rows.append(indexed[1][line])
        return rows

    def search(self, pattern: str, where: str) -> Iterator[Row]:
        """Yield the rows whose texts match a regular expression, ignoring case.

        `where` is one of TEXTS, or empty for all of them.
        """
        # Unlike `re`, the package regex has a time limit: patterns of users may take forever.
        import regex

        try:
            expression = regex.compile(pattern, regex.IGNORECASE)
        except (regex.error, RecursionError) as error:
            raise UserError(f"The pattern cannot be read: {error}.") from error
        names = (where,) if where in TEXTS else TEXTS
        by_file: dict[Place, list[Row]] = defaultdict(list)
        for row in self.rows():
            by_file[row.split, row.step].append(row)
        seconds_left = SEARCH_S
        try:
            for (split, step), group in by_file.items():
                lines = _read_step(self.folder, split, step)
                start = time.monotonic()
                for row in group:
                    line = lines[row.line] if row.line < len(lines) else {}
                    texts = [str(line.get(name) or "") for name in names]
                    if "response" in names and line.get("turns"):
                        texts.append(json.dumps(line["turns"], ensure_ascii=False))
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
    return [(max(0, t.start - len(opened)), t.end - len(opened)) for t in thoughts]


def _mark_encoded(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details of tokens with their numbers marked, so that they are not redacted."""
    return {k: Encoded(v) if isinstance(v, str) and k != "text" else v for k, v in details.items()}


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
        score = float(score) if isinstance(score, int | float) else None
        yield Row(
            split, step, number,
            str(line.get("uid", "")), _integer_or_zero(line.get("sample")),
            str(line.get("data_source") or ""),
            score,
            name_cause(str(line.get("failure") or "")) if score is None else "",
            _integer_or_zero(line.get("tokens")),
            _dispute_gap(line),
            int("token_details" in line),
            len(_list_turns(line)), sum(bool(turn.get("error")) for turn in _list_turns(line)),
            60 + sum(30 + (len(v) if isinstance(v, str) else 20) for v in line.values())
            + sum(len(str(line.get(name, ""))) for name in ("token_details", "turns")),
        )  # fmt: skip


def _list_turns(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of an episode; [] for a single response, and for what cannot be read."""
    turns = line.get("turns")
    turns = turns if isinstance(turns, list) else []
    return [t for t in turns if isinstance(t, dict) and isinstance(t.get("message"), dict)]


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


def parse_whole_number(text: str) -> int | None:
    """Return a text of digits as an integer; None for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


def truncate_texts(line: Mapping[str, Any], max_chars: int | None) -> dict[str, Any]:
    """Return a line with texts cut to `max_chars` characters; `cut` has their full lengths.

    That of turns is the number of cut texts in them.
    """
    shortened, lengths = dict(line), dict[str, int]()

    if max_chars is None:
        return shortened

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shorten(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [shorten(inner) for inner in value]
        if not isinstance(value, str) or len(value) <= max_chars:
            return value
        lengths["turns"] = lengths.get("turns", 0) + 1
        return value[:max_chars]

    for name, value in line.items():
        if isinstance(value, str) and len(value) > max_chars:
            shortened[name], lengths[name] = value[:max_chars], len(value)
        elif name == "turns":
            shortened[name] = shorten(value)
    return shortened | ({"cut": lengths} if lengths else {})


def thin_evenly(rows: Sequence[Row], count: int) -> list[Row]:
    """Return at most `count` evenly spaced rows, including the first and the last."""
    count = min(count, len(rows))
    return [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]


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
        key=lambda p: (-_score_change(histories[p]), zlib.crc32(repr(p).encode())),
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


def _score_change(history: Sequence[Row]) -> float:
    """Return the change of a prompt's mean score from its first to its last scored step."""
    scores: dict[int, list[float]] = defaultdict(list)
    for row in history:
        if row.score is not None:
            scores[row.step].append(row.score)
    return abs(fmean(scores[max(scores)]) - fmean(scores[min(scores)])) if scores else 0.0


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
    (line,) = rollouts.read(rollouts.rows_of_ids([name]), None)
    if not line or response not in (None, line["response_id"]):
        raise UserError(
            "This response is no longer in the run, which resumed from an earlier step. "
            "Reload the page."
        )
    return write_label(rollouts.folder, line, label, comment)
