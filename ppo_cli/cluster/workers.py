"""What runs inside the workers of an engine: one rank of the learner, or a sampler.

Models are imported in the worker, not at the driver. New weights go from the learner to all
samplers directly (`Exchange`): every rank helps to gather tensors, the first one sends them and
calls the samplers. An error of a sampler ends the exchange at once, because a send by NCCL does not
notice that the receiver is gone.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_cli.cluster.addresses import free_port
from ppo_cli.cluster.members import GRACE_S, USE_MEMORY, Call, ExchangePlan, Halved, Waits
from ppo_cli.cluster.serialise import SharedTensors, shed_prompt
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import (
    Sampling,
    Weights,
    build_sampler,
    explain_out_of_memory,
    explain_transfer_out_of_memory,
)
from ppo_cli.engine.cpu.runtime import keep_freed_memory
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import Learner
from ppo_cli.engine.profiling import Profiler
from ppo_cli.engine.ranks import join_ranks
from ppo_cli.errors import ConfigError, PpoError
from ppo_cli.planning.memory.advice import advise_memory
from ppo_cli.records import Prompt, Rollout

# Ranks wait longer than the driver, whose message is better.
AFTER_DRIVER_S = 60.0
# The first transfer takes seconds where it works; otherwise it may hang.
PROOF_S = 300.0


class Exchange:
    """A connection of all ranks with all samplers."""

    def __init__(
        self, plan: ExchangePlan, learner: LearnerRole, rank: int, compute: Compute
    ) -> None:
        self._plan = plan
        self._learner = learner
        self._device = torch.device("cpu") if plan.transfer == "gloo" else compute.device
        self._waits = Waits(plan.timeout_s, trouble=lambda: None)
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="ppo-weights")
        self._failed: Future[None] = Future()
        self._proven = False
        self._sender = self._run_watched(lambda: self._connect(rank))

    def send(self) -> None:
        """Send the current weights to all samplers; all ranks call this."""
        with explain_transfer_out_of_memory():
            self._run_watched(lambda: self._sender.send(self._learner.weight_version))
        self._proven = True

    def _connect(self, rank: int) -> Any:
        """Return the sender of weights from this learner rank to vLLM samplers."""
        from ppo_cli.engine.samplers.vllm import set_environment

        set_environment()
        # vLLM is needed for these transfers only.
        from ppo_cli.engine.samplers import weight_transfer

        plan = self._plan
        published = self._learner.published
        empty = self._learner.published_shapes()
        source = weight_transfer.TensorSource(
            [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in empty],
            lambda: published(
                partial(self._gather, dtype=self._learner.published_dtype), self._gather
            ),
        )
        client = weight_transfer.SamplerClient(
            self._call_samplers, num_samplers=len(plan.samplers), gpus_each=plan.workers_each
        )
        return weight_transfer.connect(
            plan.transfer, source, client, rank=rank, address=plan.address,
            port=free_port(plan.address) if rank == 0 and plan.transfer == "nccl" else 0,
            timeout_s=plan.timeout_s + AFTER_DRIVER_S,
        )  # fmt: skip

    def _gather(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        from ppo_cli.engine.sharding.tensors import gather_tensor

        return gather_tensor(tensor, dtype).to(self._device)

    def _call_samplers(self, method: str, arguments: list[tuple[Any, ...]]) -> None:
        """Call a method of every sampler, and wait for all or for the first error."""
        try:
            self._waits.collect(
                [
                    Call(sampler, method, sampler.handle.call.remote(method, *sampler_arguments))
                    for sampler, sampler_arguments in zip(
                        self._plan.samplers, arguments, strict=True
                    )
                ]
            )
        except BaseException as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    def _run_watched(self, work: Callable[[], Any]) -> Any:
        """Run a function in a thread, which is abandoned when a sampler fails."""
        # Two futures: the work itself, and the first error of a sampler.
        failed: Future[None] = Future()
        self._failed = failed
        doing = self._sending.submit(torch.no_grad()(work))
        limit = self._plan.timeout_s + AFTER_DRIVER_S
        if not self._proven:
            limit = min(PROOF_S, 0.9 * self._plan.timeout_s)
        if not wait([doing, failed], limit, FIRST_COMPLETED).done:
            failed.set_exception(TimeoutError(f"nothing came of it in {limit:g} s"))
        if doing.done() and doing.exception() is not None:
            # The cause may be a lost sampler, which is reported later.
            wait([failed], timeout=GRACE_S)
        try:
            return (failed if failed.done() else doing).result(0)
        except PpoError:
            raise
        except Exception as error:
            if self._proven:
                raise
            raise ConfigError(
                f"Weights do not travel by {self._plan.transfer} here ({_last_line(error)}); the "
                f"logs tell more.{USE_MEMORY}"
            ) from error


def _shape_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")


# Linux: the ioctl that returns the IPv4 address of an interface.
SIOCGIFADDR = 0x8915


class LearnerRole(Learner):
    """One rank of the learner, of `size`; meets the others at `point` before it loads models."""

    def __init__(
        self, config: Config, tokenizer: bytes, total_steps: int, profiles: Path, size: int,
        rank: int, node: str, point: str,
    ) -> None:  # fmt: skip
        trainer = config.trainer
        self._one_node = point.startswith("file:")
        # gloo would resolve the host's name, which often gives another interface, or none.
        if name := "lo" if self._one_node else find_interface(node):
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
        self._shared: SharedTensors | None = None
        self._writing: Future[None] | None = None

    def version(self) -> int:
        """The weight version."""
        return self.weight_version

    def noted(self) -> list[str]:
        """Remarks about how the models were loaded, for the user."""
        return self.remarks

    @torch.no_grad()
    @explain_transfer_out_of_memory()
    def weights(self) -> Weights | None:
        """The weights; on one node, in memory that samplers share and the next call writes again.

        Nobody may sample meanwhile: a publish waits for the rounds under way (`AheadEngine`).
        """
        if not (self._one_node and sys.platform == "linux"):
            return super().weights()
        # All ranks gather each tensor, the first one writes it.
        if self._shared is None and self._ranks.rank == 0:
            self._shared = SharedTensors.like(dict(self.published_shapes()))
        for name, tensor in self.iterate_cpu_weights():
            if self._shared is not None:
                self._shared[name].copy_(tensor)
        if self._shared is None:
            return None
        adapter = self._config.model.publishes_adapter
        return Weights(self._shared, self.weight_version, adapter=adapter, persistent=True)

    def published_shapes(self) -> Iterator[tuple[str, Tensor]]:
        """Name, shape and precision of all that is published, as tensors without numbers."""
        return self.published(partial(_shape_of, dtype=self.published_dtype), _shape_of)

    def connect(self, plan: ExchangePlan) -> None:
        """Connect to the samplers; weights then bypass the driver."""
        self._exchange = Exchange(plan, self, self._ranks.rank, self._compute)

    def send_weights(self) -> None:
        """Send the weights to the connected samplers."""
        if torch.cuda.is_available():
            # Senders read on their own CUDA streams, which do not wait for the optimizer's.
            torch.cuda.synchronize()
        self._exchange.send()

    def spare_memory(self) -> None:
        """Free the device memory that torch's allocator caches."""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # what samplers have read by now
            torch.cuda.empty_cache()

    def start_saving(
        self, directory: Path, writers: int, room: Sequence[int | None], last: bool
    ) -> None:
        """Take a snapshot; it is written in the background."""
        self._writing = self.begin_save(directory, writers, room, last=last)

    def saved(self) -> bool:
        """Whether this rank has written everything; raises the error of a failed write."""
        if self._writing is None or not self._writing.done():
            return self._writing is None
        writing, self._writing = self._writing, None
        writing.result()
        return True


class SamplerRole:
    """A sampler that reports when it runs out of memory."""

    def __init__(
        self, number: int, config: Config, tokenizer: bytes, transfer: Transfer, profiles: Path
    ) -> None:
        self._number = number
        self._advise = partial(advise_memory, config, "sampling")
        self._halved: list[Halved] = []
        self._profiler = Profiler(config.trainer, profiles, f"sampler_{number}")
        if config.model.enable_gradient_checkpointing is False and not torch.cuda.is_available():
            keep_freed_memory()  # memory is ample, as for a learner
        self._sampler = build_sampler(config, pickle.loads(tokenizer), transfer=transfer)
        self._sampler.capacity.on_halving = lambda rows: self._halved.append(
            Halved(self._number, rows)
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        weight_version: int,
        begun: Sequence[Rollout] = (),
    ) -> Iterator[tuple[str, Rollout] | Halved]:
        """Yield rollouts without their prompts, and `Halved` when memory ran out."""
        # Greedy responses (validations, baselines) belong to no phase of training.
        training = sampling.temperature > 0
        phase = self._profiler.phase("rollout", weight_version + 1) if training else nullcontext()
        with phase, explain_out_of_memory("Sampling", self._advise):
            for rollout in self._sampler.generate(prompts, sampling, weight_version, begun):
                while self._halved:
                    yield self._halved.pop(0)
                yield shed_prompt(rollout)
        self._profiler.finish()

    def resume_room(self, rows: int) -> None:
        """Sample at most as many responses at once as the interrupted run could."""
        self._sampler.capacity.restore(rows)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the sampler's: load_weights, sleep, close."""
        return getattr(self._sampler, name)


def find_interface(address: str) -> str | None:
    """Return the network interface that has this address, or None."""
    address_text = socket.gethostbyname(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)[20:24]
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply) == address_text:
                return name
    return None
