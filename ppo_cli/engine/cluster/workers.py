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
from ppo_cli.engine.cluster.serialise import PackedRecord, pack, shed_prompt, unpack
from ppo_cli.engine.cluster.weight_exchange import Exchange, ExchangePlan, Halved, LearnerPlan
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.leftovers import own_folder
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.engine.profiling import Profiler
from ppo_cli.engine.ranks import join_ranks
from ppo_cli.engine.samplers import build_sampler
from ppo_cli.records import Prompt, Rollout

SIOCGIFADDR = 0x8915
# Ranks give up on each other after the driver has: its sentence is the better one.
AFTER_DRIVER_S = 60.0


class LearnerRole:
    """One rank of the learner."""

    def __init__(self, rank: int, plan: LearnerPlan) -> None:
        self._rank = rank
        self._plan = plan
        self._learner: Learner
        self._exchange: Exchange
        self._writing: Future[None] | None = None

    def meeting_point(self, node: str) -> str:
        """A file of this node, or an address on it where nobody listens yet.

        Whoever reaches such an address could take part: torch listens on all interfaces.
        """
        if self._plan.one_node:
            return f"file://{own_folder('ranks')}/meet"  # swept when this process is gone
        with socket.socket() as free:
            free.bind((node, 0))
            return f"tcp://{node}:{free.getsockname()[1]}"

    def join(self, node: str, meeting_point: str) -> None:
        """Meet the other ranks there and load the models."""
        trainer = self._plan.config.trainer
        cuda = torch.cuda.is_available()
        # gloo would look for the host's name, which often means another interface, or none.
        if name := "lo" if self._plan.one_node else interface_of(node):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        ranks = join_ranks(
            self._rank,
            self._plan.size,
            init_method=meeting_point,
            device=torch.device("cuda" if cuda else "cpu"),
            tensor_size=trainer.tensor_parallel_size,
            shard_size=self._plan.config.actor.fsdp_config.fsdp_size,
            timeout_s=trainer.worker_timeout + AFTER_DRIVER_S,
        )
        tokenizer = pickle.loads(self._plan.tokenizer)
        self._learner = Learner(
            self._plan.config, tokenizer, ranks, total_steps=self._plan.total_steps,
            profiles=self._plan.profiles,
        )  # fmt: skip

    def annotate(self, batch: PackedRecord) -> Any:
        """This rank's share of the annotations."""
        return pack(self._learner.annotate(unpack(batch)))

    def step(self, minibatch: PackedRecord) -> Any:
        """This rank's share of an optimizer step."""
        return self._learner.step(unpack(minibatch))

    def publish(self) -> None:
        """Raise the weight version."""
        self._learner.publish()

    def version(self) -> int:
        """The weight version."""
        return self._learner.weight_version

    def weights(self) -> Any:
        """The weights for the samplers from the first rank, None from the others."""
        return pack(self._learner.weights())

    def connect(self, plan: ExchangePlan) -> None:
        """Meet the samplers, to which weights go without the driver."""
        compute = Compute.choose(self._plan.config.model.dtype)
        self._exchange = Exchange(plan, self._learner, self._rank, compute)

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

    def sees(self, mark: Path) -> bool:
        """Whether a file that the driver has made is there on this node, too."""
        return mark.exists()

    def begin_save(self, directory: Path, writers: int, room: Sequence[int | None]) -> None:
        """Keep what is to be written; the writing goes on in the background."""
        self._writing = self._learner.begin_save(directory, writers, room)

    def saved(self) -> bool:
        """Whether this rank has written all; raises what went wrong."""
        if self._writing is None or not self._writing.done():
            return self._writing is None
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def load(self, directory: Path) -> list[int | None]:
        """Take back what was saved; returns the room that samplers had left."""
        return self._learner.load(directory)


class SamplerRole:
    """A sampler with weights of its own."""

    def __init__(
        self, number: int, config: Config, tokenizer: bytes, transfer: Transfer, profiles: Path
    ) -> None:
        self._number = number
        self._halved: list[Halved] = []
        self._profiler = Profiler(config, profiles, f"sampler_{number}")
        self._sampler = build_sampler(config, pickle.loads(tokenizer), transfer=transfer)
        self._sampler.room.tell = self._note_halving

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, weight_version: int
    ) -> Iterator[tuple[str, Rollout] | Halved]:
        """Yield rollouts without their prompts, and what became of memory meanwhile."""
        # Greedy responses (validations, baselines) belong to no phase of training.
        training = sampling.temperature > 0
        phase = self._profiler.phase("rollout", weight_version + 1) if training else nullcontext()
        with phase, tell_out_of_memory("Sampling", "rollout.max_num_seqs"):
            for rollout in self._sampler.generate(prompts, sampling, weight_version):
                while self._halved:
                    yield self._halved.pop(0)
                yield shed_prompt(rollout)
        self._profiler.finish()

    def resume_room(self, rows: int) -> None:
        """Sample no more at once than an earlier run could."""
        self._sampler.room.resume(rows)

    def load_weights(self, weights: PackedRecord) -> None:
        """Take new weights; they are read where they lie."""
        self._sampler.load_weights(unpack(weights, copy=False))

    def take(self, method: str, *words: Any) -> None:
        """A step of an exchange of weights, at the call of the learner's first rank."""
        getattr(self._sampler, method)(*words)

    def sleep(self) -> None:
        """Give device memory back."""
        self._sampler.sleep()

    def wake_up(self) -> None:
        """Take device memory again."""
        self._sampler.wake_up()

    def close(self) -> None:
        """Free everything."""
        self._sampler.close()

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


def start_learner(rank: int, plan: LearnerPlan) -> LearnerRole:
    """Become one rank of the learner."""

    return LearnerRole(rank, plan)


def start_sampler(
    number: int, config: Config, tokenizer: bytes, transfer: Transfer, profiles: Path
) -> SamplerRole:
    """Become a sampler."""

    return SamplerRole(number, config, tokenizer, transfer, profiles)
