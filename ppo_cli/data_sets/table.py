"""Prompts of large sets: rendered and tokenised in batches, when a step needs them.

At the start one row of each kind and the first rows are rendered, and of the others those that may
be too long. A prompt cannot be too long if the bytes of its contents and of the template around
them are fewer than the limit: no token is shorter than a byte.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, compress, islice
from typing import Any

import numpy as np

from ppo_cli.data_sets.facts import FACTS, RowFacts
from ppo_cli.data_sets.files import EAGER_ROWS, Place, RowError, raise_problems
from ppo_cli.data_sets.prompts import (
    PromptSet,
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
from ppo_cli.data_sets.row_sets import EpisodeRows, RowSet, StoredRows, list_notes, load_sets
from ppo_cli.data_sets.rows import Row, RowPrompt, prompt_of
from ppo_cli.errors import UserError
from ppo_cli.records import LargePrompts, Prompt, data_sources

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

    def place(self, index: int) -> Place:
        """Return the place of a row."""
        part = bisect_right(self.starts, index) - 1
        rows, number = self.sets[part].rows, index - self.starts[part]
        return rows.place(number) if isinstance(rows, StoredRows) else rows[number].place

    def join(self, name: str) -> Any:
        """Return the facts of this name of all rows as one array."""
        parts = zip(self.facts, self.sets, strict=True)
        return np.concatenate([np.asarray(getattr(f, name))[: len(s.rows)] for f, s in parts])

    def count_sources(self, indices: Any) -> Counter[str]:
        """Return the numbers of rows of each data_source among these rows."""
        indices, counts = np.asarray(indices), Counter[str]()
        for start, facts, row_set in zip(self.starts, self.facts, self.sets, strict=False):
            end = start + len(row_set.rows)
            chosen = indices[(indices >= start) & (indices < end)] - start
            numbers = np.bincount(np.asarray(facts.source)[chosen]).tolist()
            counts.update({name: n for name, n in zip(facts.sources, numbers, strict=False) if n})
        return counts

    def prompts(self, chosen: Any) -> Iterator[Sequence[RowPrompt]]:
        """Yield the prompts of rows in blocks; `chosen` is an array, True for those rows."""
        for start, row_set in zip(self.starts, self.sets, strict=False):
            rows = row_set.rows
            part = chosen[start : start + len(rows)]
            if isinstance(rows, StoredRows):
                yield from rows.prompts(part) if part.any() else ()
            else:
                prompts = (row.prompt for row in compress(rows, part))
                while block := list(islice(prompts, BATCH_ROWS)):
                    yield block

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
    facts.extend(np.array([*map(facts.describe, like)], dtype=np.int64).reshape(-1, FACTS))
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
        return set(self._rows.count_sources(self._indices))

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
    if not renderer.reads_all_tokens:
        return None
    sample, problems = renderer.render(rows.read(rows.sample())[1])
    limits: dict[str, Any] = {"limit": max_prompt_length, "truncation": truncation}
    long = (
        None if problems else _find_long(rows, renderer, filter_overlong=filter_overlong, **limits)
    )
    if long is None:
        return None
    notes = list_notes(rows.sets)
    if control := list(find_control_rows(rows, renderer)):
        notes += describe_control_words(len(control), rows.place(control[0][0]), control[0][1])
    notes += describe_template(sample, renderer)
    indices: Any = range(len(rows))
    if long:
        first, lengths = rows.place(long[0][0]), [length for _, length in long]
        notes += limit_lengths(first, lengths, len(rows), filter_overlong=filter_overlong, **limits)
    if filter_overlong and long:
        indices = np.delete(np.arange(len(rows)), [index for index, _ in long])

    def build(uids: Sequence[str], chosen: Sequence[Row]) -> Sequence[Prompt]:
        rendered, problems = renderer.render(chosen)
        raise_problems(problems, renderer.check_flags)
        lengths = [(len(item.token_ids), item.row.place) for item in rendered]
        if overlong := [pair for pair in lengths if pair[0] > max_prompt_length]:
            counts = [length for length, _ in overlong]
            limit_lengths(overlong[0][1], counts, len(counts) + 1, filter_overlong=False, **limits)
        return build_prompts(list(zip(uids, rendered, strict=True)), tokenizer, **limits)

    digest = _digest_files(rows, [len(indices), how, limits, filter_overlong], renderer)
    return PromptSet(PromptTable(rows, indices, build, digest), tuple(notes))


def _find_long(
    rows: JoinedRows, renderer: Renderer, *, limit: int, truncation: Truncation,
    filter_overlong: bool,
) -> list[tuple[int, int]] | None:  # fmt: skip
    """Return the rows with more tokens than `limit`, as index and tokens.

    None if the template refuses a row; the error of `limit_lengths` as soon as it is certain.
    """
    bounds = []
    for facts, row_set in zip(rows.facts, rows.sets, strict=True):
        count = len(row_set.rows)
        frames = np.array([_measure_frame(renderer, row, limit) for row in facts.first])
        bounds.append(np.asarray(facts.size)[:count] + frames[np.asarray(facts.kind)[:count]])
    chosen = np.concatenate(bounds) > limit
    candidates = np.flatnonzero(chosen)
    long: list[tuple[int, int]] = []
    refuses, measured = not filter_overlong and truncation == "error", 0
    for counts in renderer.measure(rows.prompts(chosen)):
        indices = candidates[measured : measured + len(counts)].tolist()
        for index, length in zip(indices, counts, strict=True):
            if isinstance(length, RowError):
                return None
            if length > limit:
                long.append((index, length))
        measured += len(counts)
        if long and refuses and BATCH_ROWS <= measured < len(candidates):
            limit_lengths(
                rows.place(long[0][0]), [length for _, length in long], len(rows), limit=limit,
                truncation="error", filter_overlong=False,
                among=f" among the first {indices[-1] + 1}",
            )  # fmt: skip
    return long


def _measure_frame(renderer: Renderer, row: Row, limit: int) -> int:
    """Return the most tokens of a rendered row of this kind besides the bytes of its contents.

    It is more than `limit` where the template does not put each content into its text once.
    """
    texts = []
    for probe in PROBES:
        prompt: RowPrompt = probe
        if not isinstance(row.prompt, str):
            prompt = tuple({**message, "content": probe} for message in row.prompt)
        try:
            texts.append(renderer.text_of(prompt, renderer.messages_of(prompt)))
        except UserError:
            return limit + 1
    count = 1 if isinstance(row.prompt, str) else len(row.prompt)
    short, long = PROBES
    plain = isinstance(row.prompt, str) or all(len(message) == 2 for message in row.prompt)
    if not plain or texts[0].count(short) != count or texts[0].replace(short, long) != texts[1]:
        return limit + 1
    return len(texts[0].encode()) - count * len(short) + SPARE_TOKENS * (count + 1)


def find_control_rows(
    rows: JoinedRows, renderer: Renderer
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield the rows whose text has control tokens, with these."""
    control = control_words(renderer.tokenizer)
    usual = all("<" in token or "[" in token for token in control)
    system: Any = ({"content": renderer.system_prompt or ""},)
    everywhere = not usual or find_control_words(system, control)
    chosen = np.ones(len(rows), dtype=bool) if everywhere else rows.join("marked").astype(bool)
    indices = iter(np.flatnonzero(chosen).tolist())
    for prompt in chain.from_iterable(rows.prompts(chosen)):
        index = next(indices)
        if tokens := find_control_words(renderer.messages_of(prompt), control):
            yield index, tokens


def _digest_files(rows: JoinedRows, settings: Sequence[Any], renderer: Renderer) -> str:
    """Return a digest of the files of rows, and of what else the prompts follow from."""
    digest = hashlib.blake2b(digest_size=16)
    template = str(renderer.tokenizer.chat_template)
    facts: list[Any] = [list(settings), template]
    for label, row_set in zip(rows.labels, rows.sets, strict=True):
        facts.append([label, len(row_set.rows), repr(row_set.columns)])
        if isinstance(row_set.rows, StoredRows):
            for path in row_set.rows.files:
                with path.open("rb") as file:
                    facts.append(hashlib.file_digest(file, "blake2b").hexdigest())
        elif not isinstance(row_set.rows, EpisodeRows):  # whose number says all
            # Not the path, which may be written in several ways.
            facts.append([asdict(row) | {"place": row.place.number} for row in row_set.rows])
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return BY_FILES + digest.hexdigest()
