"""What runs inside the workers of an engine: one rank of the learner, or a sampler.

Models are imported in the worker, not at the driver.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ppo_cli.config.schema import Config, Transfer
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.cluster.serialise import shed_prompt
from ppo_cli.engine.cluster.weight_exchange import Exchange, ExchangePlan, Halved
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.engine.profiling import Profiler
from ppo_cli.engine.ranks import join_ranks
from ppo_cli.engine.sampler import build_sampler
from ppo_cli.records import Prompt, Rollout

SIOCGIFADDR = 0x8915
# Ranks give up on each other after the driver has: its sentence is the better one.
AFTER_DRIVER_S = 60.0


class LearnerRole(Learner):
    """One rank of the learner, of `size`; meets the others at `point` before it loads models."""

    def __init__(
        self, config: Config, tokenizer: bytes, total_steps: int, profiles: Path, size: int,
        rank: int, node: str, point: str,
    ) -> None:  # fmt: skip
        trainer = config.trainer
        # gloo would look for the host's name, which often means another interface, or none.
        if name := "lo" if point.startswith("file:") else interface_of(node):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        ranks = join_ranks(
            rank,
            size,
            init_method=point,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            tensor_size=trainer.tensor_parallel_size,
            shard_size=config.actor.fsdp_config.fsdp_size,
            timeout_s=trainer.worker_timeout + AFTER_DRIVER_S,
        )
        super().__init__(
            config, pickle.loads(tokenizer), ranks, total_steps=total_steps, profiles=profiles
        )
        self._exchange: Exchange
        self._writing: Future[None] | None = None

    def version(self) -> int:
        """The weight version."""
        return self.weight_version

    def noted(self) -> list[str]:
        """What to tell people of how the models were loaded."""
        return self.remarks

    def connect(self, plan: ExchangePlan) -> None:
        """Meet the samplers, to which weights go without the driver."""
        self._exchange = Exchange(plan, self, self._ranks.rank, self._compute)

    def send_weights(self) -> None:
        """Bring the weights to the samplers that were met."""
        if torch.cuda.is_available():
            # Senders read on streams of their own, which do not wait for the optimizer's.
            torch.cuda.synchronize()
        self._exchange.send()

    def spare_memory(self) -> None:
        """Give back the device memory that is only kept for reuse."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def start_saving(self, directory: Path, writers: int, room: Sequence[int | None]) -> None:
        """Keep what is to be written; the writing goes on in the background."""
        self._writing = self.begin_save(directory, writers, room)

    def saved(self) -> bool:
        """Whether this rank has written all; raises what went wrong."""
        if self._writing is None or not self._writing.done():
            return self._writing is None
        writing, self._writing = self._writing, None
        writing.result()
        return True


class SamplerRole:
    """A sampler with weights of its own, that says what becomes of its memory."""

    def __init__(
        self, number: int, config: Config, tokenizer: bytes, transfer: Transfer, profiles: Path
    ) -> None:
        self._number = number
        self._halved: list[Halved] = []
        self._profiler = Profiler(config, profiles, f"sampler_{number}")
        self._sampler = build_sampler(config, pickle.loads(tokenizer), transfer=transfer)
        self._sampler.room.tell = self._note_halving

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[tuple[str, Rollout] | Halved]:
        """Yield rollouts without their prompts, and what became of memory meanwhile."""
        # Greedy responses (validations, baselines) belong to no phase of training.
        training = sampling.temperature > 0
        phase = self._profiler.phase("rollout", weight_version + 1) if training else nullcontext()
        with phase, tell_out_of_memory("Sampling", "rollout.max_num_seqs"):
            for rollout in self._sampler.generate(prompts, sampling, weight_version, begun):
                while self._halved:
                    yield self._halved.pop(0)
                yield shed_prompt(rollout)
        self._profiler.finish()

    def resume_room(self, rows: int) -> None:
        """Sample no more at once than an earlier run could."""
        self._sampler.room.resume(rows)

    def __getattr__(self, name: str) -> Any:
        """All else is the sampler's own: new weights, sleep, the end."""
        return getattr(self._sampler, name)

    def _note_halving(self, rows: int) -> None:
        self._halved.append(Halved(self._number, rows))


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None when none says so."""
    wanted = socket.gethostbyname(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                found = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(found) == wanted:
                return name
    return None
