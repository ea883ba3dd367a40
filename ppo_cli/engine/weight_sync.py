"""How new weights reach a running vLLM: what its workers do with them, and who sends them.

Worker's side: `MemoryTransfer`, a back end of vLLM's own weight-transfer interface that takes
checkpoint tensors from this process or from a safetensors file in shared memory, and
`WorkerExtension`, which vLLM mixes into each of its workers. Trainer's side, for GPUs:
`connect_by_nccl` (other devices) and `connect_by_ipc` (the same device). The two are written
from vLLM's sources and are untried: they need GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

MEMORY = "ppo_memory"


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """Memory needs no meeting."""


@dataclass
class MemoryUpdateInfo(WeightTransferUpdateInfo):
    """Tensors themselves where the worker is this process, else a file that holds them."""

    tensors: dict[str, Tensor] | None = None
    path: str | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, one after the other."""
        if self.tensors is not None:
            yield from self.tensors.items()
        else:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    yield name, file.get_tensor(name)


class MemoryTransfer(WeightTransferEngine):
    """Loads checkpoint tensors layer by layer, as vLLM's other back ends do."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Nothing to meet."""

    def start_weight_update(self) -> None:
        """Give each layer its loadable form back: on the CPU weights lie packed."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the tensors; nothing is under way on a device afterwards that must be awaited."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MemoryUpdateInfo) -> None:
        """Load what came."""
        self.model.load_weights(update_info.items())

    def finish_weight_update(self) -> None:
        """Pack the layers again, output heads too."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def pack_heads(model: torch.nn.Module) -> None:
    """Pack output heads anew on the CPU: a tied one has no weights of its own to be loaded,

    so that the reload passes it by and it would go on with a packed copy of the old embedding.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """What vLLM's workers can do beside their own trade."""

    model_runner: Any

    def scale_logits(self, temperature: float) -> None:
        """Divide all logits by the temperature before vLLM's sampler sees them.

        vLLM gives log-probs either before the temperature or after top-k and top-p too. With
        scaled logits the former are what a rollout records: under the temperature, untruncated.
        """
        model = self.model_runner.model
        for name in ("compute_logits", "compute_logits_local"):
            # The class keeps the plain function; what we set lies on the instance.
            model.__dict__.pop(name, None)
            if temperature != 1 and hasattr(model, name):
                setattr(model, name, _divide(getattr(model, name), temperature))


def _divide(compute: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        return None if logits is None else logits.float().div_(temperature)

    return scaled


class SamplerClient:
    """Leads all samplers through one exchange; what vLLM's senders call.

    `call` runs the named method of sampler i (a `VLLMSampler`, wherever it lives) and returns
    a function that waits for its end.
    """

    def __init__(
        self,
        call: Callable[[int, str, tuple[Any, ...]], Callable[[], Any]],
        *,
        num_samplers: int,
        gpus_each: int,
    ) -> None:
        self._call = call
        self._num_samplers = num_samplers
        self._gpus_each = gpus_each
        self.version = 0

    @property
    def num_gpus(self) -> int:
        """How many workers take weights."""
        return self._num_samplers * self._gpus_each

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Meet; where ranks count, each sampler's begin behind those of the one before."""
        infos = [dict(init_info) for _ in range(self._num_samplers)]
        for i, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += i * self._gpus_each
        self._call_all("init_weight_transfer", infos)

    def start_weight_update(self) -> None:
        """Make ready."""
        self._call_all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Take what is being sent."""
        self._call_all("update_weights", [update_info] * self._num_samplers)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Put to use what was taken, under the version that is being sent."""
        version = self.version if weight_version is None else int(weight_version)
        self._call_all("finish_weight_update", [version] * self._num_samplers)

    def _call_all(self, method: str, values: list[Any] | None = None) -> None:
        arguments = [()] * self._num_samplers if values is None else [(v,) for v in values]
        waits = [self._call(i, method, words) for i, words in enumerate(arguments)]
        for wait in waits:
            wait()


class TensorSource(WeightSource):
    """The trainer's weights, gathered one by one each time that they are sent."""

    def __init__(
        self, shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        gather: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:  # fmt: skip
        self._metadata = [ParamMeta(name, dtype, shape) for name, dtype, shape in shapes]
        self._gather = gather

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, in the same order."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._gather()


class Sender:
    """A connection over which weights go, again and again. Used on every trainer rank."""

    def __init__(self, engine: Any, client: SamplerClient) -> None:
        self._engine = engine
        self._client = client

    def send(self, version: int) -> None:
        """Send the weights as they are now; every trainer rank takes part in gathering them."""
        self._client.version = version
        self._engine.send_weights()

    def close(self) -> None:
        """Part from the samplers."""
        self._engine.shutdown()


def connect_by_nccl(
    source: TensorSource, client: SamplerClient, *, rank: int, address: str, port: int
) -> Sender:
    """Meet samplers on other GPUs or nodes; trainer rank 0 listens at `address` and sends.

    The samplers must have been built with transfer="nccl". Untried without GPUs.
    """
    info = NCCLTrainerInitInfo(
        rank=rank, master_address=address, master_port=port, world_size=1 + client.num_gpus
    )
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return Sender(engine, client)


def connect_by_ipc(source: TensorSource, client: SamplerClient, *, rank: int) -> Sender:
    """Share GPU memory with samplers on the trainers' own GPUs, through a bounded buffer.

    The samplers must have been built with transfer="ipc". Untried without GPUs.
    """
    info = IPCTrainerInitInfo(rank=rank, packed=True)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return Sender(engine, client)


# vLLM imports this module in each of its processes, for the extension's sake.
WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
