"""The task of the embedded model: sums of two two-digit numbers, and pupils who answer them.

A pair of numbers belongs to exactly one split, whatever its order: 45 + 37 is where 37 + 45 is.
The supervised text comes from the warm-up pairs alone. Pupils know how to add but are sloppy,
and most of them forget the carry; that is the habit which PPO has to unlearn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

SEED = 17
DATA_SOURCE = "ppo-cli/arithmetic"
SMALLEST, LARGEST = 10, 99
VALIDATION_ROWS = 256
TRAIN_ROWS = 2400

PHRASES = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "How much is {a} plus {b}?",
)
# The supervised text never asks like this, so prompts differ in difficulty, as real ones do, and
# the critic has something to learn: how much to expect of a prompt.
UNFAMILIAR = "Please, what is {a} + {b}?"
UNFAMILIAR_EVERY = 9  # training rows

# How often a pupil is careful, by whether the sum has a carry; the rest are mistakes.
CAREFUL_WITH_CARRY = 0.22
CAREFUL_WITHOUT_CARRY = 0.45
FORGETS_CARRY = 0.60


@dataclass(frozen=True)
class Sum:
    """One question: two numbers and the way it is asked."""

    a: int
    b: int
    phrase: str

    @property
    def question(self) -> str:
        """The words of the prompt."""
        return self.phrase.format(a=self.a, b=self.b)

    @property
    def answer(self) -> str:
        """The right answer."""
        return str(self.a + self.b)

    @property
    def carries(self) -> bool:
        """Whether the units add up to ten or more."""
        return self.a % 10 + self.b % 10 >= 10


@dataclass(frozen=True)
class Splits:
    """Ordered pairs of numbers, disjoint up to order."""

    validation: list[tuple[int, int]]
    warm_up: list[tuple[int, int]]


def split_pairs(seed: int) -> Splits:
    """Hold the validation pairs out of everything else."""
    numbers = range(SMALLEST, LARGEST + 1)
    unordered = [(a, b) for a in numbers for b in numbers if a <= b]
    random.Random(f"{seed} pairs").shuffle(unordered)
    held_out, rest = unordered[:VALIDATION_ROWS], unordered[VALIDATION_ROWS:]
    flips = random.Random(f"{seed} flips")
    validation = [(b, a) if flips.random() < 0.5 else (a, b) for a, b in held_out]
    warm_up = sorted({pair for a, b in rest for pair in ((a, b), (b, a))})
    return Splits(validation=validation, warm_up=warm_up)


def build_rows(
    seed: int, unfamiliar: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the prompt rows for PPO: training, with or without the unfamiliar ones, validation."""
    splits = split_pairs(seed)
    rng = random.Random(f"{seed} rows")
    train = [Sum(a, b, rng.choice(PHRASES)) for a, b in rng.sample(splits.warm_up, TRAIN_ROWS)]
    validation = [Sum(a, b, rng.choice(PHRASES)) for a, b in splits.validation]
    if unfamiliar:
        train[::UNFAMILIAR_EVERY] = [
            replace(question, phrase=UNFAMILIAR) for question in train[::UNFAMILIAR_EVERY]
        ]
    return (
        [_row(question, "train", i) for i, question in enumerate(train)],
        [_row(question, "val", i) for i, question in enumerate(validation)],
    )


def _row(question: Sum, split: str, index: int) -> dict[str, Any]:
    return {
        "prompt": question.question,
        "ground_truth": question.answer,
        "data_source": DATA_SOURCE,
        "extra_info": {"split": split, "index": index},
    }


def ask_pupil(question: Sum, rng: random.Random) -> str:
    """Answer as one of the pupils does: careful, forgetting the carry, or a digit off."""
    luck = rng.random()
    total = question.a + question.b
    if not question.carries:
        return str(total if luck < CAREFUL_WITHOUT_CARRY else _slip(total, rng))
    if luck < CAREFUL_WITH_CARRY:
        return str(total)
    if luck < CAREFUL_WITH_CARRY + FORGETS_CARRY:
        return str(total - 10)
    return str(_slip(total, rng))


def _slip(total: int, rng: random.Random) -> int:
    """Miss one digit by one."""
    return total + rng.choice((-10, -1, 1, 10))
