"""The seven verbs between the loop and wherever the weights live.

The loop knows nothing else of an engine. One process, many ranks, vLLM or not: the same verbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch
from ppo_cli.records import Prompt, Rollout


@dataclass(frozen=True)
class Sampling:
    """How to sample: `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off.

    `seed` fixes the draw: the same weights, prompts and seed give the same rollouts. A text of
    `stop` ends a response; the tokens up to the one that completes it stay. A response that has
    got `new_tokens` in one call and needs more comes back unfinished.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    max_tokens: int = 512
    seed: int = 0
    stop: tuple[str, ...] = ()
    new_tokens: int | None = None

    def most_tokens(self, drawn: int) -> int:
        """How long a response that has so many tokens may be after one call."""
        if self.new_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, drawn + self.new_tokens)


NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def begin(prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
    """Responses of which nothing is drawn yet: `sampling.n` for each prompt."""
    return [
        Rollout(prompt, sample, (), NO_LOGPROBS, "", "unfinished", seed=sampling.seed)
        for prompt in prompts
        for sample in range(sampling.n)
    ]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Rows for one optimizer step, and which of the two models takes it."""

    batch: TrainBatch
    actor: bool
    critic: bool


# Metric name -> (sum, count): ranks and micro-batches add exactly, the loop divides. Before all
# are added up a count may be 0: of what is normalised by the whole mini-batch already (a loss),
# of which micro-batches hold parts and which counts once.
Sums = dict[str, tuple[float, float]]


def add_sum(sums: Sums, name: str, total: float, count: float) -> None:
    """Add to a named sum and its count."""
    before = sums.get(name, (0.0, 0.0))
    sums[name] = (before[0] + total, before[1] + count)


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Add up the sums of all ranks; a name that only ever had count 0 counts as one."""
    whole: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            add_sum(whole, name, total, count)
    return {name: (total, count or 1.0) for name, (total, count) in whole.items()}


class Engine(Protocol):
    """Holds actor, critic and reference, samples from the actor and trains both."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        Unfinished rollouts that have `begun` go on, each in its own stream of random numbers.
        """
        ...

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values under the present weights."""
        ...

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step, normalised by the mini-batch's global token count."""
        ...

    def publish(self) -> None:
        """Hand the new weights to the sampler, drop its caches, raise the weight version."""
        ...

    def save(self, directory: Path) -> Future[None]:
        """Write `actor/`, `critic/` and `state/` into `directory`, which exists.

        Takes a snapshot at once, so that training may go on; all is on disk when the future is
        done. It is done, well or not, only when nothing writes into `directory` any more.
        """
        ...

    def load(self, directory: Path) -> None:
        """Take back everything that `save` wrote."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...
