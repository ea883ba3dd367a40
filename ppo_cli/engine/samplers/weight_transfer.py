"""Transfer of new weights to running vLLM engines: both sides of vLLM's interface.

Trainer side: `connect` returns a `Sender` over NCCL (samplers on other GPUs), CUDA IPC (on the
learner's own GPUs) or gloo (anywhere, over the network). The first two use engines of vLLM; they
are written from its sources (0.32, 0.33) and untested, because they need GPUs.

Worker side: `MemoryTransfer` takes checkpoint tensors from its process or from a safetensors file
in shared memory, `GlooTransfer` receives them over the network. vLLM mixes `WorkerExtension` into
each of its workers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from ppo_cli.engine.ranks import GLOO, GlooGroup, join_store, open_store
from ppo_cli.errors import ModelError

# The memory plan counts these sizes too.
from ppo_cli.planning.memory.publishing import CHUNK_BYTES, ipc_buffer_bytes


class SamplerClient:
    """The client of vLLM's senders: calls all samplers at the steps of a transfer.

    `ask_all` calls the named method of every `VLLMSampler`, in whichever process, each with its
    own arguments; it returns when all have returned and raises as soon as one of them fails.
    """

    def __init__(
        self,
        ask_all: Callable[[str, list[tuple[Any, ...]]], None],
        *,
        num_samplers: int,
        gpus_each: int,
    ) -> None:
        self._ask_all = ask_all
        self._num_samplers = num_samplers
        self._gpus_each = gpus_each
        self.version = 0

    @property
    def num_gpus(self) -> int:
        """Return how many workers receive weights."""
        return self._num_samplers * self._gpus_each

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all samplers; their ranks follow each other in the group."""
        # Each sampler has `_gpus_each` workers in the group.
        infos = [dict(init_info) for _ in range(self._num_samplers)]
        for i, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += i * self._gpus_each
        self._ask_all("init_weight_transfer", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        """Let all samplers prepare for new weights."""
        self._ask_all("start_weight_update", [()] * self._num_samplers)

    def update_weights(self, update_info: Any) -> None:
        """Let all samplers receive what is being sent."""
        self._ask_all("update_weights", [(update_info,)] * self._num_samplers)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Activate the received weights under the version that is being sent."""
        version = self.version if weight_version is None else int(weight_version)
        self._ask_all("finish_weight_update", [(version,)] * self._num_samplers)


class Metadata(list[ParamMeta]):
    """Name, dtype and shape of tensors, which vLLM 0.32 calls and 0.33 reads."""

    def __call__(self) -> Metadata:
        """Return the list itself."""
        return self


class TensorSource(WeightSource):
    """The trainer's weights, gathered one by one for each transfer, for vLLM 0.32 and 0.33."""

    def __init__(
        self, shapes: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        gather: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:  # fmt: skip
        self._shapes = list(shapes)
        self._gather = gather
        self.largest_bytes = max(
            math.prod(shape) * dtype.itemsize for _, dtype, shape in self._shapes
        )

    @cached_property  # 0.33 refuses any other attribute
    def metadata(self) -> Metadata:
        """The tensors in the order of iteration."""
        return Metadata(ParamMeta(*shape) for shape in self._shapes)

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors; 0.33 calls this."""
        return self._gather()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the tensors; 0.32 calls this."""
        return self._gather()


class Sender:
    """A connection for repeated weight transfers. Used on every trainer rank."""

    def __init__(self, engine: Any, client: SamplerClient) -> None:
        self._engine = engine
        self._client = client

    def send(self, version: int) -> None:
        """Send the current weights; every trainer rank takes part in gathering them."""
        self._client.version = version
        self._engine.send_weights()

    def close(self) -> None:
        """Disconnect from the samplers."""
        self._engine.shutdown()


def connect(
    way: str, source: TensorSource, client: SamplerClient, *, rank: int, address: str, port: int,
    timeout_s: float,
) -> Sender:  # fmt: skip
    """Connect to samplers that were built with transfer=`way`; every trainer rank calls.

    "gloo": anywhere; rank 0 listens at `address` and sends. "nccl": to other GPUs or nodes; rank 0
    listens at `address` and `port` and sends. No two ranks may share a GPU, and `source` must
    yield tensors on this rank's GPU. "ipc": on the trainers' own GPUs; every rank fills a buffer
    on its GPU, and each worker reads the buffer on its own. nccl and ipc are untested.
    """
    # vLLM registers a trainer engine for each kind of this object.
    info: TrainerInitInfo
    if way == "nccl":
        # A tensor larger than a chunk gets a chunk alone, which is fine; vLLM would warn each time.
        warnings.filterwarnings("ignore", message=r"Tensor '.*' has size .*buffer_size_bytes")
        info = NCCLTrainerInitInfo(
            rank=rank, master_address=address, master_port=port, world_size=1 + client.num_gpus,
            packed_buffer_size_bytes=CHUNK_BYTES,
        )  # fmt: skip
    elif way == "ipc":
        size = ipc_buffer_bytes(source.largest_bytes)
        info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=size)
    else:
        info = GlooTrainerInfo(address, timeout_s, rank=rank)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    return Sender(engine, client)


@dataclass
class GlooTrainerInfo(TrainerInitInfo):
    """The address on which the first trainer rank listens, and the timeout of all waits."""

    backend: ClassVar[str] = GLOO

    address: str
    timeout_s: float


class GlooTrainer(TrainerWeightTransferEngine[GlooTrainerInfo]):
    """Sends tensor by tensor from the first rank; the other ranks only help to gather them."""

    init_info_cls = GlooTrainerInfo
    source: TensorSource
    client: SamplerClient
    _group: GlooGroup | None = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInfo, *, client: Any, source: WeightSource | None = None
    ) -> GlooTrainer:
        """Open the store and wait for all workers."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._connect_workers(init_info)
        return engine

    def _connect_workers(self, info: GlooTrainerInfo) -> None:
        """Open a store, send the samplers' workers its port, and wait until all have joined."""
        # Rank 0 is the trainer, the workers follow.
        store, size = open_store(info.address, info.timeout_s), 1 + self.client.num_gpus
        request = asdict(info) | {"port": store.port, "rank_offset": 1, "world_size": size}
        del request["rank"]

        def join_group() -> None:
            self._group = GlooGroup(store, 0, size, info.timeout_s)

        _run_alongside(lambda: self.client.init_weight_transfer_engine(request), join_group)

    def send_weights(self) -> None:
        """Run a transfer: the samplers receive while this rank sends."""
        if not self.is_sender:
            for _ in self.source:
                pass
            return
        # The workers know names and shapes before the first tensor arrives.
        meta = self.source.metadata
        request = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in meta],
            "shapes": [m.shape for m in meta],
        }
        self.client.start_weight_update()
        _run_alongside(lambda: self.client.update_weights(request), self._broadcast)
        self.client.finish_weight_update()

    def _broadcast(self) -> None:
        assert self._group is not None
        for (name, tensor), meta in zip(self.source, self.source.metadata, strict=True):
            # The receivers cannot check this: they only get bytes.
            if (name, tensor.dtype, tuple(tensor.shape)) != (meta.name, meta.dtype, meta.shape):
                raise ValueError(f"{name} came where {meta} was declared")
            self._group.send(tensor)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


def _run_alongside(asking: Callable[[], None], work: Callable[[], None]) -> None:
    """Do `work` while `asking` runs in a thread; if the work fails, do not wait for it."""
    # The samplers block until they have received everything, so they are called in a thread.
    thread = ThreadPoolExecutor(1)
    try:
        request = thread.submit(asking)
        work()
        request.result()
    finally:
        thread.shutdown(wait=False)


# vLLM selects the trainer's engine by this name.
WeightTransferTrainerFactory.register_engine(GLOO, GlooTrainer)


# The name of transfers through memory in vLLM's registry.
MEMORY = "ppo_memory"


class CheckpointTransfer(WeightTransferEngine):
    """Loads checkpoint tensors layer by layer, as vLLM's other back ends do."""

    def start_weight_update(self) -> None:
        """Restore the loadable form of each layer: on the CPU weights are packed."""
        if current_platform.is_cpu():
            drop_expert_kernels(self.model)
        # Private API of vLLM (tried on 0.32 and 0.33), which its own back ends use.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the tensors, and wait for the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Pack the layers again, output heads too."""
        # Before the reload ends: it forgets which layers were loaded.
        require_experts(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        pack_heads(self.model)

    def shutdown(self) -> None:
        """Does nothing: there is no connection."""


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """Empty: a transfer through memory needs no connection."""


@dataclass
class MemoryUpdateInfo(WeightTransferUpdateInfo):
    """The tensors if the worker is this process, else a file that contains them."""

    tensors: dict[str, Tensor] | None = None
    path: str | None = None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors."""
        if self.tensors is not None:
            yield from self.tensors.items()
        else:
            with safe_open(self.path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    yield name, file.get_tensor(name)


class MemoryTransfer(CheckpointTransfer):
    """Loads tensors from memory."""

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Does nothing: there is no connection."""

    def receive_weights(self, update_info: MemoryUpdateInfo) -> None:
        """Load the tensors."""
        self.model.load_weights(update_info.items())


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The address of the trainer's store, and the ranks of this sampler's workers."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, dtypes and shapes of the tensors, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[int, ...]]


class GlooTransfer(CheckpointTransfer):
    """Loads what the trainer sends over the network, tensor by tensor."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group of the trainer and all workers."""
        # Ranks of one sampler's workers are contiguous.
        rank = init_info.rank_offset + self.parallel_config.rank
        store = join_store(init_info.address, init_info.port, init_info.timeout_s)
        self._group = GlooGroup(store, rank, init_info.world_size, init_info.timeout_s)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Load each tensor as it arrives."""
        self.model.load_weights(self._receive_tensors(update_info))

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _receive_tensors(self, info: GlooUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        assert self._group is not None
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            yield name, self._group.receive(tuple(shape), getattr(torch, dtype))


def require_experts(model: torch.nn.Module) -> None:
    """Raise ModelError if experts got no new weights: vLLM would sample from the old ones."""
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase):
            continue
        info = get_layerwise_info(module)
        if info.can_load() and not info.load_numel:
            raise ModelError(
                f"vLLM cannot put new weights into the experts of a {type(model).__name__} that "
                f"runs ({name}): sample without it (--rollout_name hf), or train an adapter and "
                "publish it alone (--lora_rank, model.lora_merge=false)."
            )


def drop_expert_kernels(model: torch.nn.Module) -> None:
    """Make vLLM rebuild the kernels of experts after the reload (private API; tried: 0.32, 0.33).

    vLLM packs expert weights for the CPU only while there is no kernel.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None


def pack_heads(model: torch.nn.Module) -> None:
    """Pack output heads again on the CPU.

    A tied head has no separate weights to load, so the reload skips it, and it would keep a
    packed copy of the old embedding.
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

        vLLM returns log-probs either before the temperature, or after top-k and top-p as well.
        With scaled logits the former are what a rollout records: under the temperature, before
        truncation.
        """
        model = self.model_runner.model
        for name in ("compute_logits", "compute_logits_local"):
            # The class keeps the original function; ours is set on the instance.
            model.__dict__.pop(name, None)
            if temperature != 1 and hasattr(model, name):
                setattr(model, name, _divide(getattr(model, name), temperature))


def _divide(compute: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        return None if logits is None else logits.float().div_(temperature)

    return scaled


# vLLM imports this module in each of its processes, because of `worker_extension_cls`.
WeightTransferEngineFactory.register_engine(MEMORY, MemoryTransfer)
WeightTransferEngineFactory.register_engine(GLOO, GlooTransfer)
