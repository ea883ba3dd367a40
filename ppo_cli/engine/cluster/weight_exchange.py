"""Weights from the learner to all samplers, from process to process: one rank's end of it.

Every rank helps to gather tensors, the first one sends them and leads the samplers, which it
calls by itself. What happens to a sampler meanwhile ends the exchange at once, even where the
sending never would: a send by NCCL does not notice that the other side is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppo_cli.config.schema import Transfer
from ppo_cli.engine.cluster.futures import GRACE_S, Call, Member, Waits
from ppo_cli.engine.cluster.worker_process import free_port
from ppo_cli.engine.device import Compute
from ppo_cli.engine.micro_batches import tell_out_of_memory
from ppo_cli.errors import ConfigError, PpoError

if TYPE_CHECKING:  # the driver needs the plan alone, and none of the models
    from ppo_cli.engine.learner import Learner


@dataclass(frozen=True)
class Halved:
    """A sampler, by number, ran out of memory: how many responses it samples at once now."""

    sampler: int
    rows: int


@dataclass(frozen=True)
class ExchangePlan:
    """How weights travel, to whom, and from which address of the first rank."""

    transfer: Transfer
    samplers: tuple[Member, ...]
    workers_each: int
    address: str
    timeout_s: float


# The driver gives up first: its sentence is the better one.
AFTER_DRIVER_S = 60.0
# A way that works takes seconds for its first transfer, one that does not may hang.
PROOF_S = 300.0
USE_MEMORY = " Use rollout.weight_transfer=memory."


class Exchange:
    """A connection of all ranks with all samplers."""

    def __init__(self, plan: ExchangePlan, learner: Learner, rank: int, compute: Compute) -> None:
        self._plan = plan
        self._learner = learner
        self._dtype = compute.dtype  # in which both sides compute
        self._device = torch.device("cpu") if plan.transfer == "gloo" else compute.device
        self._waits = Waits(plan.timeout_s, trouble=lambda: None)
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="ppo-weights")
        self._failed: Future[None] = Future()
        self._proven = False
        self._sender = self._led(lambda: self._connect(rank))

    def send(self) -> None:
        """Bring the present weights to all samplers; all ranks call."""
        with tell_out_of_memory("Sending weights", "rollout.gpu_memory_utilization"):
            self._led(lambda: self._sender.send(self._learner.weight_version))
        self._proven = True

    def _connect(self, rank: int) -> Any:
        from ppo_cli.engine.vllm_sampler import set_environment

        set_environment()
        # Only with this choice is vLLM needed, which other runs may lack.
        from ppo_cli.engine.weight_transfer import trainer

        plan = self._plan
        shapes = [(n, t.dtype, tuple(t.shape)) for n, t in self._tensors(_shape_of)]
        source = trainer.TensorSource(
            shapes, lambda: self._tensors(self._gather_cast, self._gather)
        )
        client = trainer.SamplerClient(
            self._ask_all, num_samplers=len(plan.samplers), gpus_each=plan.workers_each
        )
        return trainer.connect(
            plan.transfer, source, client, rank=rank, address=plan.address,
            port=free_port(plan.address) if rank == 0 and plan.transfer == "nccl" else 0,
            timeout_s=plan.timeout_s + AFTER_DRIVER_S,
        )  # fmt: skip

    def _tensors(
        self, whole: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        return ((name, t.to(self._dtype)) for name, t in self._learner.published(whole, exact))

    def _gather_cast(self, tensor: Tensor) -> Tensor:
        return self._gather(tensor, self._dtype)

    def _gather(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        from ppo_cli.engine.sharding import whole_tensor

        return whole_tensor(tensor, dtype).to(self._device)

    def _ask_all(self, method: str, words: list[tuple[Any, ...]]) -> None:
        """Have every sampler do something and wait for all, or for the first that fails."""
        try:
            self._waits.collect(
                [
                    Call(one, method, one.handle.call.remote(method, *given))
                    for one, given in zip(self._plan.samplers, words, strict=True)
                ]
            )
        except BaseException as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            raise

    def _led(self, work: Callable[[], Any]) -> Any:
        """Work in a thread that is left behind when a sampler fails."""
        failed: Future[None] = Future()
        self._failed = failed
        doing = self._sending.submit(torch.no_grad()(work))
        limit = self._plan.timeout_s + AFTER_DRIVER_S
        if not self._proven:
            limit = min(PROOF_S, 0.9 * self._plan.timeout_s)
        if not wait([doing, failed], limit, FIRST_COMPLETED).done:
            failed.set_exception(TimeoutError(f"nothing came of it in {limit:g} s"))
        if doing.done() and doing.exception() is not None:
            # It may be the echo of a loss that is still being found out.
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


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
