"""The test before a run: finite scores, a batch like its samples, good above bad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from ppo_cli.errors import RewardError
from ppo_cli.records import Message, Prompt
from ppo_cli.rewards.local.base import Encoded, LoadedModel, TooLong
from ppo_cli.rewards.local.batching import Budget, Row, Work, body_dtype, score_batches
from ppo_cli.rewards.local.formats import ControlToken, CountingFormat

ROWS = 16  # pairs made of the run's own rows
SHORT = 200  # characters of a ground truth that could be an answer
LOOKED_AT = 2000  # rows among which they are looked for
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
NO_ANSWER = "I do not know."  # the worse answer where all rows have the same ground truth
TURN_OFF = "To start all the same: --reward_model_self_test warn."

BUILT_IN = (
    (
        "What is the capital of France?",
        "The capital of France is Paris.",
        "I like trains. The the the of purple, and so nineteen.",
    ),
    (
        "How can I boil an egg?",
        "Put the egg into boiling water, wait about nine minutes for a hard yolk or six for a "
        "soft one, then cool it in cold water.",
        "No. Go away, that is a stupid question.",
    ),
    (
        "What is 7 times 8?",
        "7 times 8 is 56.",
        "qwkj zxv lorp 9#!! ghhh mmm vvv",
    ),
    (
        "Please explain in one sentence why the sky is blue.",
        "Air scatters short, blue wavelengths of sunlight much more than long, red ones, so blue "
        "light reaches our eyes from every direction.",
        "My uncle sells used cars on Sundays, call him now and buy buy buy!",
    ),
    (
        "Can you suggest a name for my grey kitten?",
        "How about Misty? It fits a soft grey coat, and is short and easy to call.",
        "Kittens are worthless, and so is anyone who keeps one.",
    ),
)


@dataclass(frozen=True)
class Pair:
    """A question with an answer that is better than another."""

    messages: tuple[Message, ...]
    good: str
    bad: str


def conversation_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt, its text as one where it has none."""
    return prompt.messages or ({"role": "user", "content": prompt.text},)


def choose_pairs(prompts: Sequence[Prompt]) -> tuple[Pair, ...]:
    """Pair the ground truth of each of the first rows with that of the next other one.

    Built-in pairs of plain English serve only where the rows have no short ground truths: a
    model for one narrow task may know nothing else.
    """
    rows: list[tuple[Prompt, str]] = []
    for prompt in prompts[:LOOKED_AT]:
        truth = _answer_in(prompt)
        if truth is not None and all(prompt.text != row.text for row, _ in rows):
            rows.append((prompt, truth))
        if len(rows) == ROWS:
            break
    pairs = list(_pairs_of_rows(rows))
    return tuple(pairs) if pairs else tuple(_built_in())


def try_out_model(
    loaded: LoadedModel, format_: CountingFormat, prompts: Sequence[Prompt], budget: Budget
) -> str:
    """Test a reward model; raises RewardError with what is wrong, returns a line to show."""
    readable = [
        (pair, good, bad)
        for pair in choose_pairs(prompts)
        if (good := _encode(format_, pair, pair.good)) and (bad := _encode(format_, pair, pair.bad))
    ]
    if not readable:
        raise RewardError(
            f"The reward model could not be tested: no sample fits into {format_.max_length} "
            f"tokens. Raise --reward_model_max_length. {TURN_OFF}"
        )
    samples = [sample for _, *both in readable for sample in both]
    single = [row for sample in samples for row in _score(loaded, [sample], budget)]
    _check_finite(single)
    _check_batch(loaded, samples, single, budget)
    scores = [row.score for row in single]
    results = [(pair, scores[2 * i], scores[2 * i + 1]) for i, (pair, _, _) in enumerate(readable)]
    return _check_direction(results)


def _answer_in(prompt: Prompt) -> str | None:
    truth = prompt.ground_truth
    if isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
        return None
    text = str(truth).strip()
    # Tests, rubrics and the like are data, not an answer.
    return text if 0 < len(text) <= SHORT and text[0] not in "{[" else None


def _pairs_of_rows(rows: Sequence[tuple[Prompt, str]]) -> Iterable[Pair]:
    truths = [truth for _, truth in rows]
    for i, (prompt, truth) in enumerate(rows):
        others = (other for other in truths[i + 1 :] + truths[:i] if other != truth)
        yield Pair(conversation_of(prompt), truth, next(others, NO_ANSWER))


def _built_in() -> Iterable[Pair]:
    for question, good, bad in BUILT_IN:
        yield Pair(({"role": "user", "content": question},), good, bad)


def _encode(format_: CountingFormat, pair: Pair, answer: str) -> Encoded | None:
    try:
        return format_.encode(pair.messages, answer)
    except (TooLong, ControlToken):
        return None


def _score(loaded: LoadedModel, samples: Sequence[Encoded], budget: Budget) -> list[Row]:
    """Score samples in batches; the rows come in the order of the samples."""
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].ids), i))
    rows: dict[int, Row] = {}
    ordered = [samples[i] for i in order]
    for indices, scored in score_batches(loaded, ordered, budget, Work()):
        rows |= {order[index]: row for index, row in zip(indices, scored, strict=True)}
    return [rows[i] for i in range(len(samples))]


def _check_finite(rows: Sequence[Row]) -> None:
    for row in rows:
        for name, value in {"score": row.score, **row.objectives}.items():
            if not isfinite(value):
                raise RewardError(
                    f"The reward model gave {value} as {name} of a plain sample. Its weights may "
                    f"be damaged, or too large for reward.model.dtype. {TURN_OFF}"
                )


def _check_batch(
    loaded: LoadedModel, samples: Sequence[Encoded], single: Sequence[Row], budget: Budget
) -> None:
    tolerance = TOLERANCE.get(body_dtype(loaded.network.module), 2e-2)
    for row, alone in zip(_score(loaded, samples, budget), single, strict=True):
        if not abs(row.score - alone.score) <= tolerance * max(1.0, abs(alone.score)):
            raise RewardError(
                f"The reward model scores the same sample {alone.score:.6g} alone and "
                f"{row.score:.6g} in a padded batch: it reads its padding, so its scores cannot be "
                f"trusted. {TURN_OFF}"
            )


def _check_direction(results: Sequence[tuple[Pair, float, float]]) -> str:
    wrong = [result for result in results if not result[1] > result[2]]
    right = len(results) - len(wrong)
    if 2 * right > len(results):
        return f"Reward model tested: {right} of {len(results)} good answers above bad ones."
    pair, good, bad = wrong[0]
    question = _short(str(pair.messages[-1]["content"]))
    raise RewardError(
        f"The reward model put only {right} of {len(results)} good answers above bad ones. Asked "
        f"{question!r}, {_short(pair.good)!r} got {good:.4g} and {_short(pair.bad)!r} got "
        f"{bad:.4g}. Is it a reward model for such prompts, is higher better, is the adapter "
        f"right (--reward_model_adapter)? {TURN_OFF}"
    )


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
