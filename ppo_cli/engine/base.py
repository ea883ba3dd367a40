"""The engine protocol (seven verbs) that the training loop calls, and the sampler protocol.

The loop knows nothing else about an engine: the verbs are the same for one process, many ranks and
vLLM. A sampler turns prompts into rollouts and receives new weights after each publish.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_cli.algo.batch import AnnotatedBatch, Batch, TrainBatch
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.errors import ModelError, UserError, is_out_of_memory, plural
from ppo_cli.records import Prompt, Rollout
from ppo_cli.thoughts import Detokenize, count_tokens


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off.

    The same weights, prompts and `seed` give the same rollouts. A string of `stop` ends a
    response; the tokens up to the one that completes it are kept. A response that needs more than
    `new_tokens` in one call is returned unfinished.
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
        """Return the maximal response length after one call, with `drawn` tokens before it."""
        if self.new_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, drawn + self.new_tokens)


NO_LOGPROBS = np.zeros(0, dtype=np.float32)


def start_rollouts(prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
    """Return empty, unfinished rollouts: `sampling.n` for each prompt."""
    return [
        Rollout(prompt, sample, (), NO_LOGPROBS, "", "unfinished", seed=sampling.seed)
        for prompt in prompts
        for sample in range(sampling.n)
    ]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Rows for one optimizer step, and which of the two models takes it.

    A step that is `pretraining` has the peak learning rate, without the schedule.
    """

    batch: TrainBatch
    actor: bool
    critic: bool
    pretraining: bool = False


# Metric name -> (sum, count). Ranks and micro-batches are added exactly; the loop divides at the
# end. Losses are already normalised by the whole mini-batch: each part has count 0, and
# `merge_sums` gives their sum count 1.
Sums = dict[str, tuple[float, float]]


def add_sum(sums: Sums, name: str, total: float, count: float) -> None:
    """Add to a named sum and its count."""
    # Sum and count are added separately.
    before = sums.get(name, (0.0, 0.0))
    sums[name] = (before[0] + total, before[1] + count)


def merge_sums(parts: Sequence[Sums]) -> Sums:
    """Add up the sums of all ranks; a metric with a total count of 0 gets count 1."""
    totals: Sums = {}
    for part in parts:
        for name, (total, count) in part.items():
            add_sum(totals, name, total, count)
    return {name: (total, count or 1.0) for name, (total, count) in totals.items()}


class Engine(Protocol):
    """Holds actor, critic and reference; samples from the actor, trains actor and critic."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        The unfinished rollouts in `begun` continue, each with its own random stream.
        """
        ...

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values under the current weights."""
        ...

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step, normalised by the mini-batch's global token count."""
        ...

    def publish(self) -> None:
        """Send the new weights to the sampler, drop its caches, raise the weight version.

        The learning rates move on with the version."""
        ...

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Write `actor/`, `critic/` and `state/` into the existing `directory`.

        Takes a snapshot at once, so that training can continue; the future is done when all files
        are on disk, or when writing has failed and stopped. With `last` nothing is trained before
        that, so the weights need not be copied.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore everything that `save` wrote."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a policy on the CPU: in checkpoint layout for vLLM, else in the model's.

    With `adapter` they are the weights of a LoRA adapter alone, under PEFT's names. A tied output
    head is omitted, because it is the embedding. With `persistent`, later weights overwrite these
    tensors in place while nobody samples, so a sampler need not copy them.
    """

    tensors: Mapping[str, Tensor]
    version: int
    adapter: bool = False
    persistent: bool = False


@dataclass
class SamplerCapacity:
    """How many responses are sampled at once; halved for good when memory runs out.

    `on_halving` is called with the new number after each halving.
    """

    rows: int
    halved: bool = False
    on_halving: Callable[[int], None] = lambda rows: None

    def halve(self, tried: int) -> None:
        """Halve the number just tried; raises UserError when one response is too much."""
        if tried <= 1:
            raise UserError(
                "Sampling ran out of memory, even with one response at a time: lower "
                "--max_response_length or --max_prompt_length, or take a smaller --model."
            )
        # The allocator's free blocks are too fragmented for the smaller batch.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.rows, self.halved = tried // 2, True
        self.on_halving(self.rows)

    def halved_rows(self) -> int | None:
        """The number after halvings, for the checkpoint; None before any."""
        return self.rows if self.halved else None

    def restore(self, rows: int | None) -> None:
        """Apply the halvings of an earlier run, unless this run's setting is smaller."""
        if rows is not None and rows < self.rows:
            self.rows, self.halved = rows, True


@contextmanager
def explain_out_of_memory(what: str, advise: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory into an error with advice."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"{what} ran out of memory. {advise()}") from error


explain_transfer_out_of_memory = partial(
    explain_out_of_memory,
    "Bringing new weights to the samplers",
    lambda: (
        "Use rollout.weight_transfer=memory, which takes least of the GPUs, keep less there "
        "(actor.fsdp_config.optimizer_offload=true), or give samplers GPUs of their own "
        "(--placement)."
    ),
)


def describe_halving(rows: int, who: str = "Sampling") -> str:
    """Return the message about a halving of the sampler's capacity."""
    return (
        f"{who} ran out of memory: at most {plural(rows, 'response')} are sampled at "
        f"once now. Set rollout.max_num_seqs={rows} to start there next time."
    )


def non_finite_error(weight_version: int) -> ModelError:
    """Return the error for logits that are not finite, with the probable cause."""
    # Before the first update the run itself cannot have diverged.
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
    # Not hash(): Python's differs between processes.
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
    """Append the tokens of one call to an unfinished rollout, and finish it if they end it.

    The weight version stays that of the first token; `carried` counts tokens of earlier calls.
    """
    # Tokens, log-probs and the count of tokens from earlier calls.
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
    # Only a finished response is decoded: its last token may complete a character.
    prompt = begun.prompt
    text = detokenize(token_ids, prompt.token_ids)
    return replace(
        rollout,
        text=text,
        finish_reason="stop" if stopped else "length",
        thought_tokens=count_tokens(prompt.opened, text, token_ids, detokenize, cut=not stopped),
    )


class Sampler(Protocol):
    """Generates rollouts from a set of weights that it holds."""

    capacity: SamplerCapacity

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[Rollout]:
        """Yield `sampling.n` rollouts for each prompt, each as soon as it finishes.

        The unfinished rollouts in `begun` continue, each with its own random stream.
        """
        ...

    def load_weights(self, weights: Weights) -> bool:
        """Take a complete set of new weights and drop everything cached under the old ones.

        Returns whether the sampler reads them in place (`persistent`): later weights are then in
        use as soon as they are written, without another call.
        """
        ...

    def sleep(self) -> None:
        """Release device memory until `wake_weights` and `wake_cache`."""
        ...

    def wake_weights(self) -> None:
        """Allocate device memory for weights; new weights arrive before the next `generate`."""
        ...

    def wake_cache(self) -> None:
        """Allocate all other device memory, after the weights have arrived."""
        ...

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        ...


def build_sampler(config: Config, tokenizer: Any, *, transfer: Transfer = "memory") -> Sampler:
    """Build the run's sampler with its own copy of the model (`build` of engine/samplers/NAME.py).

    `transfer` is how new weights reach it: as `Weights`, or through vLLM's weight transfer.
    """
    # Imported by name, so that vLLM is loaded only where it is used.
    module = import_module(f"ppo_cli.engine.samplers.{config.rollout.name}")
    sampler: Sampler = module.build(config, tokenizer, transfer)
    return sampler
