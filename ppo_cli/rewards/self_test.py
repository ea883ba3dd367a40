"""The test of a reward model before a run: good answers must score above bad ones.

Loaded here or behind a server, a model is asked the same pairs and judged by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ppo_cli.errors import RewardError, shorten
from ppo_cli.records import Message, Prompt

Sample = TypeVar("Sample")

ROWS = 16  # pairs made of the run's own rows
SHORT = 200  # characters of a ground truth that could be an answer
LOOKED_AT = 2000  # rows among which they are looked for
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
    """A prompt with an answer that is better than another."""

    prompt: Prompt
    good: str
    bad: str


def conversation_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt, its text as one where it has none."""
    return prompt.messages or ({"role": "user", "content": prompt.text},)


def one_of_each_kind(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """The first prompt of each order of roles: a template may refuse some."""
    kinds = {tuple(m["role"] for m in conversation_of(p)): p for p in reversed(prompts)}
    return tuple(kinds.values())


def like(prompts: Sequence[Prompt], question: str, number: int = 0) -> Prompt:
    """A prompt with another question, written as the run's own prompts are where that works."""
    rendered = question
    for prompt in prompts[:1]:
        if prompt.text and prompt.rendered.count(prompt.text) == 1:
            rendered = prompt.rendered.replace(prompt.text, question)
    asked = ({"role": "user", "content": question},)
    return Prompt(f"self-test-{number}", question, asked, rendered, ())


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
    return tuple(_pairs_of_rows(rows)) or tuple(
        Pair(like(prompts, question, n), good, bad)
        for n, (question, good, bad) in enumerate(BUILT_IN)
    )


def encode_pairs(
    pairs: Sequence[Pair], encode: Callable[[Prompt, str], Sample | None], most: object
) -> tuple[list[Pair], list[Sample]]:
    """Encode good and bad answer of each pair, in turn; pairs above `most` tokens are left out.

    `encode` returns None for a sample that does not fit.
    """
    kept: list[Pair] = []
    samples: list[Sample] = []
    for pair in pairs:
        good, bad = encode(pair.prompt, pair.good), encode(pair.prompt, pair.bad)
        if good is not None and bad is not None:
            kept.append(pair)
            samples += [good, bad]
    if not kept:
        raise RewardError(
            f"The reward model could not be tested: no sample fits into {most} tokens. Raise "
            f"--reward_model_max_length. {TURN_OFF}"
        )
    return kept, samples


def check_direction(pairs: Sequence[Pair], scores: Sequence[float], doubt: str) -> str:
    """Return a line to show; RewardError unless most good answers score above the bad ones.

    `scores` are in the order of `encode_pairs`; `doubt` ends the question of the error's text.
    """
    results = list(zip(pairs, scores[::2], scores[1::2], strict=True))
    wrong = [result for result in results if not result[1] > result[2]]
    right = len(results) - len(wrong)
    if 2 * right > len(results):
        return f"Reward model tested: {right} of {len(results)} good answers above bad ones."
    pair, good, bad = wrong[0]
    asked = str(conversation_of(pair.prompt)[-1]["content"])
    question, better, worse = (shorten(text, 80) for text in (asked, pair.good, pair.bad))
    raise RewardError(
        f"The reward model put only {right} of {len(results)} good answers above bad ones. Asked "
        f"{question!r}, {better!r} got {good:.4g} and {worse!r} got "
        f"{bad:.4g}. Is it a reward model for such prompts, is higher better, {doubt}? {TURN_OFF}"
    )


@contextmanager
def as_strict_as(mode: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Let a failed test stop the run when `mode` is strict, and only tell it otherwise."""
    try:
        yield
    except RewardError as failed:
        if mode == "strict":
            raise
        tell(str(failed))


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
        yield Pair(prompt, truth, next(others, NO_ANSWER))
