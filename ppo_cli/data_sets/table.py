"""Prompts of large sets: rendered and tokenised in batches, when a step needs them.

At the start one row of each kind and the first rows are rendered, and of the others those that may
be too long. A prompt cannot be too long if the bytes of its contents and of the template around
them are fewer than the limit: no token is shorter than a byte.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain, compress, islice
from typing import Any

import numpy as np

from ppo_cli.data_sets.facts import RowFacts
from ppo_cli.data_sets.files import EAGER_ROWS, raise_problems
from ppo_cli.data_sets.prompts import (
    PromptSet,
    Rendered,
    Renderer,
    Tokenizer,
    Truncation,
    build_prompts,
    control_words,
    describe_control_words,
    describe_template,
    find_control_words,
    fingerprint,
    limit_lengths,
    render_prompts,
    unique_labels,
)
from ppo_cli.data_sets.row_sets import EpisodeRows, RowSet, StoredRows, load_sets
from ppo_cli.data_sets.rows import Row, prompt_of
from ppo_cli.errors import UserError
from ppo_cli.records import LargePrompts, Message, Prompt, data_sources

FIRST_ROWS = 1000  # that are rendered at the start
BATCH_ROWS = 4096  # that are rendered at once
MAX_KINDS = 500  # more take longer than to render all rows
# Tokens that a tokenizer may add to those of the bytes, at the start of a text and of its parts.
SPARE_TOKENS = 16
BY_FILES = "files-"  # begins the fingerprint of prompts that are not all rendered
# Contents that show what a template adds to those of a row.
PROBES = "ppo-row", "ppo-row-of-another-length"


class JoinedRows:
    """The rows of several sets, numbered across them."""

    def __init__(self, sets: Sequence[RowSet]) -> None:
        self.sets, self.labels = sets, unique_labels(sets)
        self.starts = [0]
        for row_set in sets:
            self.starts.append(self.starts[-1] + len(row_set.rows))
        self.facts = [_facts_of(row_set.rows) for row_set in sets]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, indices: Iterable[int]) -> tuple[list[str], list[Row]]:
        """Return rows with their uids."""
        uids, rows = [], []
        for index in indices:
            part = bisect_right(self.starts, index) - 1
            row = self.sets[part].rows[index - self.starts[part]]
            uids.append(f"{self.labels[part]}:{row.place.number}")
            rows.append(row)
        return uids, rows

    def stream(self) -> Iterator[Prompt]:
        """Yield the prompts of all rows, not yet rendered and tokenised."""
        for label, row_set in zip(self.labels, self.sets, strict=True):
            for row in row_set.rows:
                yield prompt_of(label, row)

    def sample(self) -> list[int]:
        """Return the first rows, and the first row of each kind."""
        indices = set(range(min(FIRST_ROWS, len(self))))
        for start, facts, row_set in zip(self.starts, self.facts, self.sets, strict=False):
            kinds = np.asarray(facts.kind)[: len(row_set.rows)]
            indices.update((np.unique(kinds, return_index=True)[1] + start).tolist())
        return sorted(indices)


def _facts_of(rows: Sequence[Row]) -> RowFacts:
    if isinstance(rows, StoredRows):
        return rows.facts
    facts = RowFacts()
    # All episodes are like the first.
    like = [rows[0]] * len(rows) if rows and isinstance(rows, EpisodeRows) else rows
    facts.extend(map(facts.describe, like))
    return facts


class PromptTable(LargePrompts):
    """Prompts that are built each time that they are read."""

    def __init__(
        self,
        rows: JoinedRows,
        indices: Any,
        build: Callable[[Sequence[str], Sequence[Row]], Sequence[Prompt]],
        fingerprint: str,
    ) -> None:
        self._rows, self._indices, self._build = rows, indices, build
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.pick(range(*index.indices(len(self))))
        return self.pick([index])[0]

    def __iter__(self) -> Iterator[Prompt]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self[start : start + BATCH_ROWS]

    def pick(self, indices: Iterable[int]) -> Sequence[Prompt]:
        """Return prompts in this order; DataError with the rows that the template refuses."""
        return self._build(*self._rows.read(self._indices[index] for index in indices))

    def data_sources(self) -> set[str]:
        """Return the data_sources of all prompts, without reading them."""
        indices, sources = np.asarray(self._indices), set[str]()
        for start, facts, row_set in zip(
            self._rows.starts, self._rows.facts, self._rows.sets, strict=False
        ):
            end = start + len(row_set.rows)
            chosen = indices[(indices >= start) & (indices < end)] - start
            names = list(facts.sources)
            sources.update(names[number] for number in np.unique(np.asarray(facts.source)[chosen]))
        return sources

    def stream(self) -> Iterator[Prompt]:
        """Yield the prompts in order, not yet rendered and tokenised."""
        chosen = np.zeros(len(self._rows), dtype=bool)
        chosen[self._indices] = True
        return compress(self._rows.stream(), chosen)


class StartPrompts(LargePrompts):
    """The prompts of a table and those of the validation, with which a reward starts.

    Checks of rows iterate over them: that does not render and tokenise those of the table. Prompts
    that are read by their numbers are built.
    """

    def __init__(self, table: PromptTable, others: Sequence[Prompt]) -> None:
        self._table, self._others = table, others

    def __len__(self) -> int:
        return len(self._table) + len(self._others)

    def __getitem__(self, index: Any) -> Any:
        count = len(self._table)
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return self._table[chosen] if chosen < count else self._others[chosen - count]
        built = iter(self._table.pick(i for i in chosen if i < count))
        return [next(built) if i < count else self._others[i - count] for i in chosen]

    def __iter__(self) -> Iterator[Prompt]:
        return chain(self._table.stream(), self._others)

    def data_sources(self) -> set[str]:
        """Return the data_sources of all prompts."""
        return self._table.data_sources() | data_sources(self._others)


def pick(prompts: Sequence[Prompt], indices: Iterable[int]) -> Sequence[Prompt]:
    """Return prompts in this order, built together where they are not built yet."""
    if isinstance(prompts, PromptTable):
        return prompts.pick(indices)
    return [prompts[index] for index in indices]


def join_prompts(prompts: Sequence[Prompt], others: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts with which a reward starts, those of a table not yet built."""
    return (
        StartPrompts(prompts, others) if isinstance(prompts, PromptTable) else [*prompts, *others]
    )


def fingerprint_of(prompts: Sequence[Prompt]) -> str:
    """Return a short hash of the prompts in order, or of the files of a table."""
    return prompts.fingerprint if isinstance(prompts, PromptTable) else fingerprint(prompts)


def load_prompts(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    answer_key: str | None = None,
    keep_columns: bool = False,
    max_samples: int = -1,
    render_all: bool = True,
    **how: Any,
) -> PromptSet:
    """Read files or hub sets as prompts; DataError with all bad rows if there are any.

    `max_samples` keeps the first rows over all sources, before overlong ones are dropped. Without
    `render_all`, more than EAGER_ROWS become a table. For the rest see `render_prompts`.
    """
    keys: dict[str, Any] = {
        "prompt_key": prompt_key, "source_key": source_key, "answer_key": answer_key,
    }  # fmt: skip
    sets = load_sets(sources, **keys, keep_columns=keep_columns, max_samples=max_samples)
    large = not render_all and sum(len(rows.rows) for rows in sets) > EAGER_ROWS
    table = open_table(JoinedRows(sets), tokenizer, **how) if large else None
    return table or render_prompts(sets, tokenizer, **how)


def open_table(
    rows: JoinedRows,
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    truncation: Truncation = "error",
    filter_overlong: bool = False,
    **how: Any,
) -> PromptSet | None:
    """Return the prompts of rows as a table, with the notes and errors of `render_prompts`.

    None if all have to be rendered: a token may be unknown to the model, the rows are of too many
    kinds, or the template refuses a row, which is then reported with all others.
    """
    if sum(len(facts.first) for facts in rows.facts) > MAX_KINDS:
        return None
    renderer = Renderer(tokenizer, **{k: v for k, v in how.items() if v is not None})
    size = renderer.vocabulary_size
    if size is not None and max(tokenizer.get_vocab().values()) >= size:
        return None
    sample, problems = renderer.render(rows.read(rows.sample())[1])
    long = None if problems else _find_long(rows, renderer, max_prompt_length)
    if long is None:
        return None
    limits: dict[str, Any] = {"limit": max_prompt_length, "truncation": truncation}
    notes = [note for row_set in rows.sets for note in row_set.notes]
    notes += _find_control_notes(rows, renderer)
    notes += describe_template(sample, renderer)
    notes += limit_lengths(
        list(long.values()), len(rows), filter_overlong=filter_overlong, **limits
    )
    indices: Any = range(len(rows))
    if filter_overlong and long:
        indices = np.delete(np.arange(len(rows)), list(long))

    def build(uids: Sequence[str], chosen: Sequence[Row]) -> Sequence[Prompt]:
        rendered, problems = renderer.render(chosen)
        raise_problems(problems, renderer.check_flags)
        overlong = [item for item in rendered if len(item.token_ids) > max_prompt_length]
        limit_lengths(overlong, len(rendered) + 1, filter_overlong=False, **limits)
        return build_prompts(list(zip(uids, rendered, strict=True)), tokenizer, **limits)

    digest = _digest_files(rows, [len(indices), how, limits, filter_overlong], renderer)
    return PromptSet(PromptTable(rows, indices, build, digest), tuple(notes))


def _find_long(rows: JoinedRows, renderer: Renderer, limit: int) -> dict[int, Rendered] | None:
    """Return the rows with more tokens than `limit`, by index; None if one cannot be rendered."""
    long: dict[int, Rendered] = {}
    for start, facts, row_set in zip(rows.starts, rows.facts, rows.sets, strict=False):
        count = len(row_set.rows)
        frames = np.array([_measure_frame(renderer, row, limit) for row in facts.first])
        bound = np.asarray(facts.size)[:count] + frames[np.asarray(facts.kind)[:count]]
        candidates = iter((np.flatnonzero(bound > limit) + start).tolist())
        while batch := list(islice(candidates, BATCH_ROWS)):
            rendered, problems = renderer.render(rows.read(batch)[1])
            if problems:
                return None
            pairs = zip(batch, rendered, strict=True)
            long |= {i: item for i, item in pairs if len(item.token_ids) > limit}
    return long


def _measure_frame(renderer: Renderer, row: Row, limit: int) -> int:
    """Return the most tokens of a rendered row of this kind besides the bytes of its contents.

    It is more than `limit` where the template does not put each content into its text once.
    """
    texts = []
    for probe in PROBES:
        prompt: str | tuple[Message, ...] = probe
        if not isinstance(row.prompt, str):
            prompt = tuple({**message, "content": probe} for message in row.prompt)
        probed = replace(row, prompt=prompt)
        try:
            texts.append(renderer.text_of(probed, renderer.messages_of(probed)))
        except UserError:
            return limit + 1
    count = 1 if isinstance(row.prompt, str) else len(row.prompt)
    short, long = PROBES
    plain = isinstance(row.prompt, str) or all(len(message) == 2 for message in row.prompt)
    if not plain or texts[0].count(short) != count or texts[0].replace(short, long) != texts[1]:
        return limit + 1
    return len(texts[0].encode()) - count * len(short) + SPARE_TOKENS * (count + 1)


def _find_control_notes(rows: JoinedRows, renderer: Renderer) -> list[str]:
    """Return a note on prompts whose text has control tokens, if there are any."""
    control = control_words(renderer.tokenizer)
    usual = all("<" in token or "[" in token for token in control)
    hits, first = 0, None
    for facts, row_set in zip(rows.facts, rows.sets, strict=True):
        marked = np.asarray(facts.marked)[: len(row_set.rows)]
        everywhere = not usual or find_control_words(
            ({"content": renderer.system_prompt or ""},), control
        )
        for index in range(len(marked)) if everywhere else np.flatnonzero(marked).tolist():
            row = row_set.rows[index]
            if tokens := find_control_words(renderer.messages_of(row), control):
                hits, first = hits + 1, first or (row.place, tokens)
    return describe_control_words(hits, *first) if first else []


def _digest_files(rows: JoinedRows, settings: Sequence[Any], renderer: Renderer) -> str:
    """Return a digest of the files of rows, and of what else the prompts follow from."""
    digest = hashlib.blake2b(digest_size=16)
    template = str(renderer.tokenizer.chat_template)
    facts: list[Any] = [list(settings), template]
    for label, row_set in zip(rows.labels, rows.sets, strict=True):
        facts.append([label, len(row_set.rows), repr(row_set.columns)])
        if isinstance(row_set.rows, StoredRows):
            for path in row_set.rows.raw.files:
                with path.open("rb") as file:
                    facts.append(hashlib.file_digest(file, "blake2b").hexdigest())
        elif not isinstance(row_set.rows, EpisodeRows):  # whose number says all
            # Not the path, which may be written in several ways.
            facts.append([asdict(row) | {"place": row.place.number} for row in row_set.rows])
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return BY_FILES + digest.hexdigest()
