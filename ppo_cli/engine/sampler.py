"""What a sampler is to an engine: prompts in, rollouts out, new weights now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ppo_cli.engine.base import Sampling
from ppo_cli.records import Prompt, Rollout


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a policy under their checkpoint names, on the CPU.

    With `adapter` they are those of a LoRA adapter alone, under PEFT's names. A tied output
    head is left out: it is the embedding.
    """

    tensors: Mapping[str, Tensor]
    version: int
    adapter: bool = False


class Sampler(Protocol):
    """Samples from weights of its own."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Take new weights, complete, and forget whatever was cached under the old ones."""
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake_up`."""
        ...

    def wake_up(self) -> None:
        """Take device memory again; new weights come before the next `generate`."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...
