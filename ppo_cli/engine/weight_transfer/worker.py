"""How new weights reach a running vLLM: what its workers do with them (`trainer` sends).

Two back ends of vLLM's own weight-transfer interface, beside those that it brings along (NCCL,
CUDA IPC): `MemoryTransfer` takes checkpoint tensors from this process or from a safetensors file
in shared memory, `GlooTransfer` takes them over the network. `WorkerExtension` is mixed by vLLM
into each of its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from ppo_cli.engine.weight_transfer.gloo_group import GLOO, GlooGroup, join_store

MEMORY = "ppo_memory"


class CheckpointTransfer(WeightTransferEngine):
    """Loads checkpoint tensors layer by layer, as vLLM's other back ends do."""

    def start_weight_update(self) -> None:
        """Give each layer its loadable form back: on the CPU weights lie packed."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the tensors; nothing is under way on a device afterwards that must be awaited."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Pack the layers again, output heads too."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


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


class MemoryTransfer(CheckpointTransfer):
    """Loads what lies in memory."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Nothing to meet."""

    def receive_weights(self, update_info: MemoryUpdateInfo) -> None:
        """Load what came."""
        self.model.load_weights(update_info.items())


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer's store is, and who this sampler's workers are in the group."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What will come, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[int, ...]]


class GlooTransfer(CheckpointTransfer):
    """Loads what the trainer sends over the network, tensor by tensor."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Meet the trainer and the other workers."""
        rank = init_info.rank_offset + self.parallel_config.rank
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        self._group = GlooGroup(store, rank, init_info.world_size, init_info.timeout_s)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load each tensor as it comes."""
        self.model.load_weights(self._arriving(update_info))

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _arriving(self, info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        assert self._group is not None
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            yield name, self._group.receive(tuple(shape), getattr(torch, dtype))


def pack_heads(model: torch.nn.Module) -> None:
    """Pack output heads anew on the CPU: a tied one has no weights of its own to be loaded,

    so that the reload passes it by and it would go on with a packed copy of the old embedding.
    """
    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class WorkerExtension:
    """Methods mixed into vLLM's workers."""

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


# vLLM imports this module in each of its processes, for the extension's sake.
WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
WeightTransferEngineFactory.register_engine(GLOO, GlooTransfer)
