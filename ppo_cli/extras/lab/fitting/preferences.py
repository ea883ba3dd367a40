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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations
from typing import Any

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.data_sets.files import Place, Record, Records, RowError, RowProblem, name_type
from ppo_cli.data_sets.rows import (
    PROMPT_ALIASES,
    as_plain,
    list_names,
    read_message,
    read_messages,
    read_plain,
    read_prompt,
    read_records,
    refuse_media,
    sole,
)
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError, RewardError, did_you_mean, plural
from ppo_cli.extras.lab.criteria import read_grades
from ppo_cli.extras.lab.transcripts import is_transcript, split_transcript
from ppo_cli.paths import user_path
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
    """What a fit learns from: a pair of responses to one prompt, or a labelled response.

    `texts` are the chosen and the rejected response, or the labelled one. `targets` are the margin
    by which the chosen one should lead, or the grades of all criteria in [0, 1], NaN without label.
    """

    place: Place
    messages: Messages
    texts: tuple[str, ...]
    targets: tuple[float, ...] = (0.0,)

    @property
    def prompt_id(self) -> str:
        """A key that is equal for equal prompts."""
        return prompt_key(self.messages)

    @property
    def word(self) -> str:
        """What messages call it."""
        return "pair" if len(self.texts) == 2 else "row"

    @property
    def is_useless(self) -> bool:
        """Whether nothing can be learnt from it: equal texts, or no label."""
        if len(self.texts) == 2:
            return self.texts[0] == self.texts[1]
        return all(map(math.isnan, self.targets))


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
        rubric = read_rubric(read_yaml(user_path(criteria), where), where, fixed=True)
        return cls(column, rubric, shape % '{"NAME": true, false or a level}')

    def read(self, place: Place, record: Record, prompt: str) -> Example:
        """Read a labelled response; RowError if it is bad."""
        _, messages, response, _ = read_scored(place, {**record, SCORE: None}, prompt)
        cell, criteria = as_plain(record.get(self.column)), self.rubric.criteria
        if not self.rubric.fixed:
            cell = {self.column: cell}
        levels = {c.name: c.levels if self.rubric.fixed else None for c in criteria}
        try:
            grades = dict(read_grades(cell, levels))
        except ValueError as error:
            raise RowError(self.column, str(error)) from None
        targets = tuple(grades.get(criterion.name, math.nan) for criterion in criteria)
        return Example(place, messages, (response,), targets)


def prompt_key(messages: Sequence[Message]) -> str:
    """Return a key that is equal for messages with equal roles and contents."""
    return json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)


@dataclass(frozen=True)
class PairSet:
    """The usable pairs (or labelled rows) of all sources, and rows dropped by reason."""

    pairs: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)


def load_pairs(
    sources: Iterable[str], *, skip_bad_rows: bool = False, labels: Labels | None = None
) -> PairSet:
    """Read the pairs, or with `labels` the labelled rows, of all sources.

    A DataError lists all bad rows, unless `skip_bad_rows` drops them.
    """
    pairs: list[Example] = []
    word = "row" if labels else "pair"
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
        if prompt and scored and labels is None:
            source_pairs, bad, note = pairs_from_scores(raw, prompt)
            notes.append(note)
        else:
            read = labels.read if labels else read_pair
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
        name, why = "equal", "chosen and rejected are the same text"
        if labels:
            name, why = "unlabelled", "without a label"
        dropped[name] = len(pairs) - len(usable)
        notes.append(f"{plural(dropped[name], word)} left out: {why}.")
    # Empty responses may be meant (a model that says nothing), so they only get a note.
    if empty := sum(not all(text.strip() for text in example.texts) for example in usable):
        notes.append(f"{plural(empty, word)} with an empty response; kept.")
    return PairSet(usable, tuple(notes), dropped)


def pairs_from_scores(raw: Records, prompt: str) -> tuple[list[Example], list[RowProblem], str]:
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
        Example(place, messages, (better, worse))
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


def read_pair(place: Place, record: Record, prompt: str) -> Example:
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
    margin = as_plain(record.get(MARGIN))
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
        raise RowError(MARGIN, f"is {name_type(margin)}, not a number")
    if margin is not None and (not math.isfinite(margin) or margin < 0):
        raise RowError(MARGIN, f"is {margin}; a margin is a number from 0 up")
    return Example(place, messages, (chosen, rejected), (float(margin or 0),))


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


MAX_HELD_OUT = 2000  # more pairs would hardly make the accuracy more precise


@dataclass(frozen=True)
class Split:
    """Pairs (or labelled rows) for training, and held-out ones."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]


def split_by_prompt(pairs: Sequence[Example], share: float, seed: int) -> Split:
    """Hold out about `share` of the pairs, at most MAX_HELD_OUT; a prompt's pairs stay together."""
    if not 0 < share < 1:
        raise DataError(f"--val_share {share}: give a share between 0 and 1, such as 0.1.")
    # Sorted, so that the split depends on the seed and not on the order of the rows.
    counts, word = Counter(pair.prompt_id for pair in pairs), pairs[0].word
    prompts = sorted(counts)
    if len(prompts) < 2:
        raise DataError(
            f"1 prompt in {plural(len(pairs), word)}: none of them can be held out. Give "
            f"{word}s of more prompts, or the held-out {word}s with --val_data FILE."
        )
    # Take prompts in random order until the share is reached; at least one stays for training.
    random.Random(f"held out {seed}").shuffle(prompts)
    target = min(max(1, round(share * len(pairs))), MAX_HELD_OUT)
    before = accumulate((counts[prompt] for prompt in prompts), initial=0)
    held_out = {p for p, held in zip(prompts[:-1], before, strict=False) if held < target}
    return Split(
        tuple(pair for pair in pairs if pair.prompt_id not in held_out),
        tuple(pair for pair in pairs if pair.prompt_id in held_out),
    )


def exclude_held_out(pairs: Sequence[Example], held_out: Sequence[Example]) -> Split:
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


@dataclass(frozen=True)
class EncodedExample:
    """The responses of an example as tokens, with its targets and its prompt."""

    samples: tuple[Encoded, ...]
    targets: tuple[float, ...]
    prompt_id: str = ""

    @property
    def length(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.ids) for sample in self.samples)


def unlimited_format(tokenizer: Any, path: str) -> Format:
    """Return the scoring format without its length limit, which would cut prompts to fit.

    Cutting would give two responses of different length different prompts.
    """
    return format_for(tokenizer, ModelReward(path=path), NO_LIMIT)


def encode_pairs(
    form: Format,
    pairs: Sequence[Example],
    what: str,
    max_length: int,
    *,
    skip_bad_rows: bool,
    advance: Advance,
) -> tuple[list[EncodedExample], list[str], dict[str, int]]:
    """Return pairs or rows as tokens, notes about those left out, and how many by reason.

    One sample that is longer than `max_length` tokens, or that the chat template refuses, drops its
    pair. DataError for one that is refused, unless `skip_bad_rows`, and if none remains.
    """  # fmt: skip
    encoded: list[EncodedExample] = []
    too_long, refused = list[str](), list[str]()
    what = f"{what} {pairs[0].word}"
    for pair in pairs:
        try:
            samples = tuple(form.encode(pair.messages, text) for text in pair.texts)
        except (RewardError, ControlToken) as error:
            refused.append(f"{pair.place}: {error}")
        else:
            example = EncodedExample(samples, pair.targets, pair.prompt_id)
            if example.length > max_length:
                too_long.append(f"{pair.place}: {example.length}")
            else:
                encoded.append(example)
        advance(1)
    if refused and not skip_bad_rows:
        raise DataError(
            f"{plural(len(refused), pairs[0].word)} cannot be rendered, such as {refused[0]} Leave "
            "such rows out with --skip_bad_rows, or give another --template."
        )
    notes = []
    if refused:
        notes.append(f"{plural(len(refused), what)} left out: {refused[0]}")
    if too_long:
        notes.append(
            f"{plural(len(too_long), what)} left out, longer than {max_length} tokens "
            f"({too_long[0]}); --max_length sets the limit."
        )
    if not encoded:
        raise DataError("\n".join([f"There is no usable {what}.", *notes]))
    return encoded, notes, {"too_long": len(too_long), "refused": len(refused)}
