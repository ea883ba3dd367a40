"""Preference pairs and labelled responses: read from files, split by prompt, and encoded.

A pair has one of three shapes, detected per row: `prompt` with `chosen` and `rejected`; two message
lists that share all but the last message; two transcripts that share all but the last reply. A
file of scored responses (`prompt`, `response`, `score`) is turned into pairs. A labelled response
has one label, or one for each criterion of a rubric. All are tokenised in exactly the format in
which the model will score later.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.data_sets.files import Place, Record, Records, RowError, RowProblem, name_type
from ppo_cli.data_sets.rows import (
    PROMPT_ALIASES,
    as_plain,
    is_transcript,
    list_names,
    read_grades,
    read_message,
    read_messages,
    read_plain,
    read_prompt,
    read_records,
    refuse_media,
    sole,
    split_transcript,
)
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError, RewardError, did_you_mean, plural
from ppo_cli.records import Message
from ppo_cli.report.tracker import Advance
from ppo_cli.rewards.judge.rubric import Criterion, Rubric, read_rubric
from ppo_cli.rewards.judge.written import read_yaml
from ppo_cli.rewards.models.base import Encoded, Format
from ppo_cli.rewards.models.formats import ControlToken, format_for

Messages = tuple[Message, ...]
# Names of the columns, as in most published sets of pairs.
RESPONSE, SCORE = "response", "score"
CHOSEN, REJECTED, PROMPT, MARGIN = "chosen", "rejected", "prompt", "margin"
PROBLEMS_SHOWN = 5  # in an error message
PAIR_SHAPES = (
    'A pair is {"prompt": text or messages, "chosen": reply, "rejected": reply}; without a '
    "`prompt`, chosen and rejected are whole message lists, or whole transcripts "
    '"\\n\\nHuman: …\\n\\nAssistant: …", that differ in the last reply only.'
)


@dataclass(frozen=True)
class Example:
    """What a fit learns from: responses to one prompt, with a preference or labels."""

    place: Place
    messages: Messages

    @property
    def prompt_id(self) -> str:
        """A key that is equal for equal prompts."""
        return prompt_key(self.messages)


@dataclass(frozen=True)
class Pair(Example):
    """Two responses to one prompt; `margin` is by how much the chosen one should lead."""

    chosen: str
    rejected: str
    margin: float = 0.0
    word: ClassVar[str] = "pair"
    useless: ClassVar[tuple[str, str]] = ("equal", "chosen and rejected are the same text")

    @property
    def is_useless(self) -> bool:
        """Whether nothing can be learnt from it."""
        return self.chosen == self.rejected

    @property
    def texts(self) -> tuple[str, ...]:
        """The responses."""
        return self.chosen, self.rejected

    def encode(self, form: Format) -> EncodedPair:
        """Return both samples as tokens."""
        chosen, rejected = (form.encode(self.messages, text) for text in self.texts)
        return EncodedPair(chosen, rejected, self.margin)


@dataclass(frozen=True)
class LabelledRow(Example):
    """A response with a grade in [0, 1] for each criterion; NaN where it has no label."""

    response: str
    grades: tuple[float, ...]
    word: ClassVar[str] = "row"
    useless: ClassVar[tuple[str, str]] = ("unlabelled", "without a label")

    @property
    def is_useless(self) -> bool:
        """Whether nothing can be learnt from it."""
        return all(map(math.isnan, self.grades))

    @property
    def texts(self) -> tuple[str, ...]:
        """The response."""
        return (self.response,)

    def encode(self, form: Format) -> EncodedRow:
        """Return the sample as tokens."""
        samples = (form.encode(self.messages, self.response),)
        return EncodedRow(samples, self.grades, self.prompt_id)


@dataclass(frozen=True)
class Labels:
    """The column of labels: grades of the criteria of a rubric, or one label, its only criterion.

    A label without criteria is true, false or a number from 0 to 1.
    """

    column: str
    rubric: Rubric
    shape: str  # of a row, for messages

    @classmethod
    def of(cls, column: str, criteria: str | None) -> Labels:
        """Return the labels of a file of criteria, or without one a single label."""
        shape = f'A row is {{"prompt": text or messages, "response": text, "{column}": %s}}.'
        if criteria is None:
            return cls(column, Rubric((Criterion(column, f"Its {column}."),)), shape % "0 to 1")
        where = f"--criteria {criteria}"
        rubric = read_rubric(read_yaml(Path(criteria).expanduser(), where), where, fixed=True)
        return cls(column, rubric, shape % '{"NAME": true, false or a level}')

    def read(self, place: Place, record: Record, prompt: str) -> LabelledRow:
        """Read a labelled response; RowError if it is bad."""
        _, messages, response, _ = read_scored(place, {**record, SCORE: None}, prompt)
        cell, criteria = as_plain(record.get(self.column)), self.rubric.criteria
        if not self.rubric.fixed:
            cell = {self.column: cell}
        levels = {one.name: one.levels if self.rubric.fixed else None for one in criteria}
        try:
            grades = dict(read_grades(cell, levels))
        except ValueError as error:
            raise RowError(self.column, str(error)) from None
        known = tuple(grades.get(criterion.name, math.nan) for criterion in criteria)
        return LabelledRow(place, messages, response, known)


def prompt_key(messages: Sequence[Message]) -> str:
    """Return a key that is equal for messages with equal roles and contents."""
    return json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)


@dataclass(frozen=True)
class PairSet:
    """The usable pairs (or labelled rows) of all sources, and rows dropped by reason."""

    pairs: tuple[Pair | LabelledRow, ...]
    notes: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)


def load_pairs(
    sources: Iterable[str], *, skip_bad_rows: bool = False, labels: Labels | None = None
) -> PairSet:
    """Read the pairs, or with `labels` the labelled rows, of all sources.

    A DataError lists all bad rows, unless `skip_bad_rows` drops them.
    """
    pairs: list[Pair | LabelledRow] = []
    kind = LabelledRow if labels else Pair
    shape = labels.shape if labels else PAIR_SHAPES
    problems: list[RowProblem] = []
    notes: list[str] = []
    for source in sources:
        raw = read_source(source)
        # Find the prompt's column by its usual name or an alias.
        names = list(dict.fromkeys(name for _, record in raw.records for name in record))
        prompt = PROMPT if PROMPT in names else sole(PROMPT_ALIASES, names)
        if prompt not in (PROMPT, ""):
            notes.append(f"{raw.source}: the prompt is read from column '{prompt}'.")
        columns = set(names)
        # Scored responses, else pairs or labels; a missing column is reported for the whole file.
        scored = {RESPONSE, SCORE} <= columns and not {CHOSEN, REJECTED} & columns
        source_pairs: Sequence[Pair | LabelledRow]
        if prompt and scored and labels is None:
            source_pairs, bad, note = pairs_from_scores(raw, prompt)
            notes.append(note)
        else:
            read: Callable[..., Pair | LabelledRow] = labels.read if labels else read_pair
            needed = (RESPONSE, labels.column) if labels else (CHOSEN, REJECTED)
            for column in needed if raw.records else ():
                if column not in names:
                    raise DataError(
                        f"{raw.source}: no column '{column}'. Its columns: {list_names(names)}."
                        f"{did_you_mean(column, names)} {shape}"
                    )
            source_pairs, bad = read_records(raw, partial(read, prompt=prompt))
        pairs += source_pairs
        problems += bad
    # Report bad rows, or drop them.
    if problems and not skip_bad_rows:
        rows = len({problem.place for problem in problems})
        lines = [
            f"{plural(rows, 'bad row')}:",
            *(str(problem) for problem in problems[:PROBLEMS_SHOWN]),
        ]
        if len(problems) > PROBLEMS_SHOWN:
            lines.append(f"… and {len(problems) - PROBLEMS_SHOWN} more.")
        way = "Fix them, or leave them out with --skip_bad_rows."
        raise DataError("\n".join([*lines, shape, way]))
    dropped: dict[str, int] = {}
    if problems:
        dropped["bad"] = len({problem.place for problem in problems})
        notes.append(f"{plural(dropped['bad'], 'bad row')} left out, such as {problems[0]}.")
    # A pair of equal texts teaches nothing, and neither does a row without labels.
    usable = tuple(example for example in pairs if not example.is_useless)
    if len(usable) < len(pairs):
        name, why = kind.useless
        dropped[name] = len(pairs) - len(usable)
        notes.append(f"{plural(dropped[name], kind.word)} left out: {why}.")
    # Empty responses may be meant (a model that says nothing), so they only get a note.
    if empty := sum(not all(text.strip() for text in example.texts) for example in usable):
        notes.append(f"{plural(empty, kind.word)} with an empty response; kept.")
    return PairSet(usable, tuple(notes), dropped)


def pairs_from_scores(raw: Records, prompt: str) -> tuple[list[Pair], list[RowProblem], str]:
    """Turn scored responses into pairs; returns pairs, bad rows and a note.

    Equal texts count once, and equal scores do not form a pair.
    """
    rows, problems = read_records(raw, partial(read_scored, prompt=prompt))
    # Group by prompt, and within it by response: the first score of equal texts counts.
    groups: dict[str, dict[str, tuple[float, Place, Messages]]] = {}
    for place, messages, response, score in rows:
        if score is not None:
            group = groups.setdefault(prompt_key(messages), {})
            group.setdefault(response, (score, place, messages))
    # Every two responses of different scores form a pair, the higher one chosen.
    pairs = [
        Pair(place, messages, better, worse)
        for group in groups.values()
        for (better, (high, place, messages)), (worse, (low, _, _)) in combinations(
            sorted(group.items(), key=lambda scored: -scored[1][0]), 2
        )
        if high > low
    ]
    made, of = plural(len(pairs), "pair"), plural(len(groups), "prompt")
    note = f"{raw.source}: {made} out of scored responses to {of}"
    unscored = sum(score is None for *_, score in rows)
    lost = f", {unscored} without a score left out" if unscored else ""
    return pairs, problems, f"{note}{lost}."


def read_scored(
    place: Place, record: Record, prompt: str
) -> tuple[Place, Messages, str, float | None]:
    """Read messages, response and score (None if it failed) of a row; RowError if it is bad."""
    refuse_media(record)
    question = read_prompt(record.get(prompt), prompt)
    messages = ({"role": "user", "content": question},) if isinstance(question, str) else question
    response = read_plain(record.get(RESPONSE), RESPONSE)
    if not isinstance(response, str):
        raise RowError(RESPONSE, f"is {name_type(response)}, not text")
    score = as_plain(record.get(SCORE))
    # True and false are numbers in Python, but not scores.
    number = isinstance(score, int | float) and not isinstance(score, bool)
    if score is not None and not (number and math.isfinite(score)):
        raise RowError(SCORE, f"is {score!r}, not a number")
    return place, messages, response, None if score is None else float(score)


def read_pair(place: Place, record: Record, prompt: str) -> Pair:
    """Turn one record into a pair; RowError if it is bad."""
    refuse_media(record)
    # Each side is a reply, with the turns before it if the column holds a dialogue.
    chosen_before, chosen = read_side(record.get(CHOSEN), CHOSEN)
    rejected_before, rejected = read_side(record.get(REJECTED), REJECTED)
    question = read_plain(record.get(prompt), prompt) if prompt else None
    if question is not None:
        messages = read_prompt_column(question, prompt)
        # A system message may be in the dialogues but not in the prompt column.
        if len(chosen_before) == len(messages) + 1 and chosen_before[0]["role"] == "system":
            messages = (chosen_before[0], *messages)
        for before, column in ((chosen_before, CHOSEN), (rejected_before, REJECTED)):
            # Dialogues must continue the prompt, or the pair would compare replies to different
            # questions.
            if before and plain_turns(before) != plain_turns(messages):
                problem = "has other turns than `prompt` before its reply; they must be equal"
                raise RowError(column, problem)
    else:
        messages = shared_opening(chosen_before, rejected_before)
    return Pair(place, messages, chosen, rejected, read_margin(record.get(MARGIN)))


def read_side(value: Any, column: str) -> tuple[Messages, str]:
    """Return the turns before a response (none for a plain text) and the response."""
    plain = read_plain(value, column)
    # Three forms: plain text, a transcript with speakers, or a list of messages.
    if isinstance(plain, str):
        if not is_transcript(plain):
            return (), plain
        messages = split_transcript(plain)
    elif isinstance(plain, list) and plain:
        messages = tuple(read_message(m, f"{column}[{i}]") for i, m in enumerate(plain))
    else:
        kind = "an empty list" if plain == [] else name_type(plain)
        raise RowError(column, f"is {kind}, not text or a list of messages")
    if messages[-1]["role"] != "assistant":
        raise RowError(column, f"ends with the {messages[-1]['role']}, not with a reply")
    return messages[:-1], str(messages[-1]["content"])


def read_prompt_column(value: Any, column: str) -> Messages:
    """Return the messages of a prompt column: text, messages, or a transcript."""
    prompt = read_prompt(value, column)
    if not isinstance(prompt, str):
        return prompt
    # hh-rlhf's prompts are transcripts; an empty last turn of the assistant is left out.
    if prompt.startswith("\n\nHuman:"):
        turns = [dict(m) for m in split_transcript(prompt) if m["content"]]
        return read_messages(turns, column)
    return ({"role": "user", "content": prompt},)


def shared_opening(chosen: Messages, rejected: Messages) -> Messages:
    """Return the turns before the reply, which both dialogues must share."""
    for before, column in ((chosen, CHOSEN), (rejected, REJECTED)):
        if not before:
            raise RowError(column, "is only a reply, and the row has no prompt")
    chosen_turns, rejected_turns = plain_turns(chosen), plain_turns(rejected)
    if chosen_turns != rejected_turns:
        # Name the first turn that differs: dialogues may be long.
        same = [a == b for a, b in zip(chosen_turns, rejected_turns, strict=False)]
        first = same.index(False) if False in same else len(same)
        raise RowError(
            REJECTED,
            f"differs from `chosen` from turn {first + 1} on; only the last reply may differ",
        )
    return read_messages([dict(message) for message in chosen], CHOSEN)


def plain_turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Return roles and stripped contents, for comparison."""
    return [(str(m["role"]), str(m["content"]).strip()) for m in messages]


def read_margin(value: Any) -> float:
    """Return the margin of a pair, or 0 without one."""
    plain = as_plain(value)
    if plain is None:
        return 0.0
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise RowError(MARGIN, f"is {name_type(plain)}, not a number")
    if not math.isfinite(plain) or plain < 0:
        raise RowError(MARGIN, f"is {plain}; a margin is a number from 0 up")
    return float(plain)


MAX_HELD_OUT = 2000  # more pairs would hardly make the accuracy more precise


@dataclass(frozen=True)
class Split:
    """Pairs (or labelled rows) for training, and held-out ones."""

    train: tuple[Pair | LabelledRow, ...]
    held_out: tuple[Pair | LabelledRow, ...]


def split_by_prompt(pairs: Sequence[Pair | LabelledRow], share: float, seed: int) -> Split:
    """Hold out about `share` of the pairs, at most MAX_HELD_OUT; a prompt's pairs stay together."""
    if not 0 < share < 1:
        raise DataError(f"--val_share {share}: give a share between 0 and 1, such as 0.1.")
    # Sorted, so that the split depends on the seed and not on the order of the rows.
    prompts, word = sorted({pair.prompt_id for pair in pairs}), pairs[0].word
    if len(prompts) < 2:
        raise DataError(
            f"{len(prompts)} prompt in {len(pairs)} {word}s: none of them can be held out. Give "
            f"{word}s of more prompts, or the held-out {word}s with --val_data FILE."
        )
    by_prompt: dict[str, int] = dict.fromkeys(prompts, 0)
    for pair in pairs:
        by_prompt[pair.prompt_id] += 1
    # Take prompts in random order until the share is reached; at least one stays for training.
    random.Random(f"held out {seed}").shuffle(prompts)
    target = min(max(1, round(share * len(pairs))), MAX_HELD_OUT)
    held_out: set[str] = set()
    pair_count = 0
    for prompt in prompts[:-1]:
        if pair_count >= target:
            break
        held_out.add(prompt)
        pair_count += by_prompt[prompt]
    return Split(
        tuple(pair for pair in pairs if pair.prompt_id not in held_out),
        tuple(pair for pair in pairs if pair.prompt_id in held_out),
    )


def exclude_held_out(
    pairs: Sequence[Pair | LabelledRow], held_out: Sequence[Pair | LabelledRow]
) -> Split:
    """Split with given held-out pairs: training pairs with one of their prompts are dropped."""
    prompts = {pair.prompt_id for pair in held_out}
    train = tuple(pair for pair in pairs if pair.prompt_id not in prompts)
    if not train:
        raise DataError(
            f"Every prompt of --data is also in --val_data: no {pairs[0].word}s remain for "
            "training."
        )
    return Split(train, tuple(held_out))


# Far above any sample; lengths are checked after encoding.
NO_LIMIT = 10**9  # tokens


class EncodedExample:
    """What a fit learns from, as tokens."""

    samples: tuple[Encoded, ...]

    @property
    def length(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.ids) for sample in self.samples)


@dataclass(frozen=True)
class EncodedPair(EncodedExample):
    """Both samples of a pair as tokens."""

    chosen: Encoded
    rejected: Encoded
    margin: float

    @property
    def samples(self) -> tuple[Encoded, ...]:  # type: ignore[override]
        """Both samples, the chosen one first."""
        return self.chosen, self.rejected


@dataclass(frozen=True)
class EncodedRow(EncodedExample):
    """The sample of a labelled row as tokens, its grades (NaN: no label), and its prompt."""

    samples: tuple[Encoded, ...]
    grades: tuple[float, ...]
    prompt_id: str


@dataclass(frozen=True)
class EncodedSet:
    """Encoded pairs, and messages about the others: too long, or refused by the chat template."""

    pairs: tuple[EncodedExample, ...]
    word: str
    too_long: tuple[str, ...]
    refused: tuple[str, ...]


def unlimited_format(tokenizer: Any, path: str) -> Format:
    """Return the scoring format without its length limit, which would cut prompts to fit.

    Cutting would give two responses of different length different prompts.
    """
    return format_for(tokenizer, ModelReward(path=path), NO_LIMIT)


def encode_pairs(
    form: Format, pairs: Sequence[Pair | LabelledRow], max_length: int, advance: Advance
) -> EncodedSet:
    """Encode the samples of each pair or row, and call `advance(1)` after it.

    A pair is dropped and listed if a sample has more than `max_length` tokens or cannot be encoded.
    """
    done: list[EncodedExample] = []
    too_long: list[str] = []
    refused: list[str] = []
    for pair in pairs:
        # One sample that cannot be encoded drops its pair, since a comparison needs both.
        try:
            encoded = pair.encode(form)
        except (RewardError, ControlToken) as error:
            refused.append(f"{pair.place}: {error}")
        else:
            if encoded.length > max_length:
                too_long.append(f"{pair.place}: {encoded.length}")
            else:
                done.append(encoded)
        advance(1)
    return EncodedSet(tuple(done), pairs[0].word, tuple(too_long), tuple(refused))


def describe_left_out(encoded: EncodedSet, what: str, max_length: int) -> list[str]:
    """Return notes on how many pairs were dropped and why; DataError if none remains."""
    notes, what = [], f"{what} {encoded.word}"
    if encoded.refused:
        notes.append(f"{plural(len(encoded.refused), what)} left out: {encoded.refused[0]}")
    if encoded.too_long:
        notes.append(
            f"{plural(len(encoded.too_long), what)} left out, longer than "
            f"{max_length} tokens ({encoded.too_long[0]}); --max_length sets the limit."
        )
    if not encoded.pairs:
        raise DataError("\n".join([f"There is no usable {what}.", *notes]))
    return notes


def raise_if_unrenderable(encoded: EncodedSet) -> None:
    """Raise DataError if the chat template cannot render some pairs."""
    if not encoded.refused:
        return
    raise DataError(
        f"{plural(len(encoded.refused), encoded.word)} cannot be rendered, such as "
        f"{encoded.refused[0]} Leave such rows out with --skip_bad_rows, or give another "
        "--template."
    )
