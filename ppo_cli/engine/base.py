"""The seven verbs between the loop and wherever the weights live, and what samplers are to them.

The loop knows nothing else of an engine. One process, many ranks, vLLM or not: the same verbs.
A sampler takes prompts and gives rollouts, and takes new weights now and then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch
from ppo_cli.config.placement import sampler_name
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.errors import ModelError, UserError, is_out_of_memory
from ppo_cli.records import Prompt, Rollout
from ppo_cli.thoughts import Detokenize, count_tokens


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

    def length_limit(self, drawn: int) -> int:
        """How long a response that has so many tokens may be after one call."""
        if self.new_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, drawn + self.new_tokens)


NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def start_rollouts(prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
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
    totals: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            add_sum(totals, name, total, count)
    return {name: (total, count or 1.0) for name, (total, count) in totals.items()}


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

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Write `actor/`, `critic/` and `state/` into `directory`, which exists.

        Takes a snapshot at once, so that training may go on; all is on disk when the future is
        done. It is done, well or not, only when nothing writes into `directory` any more. With
        `last` nothing is trained before that: the weights need not be copied.
        """
        ...

    def load(self, directory: Path) -> None:
        """Take back everything that `save` wrote."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a policy on the CPU: for vLLM as its files have them, else as it has them.

    With `adapter` they are those of a LoRA adapter alone, under PEFT's names. A tied output
    head is left out: it is the embedding. With `persistent`, later weights are written over these,
    while nobody samples: they need not be copied.
    """

    tensors: Mapping[str, Tensor]
    version: int
    adapter: bool = False
    persistent: bool = False


@dataclass
class SamplerCapacity:
    """How many responses are sampled at once; halved, and kept halved, when memory runs out.

    `tell` is called with the new number after each halving.
    """

    rows: int
    halved: bool = False
    on_halving: Callable[[int], None] = lambda rows: None

    def halve(self, tried: int) -> None:
        """Shrink below what was just tried; raises UserError when one response is too much."""
        if tried <= 1:
            raise UserError(
                "Sampling ran out of memory, even with one response at a time: lower "
                "--max_response_length or --max_prompt_length, or take a smaller --model."
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rows, self.halved = tried // 2, True
        self.on_halving(self.rows)

    def halved_rows(self) -> int | None:
        """What halving has left of it; None while it is as it was set."""
        return self.rows if self.halved else None

    def restore(self, rows: int | None) -> None:
        """Take up what an earlier run had left of it; a smaller setting of this run stands."""
        if rows is not None and rows < self.rows:
            self.rows, self.halved = rows, True


@contextmanager
def explain_transfer_out_of_memory() -> Iterator[None]:
    """Say what helps where memory runs out while new weights travel, on either side."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            "Bringing new weights to the samplers ran out of memory: use "
            "rollout.weight_transfer=memory, which takes least of the GPUs, keep less there "
            "(actor.fsdp_config.optimizer_offload=true), or give samplers GPUs of their own "
            "(--placement)."
        ) from error


def describe_halving(rows: int, who: str = "Sampling") -> str:
    """What people are told of a halving."""
    return (
        f"{who} ran out of memory: at most {rows} response{'s' * (rows != 1)} are sampled at "
        f"once now. Set rollout.max_num_seqs={rows} to start there next time."
    )


def non_finite_error(weight_version: int) -> ModelError:
    """The error of logits from which nothing can be drawn; updates are blamed only after one."""
    cause = (
        "a run that diverged: lower --lr and resume from an earlier checkpoint"
        if weight_version
        else "no update has changed them in this run: the weights of --model are damaged, or they "
        "overflow in this precision (--dtype float32)"
    )
    return ModelError(
        f"The model's logits are not finite, so that no token can be drawn. Look at the weights "
        f"({cause})."
    )


def stream_key(seed: int, uid: str, sample: int) -> int:
    """Return the 64-bit key of one rollout's stream."""
    digest = hashlib.blake2b(f"{seed} {sample} {uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def extend_rollout(
    begun: Rollout,
    ids: Sequence[int],
    logprobs: NDArray[np.float32],
    *,
    stopped: bool,
    sampling: Sampling,
    weight_version: int,
    detokenize: Detokenize,
) -> Rollout:
    """An unfinished rollout with further tokens, drawn in one call; finished where they end it."""
    before = len(begun.token_ids)
    token_ids = (*begun.token_ids, *ids)
    rollout = replace(
        begun,
        token_ids=token_ids,
        sampler_logprobs=np.concatenate([begun.sampler_logprobs, logprobs]),
        weight_version=begun.weight_version if before else weight_version,
        carried=before,
    )
    if not stopped and len(token_ids) < sampling.max_tokens:
        return rollout
    prompt = begun.prompt
    text = detokenize(token_ids, prompt.token_ids)
    return replace(
        rollout,
        text=text,
        finish_reason="stop" if stopped else "length",
        thought_tokens=count_tokens(prompt.opened, text, token_ids, detokenize, cut=not stopped),
    )


class Sampler(Protocol):
    """Samples from weights of its own."""

    capacity: SamplerCapacity

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        Unfinished rollouts that have `begun` go on, each in its own stream of random numbers.
        """
        ...

    def load_weights(self, weights: Weights) -> bool:
        """Take a complete set of new weights and drop everything cached under the old ones.

        Returns whether the sampler reads them in place (`persistent`): later weights are then in
        use as soon as they are written, without another call.
        """
        ...

    def sleep(self) -> None:
        """Give device memory back until `wake_weights` and `wake_cache`."""
        ...

    def wake_weights(self) -> None:
        """Take the device memory that weights need; new ones come before the next `generate`."""
        ...

    def wake_cache(self) -> None:
        """Take all other device memory, once the weights have come."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


def build_sampler(config: Config, tokenizer: Any, *, transfer: Transfer = "memory") -> Sampler:
    """Build the run's sampler with a model of its own, by `build` of engine/samplers/NAME.py.

    `transfer` is how new weights reach it: as `Weights`, or by a `Sender` of vLLM's.
    """
    module = import_module(f"ppo_cli.engine.samplers.{sampler_name(config)}")
    sampler: Sampler = module.build(config, tokenizer, transfer)
    return sampler
