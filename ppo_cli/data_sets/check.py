"""What `ppo data check` finds in prompt files: counts, lengths, bad rows, one rendered prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ppo_cli.data_sets.files import RowProblem
from ppo_cli.data_sets.render import Renderer
from ppo_cli.data_sets.rows import Row, load_rows

EXAMPLES = 5
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Finding:
    """How many rows share a trait, and the first few of them in words."""

    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """One prompt as the model reads it."""

    place: str
    rendered: str
    tokens: int
    data_source: str
    ground_truth: Any


@dataclass(frozen=True)
class Report:
    """Everything found in the files; lengths are None when there is no usable row."""

    files: tuple[str, ...]
    rows: int
    usable: int
    bad_rows: tuple[RowProblem, ...]
    data_sources: Mapping[str, int]
    missing_ground_truth: Finding
    duplicates: Finding
    characters: Mapping[str, int] | None
    tokens: Mapping[str, int] | None
    max_prompt_length: int
    overlong: Finding
    control_words: Finding
    unused_columns: tuple[str, ...]
    notes: tuple[str, ...]
    sample: Sample | None

    @property
    def bad(self) -> int:
        """The number of rows that cannot be used."""
        return len({problem.place for problem in self.bad_rows})

    def to_json(self) -> str:
        """Return the report as JSON, every bad row included."""
        shown = asdict(self)
        shown["bad_rows"] = [
            {
                "file": p.place.file,
                p.place.unit: p.place.number,
                "column": p.column,
                "problem": p.message,
            }
            for p in self.bad_rows
        ]
        return json.dumps(shown, ensure_ascii=False, indent=2, default=str)


def check(
    sources: Sequence[str],
    renderer: Renderer,
    *,
    max_prompt_length: int,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
) -> Report:
    """Read every row of the files and report; only a file that cannot be read raises."""
    sets = [load_rows(s, prompt_key=prompt_key, source_key=source_key) for s in sources]
    rows = [row for found in sets for row in found.rows]
    rendered, refused = renderer.render(rows)
    problems = [problem for found in sets for problem in found.problems] + refused
    usable = [item.row for item in rendered]
    words = [item for item in rendered if item.control_words]
    long = [item for item in rendered if len(item.token_ids) > max_prompt_length]
    sample = None
    if rendered:
        item, row = rendered[0], rendered[0].row
        place, tokens = str(row.place), len(item.token_ids)
        sample = Sample(place, item.text, tokens, row.data_source, row.ground_truth)
    return Report(
        files=tuple(found.source for found in sets),
        rows=len(rows) + len({p.place for found in sets for p in found.problems}),
        usable=len(usable),
        bad_rows=tuple(problems),
        data_sources=dict(Counter(row.data_source for row in usable).most_common()),
        missing_ground_truth=find([str(row.place) for row in usable if row.ground_truth is None]),
        duplicates=find(repeats(usable)),
        characters=percentiles([count_characters(row) for row in usable]),
        tokens=percentiles([len(item.token_ids) for item in rendered]),
        max_prompt_length=max_prompt_length,
        overlong=find([f"{i.row.place}: {len(i.token_ids)} tokens" for i in long]),
        control_words=find([f"{i.row.place}: {', '.join(i.control_words)}" for i in words]),
        unused_columns=tuple(dict.fromkeys(n for found in sets for n in found.columns.unused)),
        notes=tuple(note for found in sets for note in found.notes),
        sample=sample,
    )


def find(examples: Sequence[str]) -> Finding:
    """Count the rows and keep the first few."""
    return Finding(len(examples), tuple(examples[:EXAMPLES]))


def repeats(rows: Sequence[Row]) -> list[str]:
    """Name the rows whose prompt stood in an earlier row, with that row."""
    first: dict[str, Row] = {}
    found = []
    for row in rows:
        key = row.prompt if isinstance(row.prompt, str) else json.dumps(row.prompt, default=str)
        if key in first:
            found.append(f"{row.place} repeats {first[key].place}")
        else:
            first[key] = row
    return found


def count_characters(row: Row) -> int:
    """Return the length of a prompt's text, the template left out."""
    if isinstance(row.prompt, str):
        return len(row.prompt)
    return sum(len(message["content"]) for message in row.prompt)


def percentiles(lengths: Sequence[int]) -> dict[str, int] | None:
    """Return the shortest, the percentiles and the longest; None for no lengths."""
    if not lengths:
        return None
    values = np.percentile(lengths, PERCENTILES, method="higher")
    middle = {f"p{p}": int(v) for p, v in zip(PERCENTILES, values, strict=True)}
    return {"min": min(lengths), **middle, "max": max(lengths)}
