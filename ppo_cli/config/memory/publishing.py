"""What it takes of a device and of the host to bring new weights to the samplers.

`engine/samplers/weight_transfer.py` allocates by these sizes, and the memory plan
counts them. Written from the sources of vLLM 0.32; not measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.placement import publishes_adapter, weight_transfer
from ppo_cli.config.schema.run import Config

# Tensors travel in chunks of about this size; vLLM's own 1 GiB is a lot next to a learner.
CHUNK_BYTES = 256 * 2**20
# Chunks of a send by NCCL that exist at once: one in flight, the tensors of the next, and those
# packed. A sampler has the one that arrives and the one that it loads.
NCCL_SENT_CHUNKS, NCCL_RECEIVED_CHUNKS = 3, 2


def ipc_buffer_bytes(largest_tensor: int) -> int:
    """Size of the buffer that a rank shares by CUDA IPC: a tensor never spans two chunks."""
    return max(CHUNK_BYTES, largest_tensor)


@dataclass(frozen=True)
class PublishBytes:
    """The most that one transfer takes beyond all weights that stay where they are.

    `learner` is on each device that trains, `sampler` on each that samples (a shared device has
    both), `host` in the memory of the first rank's node. The samplers' weights are awake
    meanwhile, their caches asleep. By `memory`, `learner` is over before those weights wake.
    """

    learner: int
    sampler: int
    host: int


def publish_bytes(config: Config, shape: Shape, device: Device) -> PublishBytes:
    """Count one transfer of the weights of `shape` from ranks that are like `device`.

    A rank puts one layer together at a time, and the embedding alone; vLLM loads each of its
    modules into fresh memory before it copies it to where the graphs expect it.
    """
    if publishes_adapter(config):  # it travels through host memory, as one small file
        return PublishBytes(
            0, 0, 4 * shape.adapter(config.model.lora_rank, config.model.target_modules)
        )
    width, span = device.width, config.rollout.tensor_model_parallel_size
    largest, layer = width * shape.embedding, width * shape.layer
    experts = 3 * width * shape.hidden * shape.held
    fused = 2 * width * shape.hidden * shape.inner  # gate and up projection are one module
    module = max(largest, experts or fused) // span
    pieces = largest // (device.shards * device.tensor) if device.shards * device.tensor > 1 else 0
    whole = width * shape.parameters()
    way = weight_transfer(config)
    if way == "ipc":
        buffer = ipc_buffer_bytes(largest)
        # While a layer is put together the embedding before it is still there.
        return PublishBytes(
            buffer + largest + layer + pieces, max(buffer, experts) + module, 0
        )  # fmt: skip
    if way == "nccl":
        chunk = CHUNK_BYTES + largest
        received = max(NCCL_RECEIVED_CHUNKS * chunk, experts + chunk)
        return PublishBytes(NCCL_SENT_CHUNKS * chunk + layer + pieces, received + module, 0)
    if way == "gloo":
        return PublishBytes(largest + pieces, module, largest + layer)
    # Each sampler with workers of its own reads a file in shared memory.
    return PublishBytes(largest + pieces, module, whole * (2 if span > 1 else 1))
