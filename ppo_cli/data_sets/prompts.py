"""Prompt sets ready for sampling, and their seeded order in training."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ppo_cli.data_sets.files import RowProblem, raise_problems
from ppo_cli.data_sets.render import Rendered, Renderer, Tokenizer
from ppo_cli.data_sets.rows import RowSet, load_sets, prompt_of
from ppo_cli.errors import DataError
from ppo_cli.records import Prompt
from ppo_cli.thoughts import opening_of

NO_TEMPLATE = "The model's tokenizer has no chat template: prompts are used as plain text."
Truncation = Literal["error", "left", "right"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their counts; `notes` are sentences that the user should read once."""

    prompts: tuple[Prompt, ...]
    per_file: Mapping[str, int]
    dropped_overlong: int = 0
    truncated: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)


def load_prompts(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    max_samples: int = -1,
    max_prompt_length: int,
    **how: Any,
) -> PromptSet:
    """Read files or hub sets to prompts; any bad row stops it, and all of them are reported.

    `max_samples` keeps the first rows over all sources, before overlong ones are dropped. For the
    rest see `render_prompts`.
    """
    sets = load_sets(sources, prompt_key=prompt_key, source_key=source_key, max_samples=max_samples)
    return render_prompts(sets, tokenizer, max_prompt_length=max_prompt_length, **how)


def render_prompts(
    sets: Sequence[RowSet],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    truncation: Truncation = "error",
    filter_overlong: bool = False,
    system_prompt: str | None = None,
    apply_chat_template: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Render and tokenise rows; those that are refused or too long are reported together."""
    renderer = Renderer(tokenizer, system_prompt, apply_chat_template, template_arguments or {})
    found: list[tuple[str, Rendered]] = []
    problems: list[RowProblem] = []
    for rows, label in zip(sets, unique_labels(sets), strict=True):
        rendered, refused = renderer.render(rows.rows)
        problems.extend(refused)
        found.extend((f"{label}:{item.row.place.number}", item) for item in rendered)
    raise_problems(problems)
    notes = [note for rows in sets for note in rows.notes]
    if hit := [item for _, item in found if item.control_words]:
        notes.append(
            f"{len(hit)} prompts hold control words that the model reads as control tokens, first "
            f"{hit[0].row.place}: {', '.join(hit[0].control_words)}."
        )
    if apply_chat_template and not renderer.uses_template:
        notes.append(NO_TEMPLATE)
    return fit(found, tokenizer, max_prompt_length, truncation, filter_overlong, notes)


def unique_labels(sets: Sequence[RowSet]) -> list[str]:
    """Return a short name for each source: its stem, and more of its path where stems repeat."""
    forms: list[list[str]] = []
    for rows in sets:
        path = Path(rows.source)
        forms.append([rows.label, path.name, "/".join(path.parts[-2:]), rows.source])
    labels = [form[0] for form in forms]
    for level in range(1, 4):
        labels = [
            form[level] if labels.count(label) > 1 else label
            for form, label in zip(forms, labels, strict=True)
        ]
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        labels[index] = label if seen[label] == 1 else f"{label}#{seen[label]}"
    return labels


def fit(
    found: Sequence[tuple[str, Rendered]],
    tokenizer: Tokenizer,
    limit: int,
    truncation: Truncation,
    filter_overlong: bool,
    notes: Sequence[str],
) -> PromptSet:
    """Drop, cut or refuse prompts above the limit, and count what was done."""
    long = [item for _, item in found if len(item.token_ids) > limit]
    if long and not filter_overlong and truncation == "error":
        first, longest = long[0], max(len(item.token_ids) for item in long)
        raise DataError(
            f"{first.row.place}: the prompt has {len(first.token_ids)} tokens, the limit is "
            f"{limit} ({len(long)} such rows, the longest has {longest}). Raise "
            "--max_prompt_length, drop them with data.filter_overlong_prompts=true, or cut them "
            "with data.truncation=left (keeps the end) or right (keeps the start)."
        )
    prompts: list[Prompt] = []
    per_file = {item.row.place.file: 0 for _, item in found}
    for uid, item in found:
        if filter_overlong and len(item.token_ids) > limit:
            continue
        per_file[item.row.place.file] += 1
        text, ids = item.text, item.token_ids
        if len(ids) > limit:
            ids = ids[-limit:] if truncation == "left" else ids[:limit]
            text = str(tokenizer.decode(list(ids), skip_special_tokens=False))
        row = prompt_of("", item.row)
        prompts.append(
            replace(
                row, uid=uid, messages=item.messages, rendered=text, token_ids=ids,
                opened=opening_of(text),
            )
        )  # fmt: skip
    if not prompts:
        longest = max(len(item.token_ids) for item in long)
        raise DataError(
            f"All {len(long)} prompts are longer than {limit} tokens (the longest has {longest}) "
            "and were dropped. Raise --max_prompt_length."
        )
    dropped = len(found) - len(prompts)
    truncated = 0 if filter_overlong else len(long)
    told = list(notes)
    if dropped:
        told.append(
            f"{dropped} of {len(found)} prompts are longer than {limit} tokens and were dropped."
        )
    if truncated:
        kept = "end" if truncation == "left" else "start"
        told.append(
            f"{truncated} of {len(found)} prompts were cut to {limit} tokens; their {kept} was "
            "kept."
        )
    return PromptSet(tuple(prompts), per_file, dropped, truncated, tuple(told))


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a short hash of the prompts in their order: uids, token ids, ground truths."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        truth = json.dumps(prompt.ground_truth, sort_keys=True, default=str)
        parts = [prompt.uid, list(prompt.token_ids), prompt.data_source, truth]
        digest.update(json.dumps(parts).encode("utf-8") + b"\n")
    return digest.hexdigest()


class PromptOrder:
    """Endless batches of prompt indices: seeded, full, resumable at any batch.

    An epoch has `size // batch_size` full batches. The prompts that did not fit are held over:
    they open the next epoch, so no prompt comes twice in an epoch and none is left out twice in
    a row. The order depends on the seed and the epoch alone, on every machine.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        """Start at the first batch of epoch 0."""
        if batch_size < 1:
            raise DataError(f"The batch size is {batch_size}; it must be at least 1.")
        if size < batch_size:
            raise DataError(
                f"{size} prompts cannot fill a batch of {batch_size}. Lower --batch_size "
                f"(data.train_batch_size) to {size} or less, or give more prompts."
            )
        self.size, self.batch_size = size, batch_size
        self.seed, self.shuffle, self.fingerprint = seed, shuffle, fingerprint
        self._epoch, self._position = 0, 0
        self._held_over: list[int] = []
        self._order = self._draw()

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, that the next batch comes from."""
        return self._epoch + (self._position + self.batch_size > self.size)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch."""
        return self.size // self.batch_size

    @property
    def taken(self) -> int:
        """How many batches were taken since the first."""
        return self._epoch * self.steps_per_epoch + self._position // self.batch_size

    def total_steps(self, epochs: int) -> int:
        """Return the number of batches in so many epochs."""
        return epochs * self.steps_per_epoch

    def take(self) -> list[int]:
        """Return the indices of the next batch; always a full one."""
        if self._position + self.batch_size > self.size:
            self._held_over = self._order[self._position :]
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._draw()
        start, self._position = self._position, self._position + self.batch_size
        return self._order[start : self._position]

    def peek(self, ahead: int = 1) -> list[int]:
        """Return the batch that the `ahead`-th take from now will return; 1 is the next one."""
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}; it must be at least 1")
        later = copy.copy(self)  # taking makes lists anew, so none is shared that changes
        return [later.take() for _ in range(ahead)][-1]

    def _draw(self) -> list[int]:
        """Return the order of this epoch, the held-over prompts first."""
        first = self._held_over[0] if self._held_over else 0
        order = [*range(first, self.size), *range(first)]
        if self.shuffle:
            # Sorting raw PCG64 words: numpy promises these, not `permutation`, across releases.
            words = np.random.PCG64([self.seed, self._epoch]).random_raw(self.size)
            order = np.argsort(words, kind="stable").tolist()
        held = set(self._held_over)
        return self._held_over + [index for index in order if index not in held]

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run must remember, JSON-serialisable."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
            "epoch": self._epoch,
            "position": self._position,
            "held_over": list(self._held_over),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; other prompts or another seed are refused."""
        if state["size"] != self.size or state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"The prompts changed since the checkpoint: it saw {state['size']}, now there are "
                f"{self.size}{', with other contents' * (state['size'] == self.size)}. Resume with "
                "the same data files, model and prompt settings, or start anew with --resume never."
            )
        for name, now in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != now:
                raise DataError(
                    f"The checkpoint was made with {name} {state[name]}, this run asks for {now}. "
                    f"Give the same {name}, or start anew with --resume never."
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._held_over = [int(index) for index in state["held_over"]]
        self._order = self._draw()
