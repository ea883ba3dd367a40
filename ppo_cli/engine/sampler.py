"""What a sampler is to an engine: prompts in, rollouts out, new weights now and then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_cli.config.derived import sampler_name
from ppo_cli.config.schema import Config, Transfer
from ppo_cli.engine.base import Sampling
from ppo_cli.errors import UserError
from ppo_cli.records import Prompt, Rollout
from ppo_cli.thoughts import count_tokens


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a policy under their checkpoint names, on the CPU.

    With `adapter` they are those of a LoRA adapter alone, under PEFT's names. A tied output
    head is left out: it is the embedding.
    """

    tensors: Mapping[str, Tensor]
    version: int
    adapter: bool = False


@dataclass
class Room:
    """How many responses are sampled at once; halved, and kept halved, when memory runs out.

    `tell` is called with the new number after each halving.
    """

    rows: int
    halved: bool = False
    tell: Callable[[int], None] = lambda rows: None

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
        self.tell(self.rows)

    def left(self) -> int | None:
        """What halving has left of it; None while it is as it was set."""
        return self.rows if self.halved else None

    def resume(self, rows: int | None) -> None:
        """Take up what an earlier run had left of it; a smaller setting of this run stands."""
        if rows is not None and rows < self.rows:
            self.rows, self.halved = rows, True


def room_told(rows: int, who: str = "Sampling") -> str:
    """What people are told of a halving."""
    return (
        f"{who} ran out of memory: at most {rows} response{'s' * (rows != 1)} are sampled at "
        f"once now. Set rollout.max_num_seqs={rows} to start there next time."
    )


def stream_key(seed: int, uid: str, sample: int) -> int:
    """Return the 64-bit key of one rollout's stream."""
    digest = hashlib.blake2b(f"{seed} {sample} {uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def stop_end(
    ids: Sequence[int], stop: Sequence[str], detokenize: Callable[[Sequence[int]], str], known: int
) -> int | None:
    """Count the tokens up to the one that completes a text of `stop`; None where none does.

    The first `known` tokens complete none. Only as many tokens are read as such a text can have,
    as each holds a byte at least, and a few more, as special tokens hold none.
    """
    most = max((len(text.encode()) for text in stop), default=0) + 8
    for end in range(known + 1, len(ids) + 1) if stop else ():
        text = detokenize(ids[max(0, end - most) : end])
        if any(one in text for one in stop):
            return end
    return None


def go_on(
    begun: Rollout,
    ids: Sequence[int],
    logprobs: NDArray[np.float32],
    *,
    stopped: bool,
    sampling: Sampling,
    weight_version: int,
    detokenize: Callable[[Sequence[int]], str],
) -> Rollout:
    """An unfinished rollout with further tokens, drawn in one call; finished where they end it."""
    before = len(begun.token_ids)
    whole = (*begun.token_ids, *ids)
    found = replace(
        begun,
        token_ids=whole,
        sampler_logprobs=np.concatenate([begun.sampler_logprobs, logprobs]),
        weight_version=begun.weight_version if before else weight_version,
        carried=before,
    )
    if not stopped and len(whole) < sampling.max_tokens:
        return found
    text, opened = detokenize(whole), begun.prompt.opened
    return replace(
        found,
        text=text,
        finish_reason="stop" if stopped else "length",
        thought_tokens=count_tokens(opened, text, whole, detokenize, cut=not stopped),
    )


class Sampler(Protocol):
    """Samples from weights of its own."""

    room: Room

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


def build_sampler(config: Config, tokenizer: Any, *, transfer: Transfer = "memory") -> Sampler:
    """Build the run's sampler with a model of its own, by `build` of engine/NAME_sampler.py.

    `transfer` is how new weights reach it: as `Weights`, or by a `Sender` of vLLM's.
    """
    module = import_module(f"ppo_cli.engine.{sampler_name(config)}_sampler")
    sampler: Sampler = module.build(config, tokenizer, transfer)
    return sampler
