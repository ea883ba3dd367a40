"""Bytes that the transfer of new weights to the samplers needs on devices and on the host.

`engine/samplers/weight_transfer.py` allocates buffers of these sizes, and the memory plan counts
them. Written from the sources of vLLM 0.32; not measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.schema.run import Model, Rollout

# Tensors are sent in chunks of about this size; vLLM's default of 1 GiB is large next to a learner.
CHUNK_BYTES = 256 * 2**20
# Chunks of a send by NCCL that exist at once: one in flight, the tensors of the next, and those
# packed. A sampler has the one that arrives and the one that it loads.
NCCL_SENT_CHUNKS, NCCL_RECEIVED_CHUNKS = 3, 2


def ipc_buffer_bytes(largest_tensor: int) -> int:
    """Return the size of a rank's CUDA IPC buffer: a tensor never spans two chunks."""
    return max(CHUNK_BYTES, largest_tensor)


@dataclass(frozen=True)
class PublishBytes:
    """Peak bytes of one transfer, in addition to all resident weights.

    `learner` is on each device that trains, `sampler` on each that samples (a shared device has
    both), `host` in the memory of the first rank's node. Meanwhile the samplers' weights are awake
    and their caches asleep. With transfer "memory", `learner` is freed before they wake up.
    """

    learner: int
    sampler: int
    host: int


def publish_bytes(model: Model, rollout: Rollout, shape: Shape, device: Device) -> PublishBytes:
    """Count one transfer of the weights of `shape` from ranks that compute like `device`.

    A rank gathers one layer at a time, and the embedding alone. vLLM loads each module into new
    memory before it copies it to the address that its CUDA graphs expect.
    """
    if model.publishes_adapter:  # it is one small file in host memory
        return PublishBytes(0, 0, 4 * shape.adapter(model.lora_rank, model.target_modules))
    width, span = device.width, rollout.tensor_model_parallel_size
    largest, layer = width * shape.embedding, width * shape.layer
    experts = 3 * width * shape.hidden * shape.expert_width
    fused = 2 * width * shape.hidden * shape.inner  # gate and up projection are one module
    module = max(largest, experts or fused) // span
    pieces = largest // (device.shards * device.tensor) if device.shards * device.tensor > 1 else 0
    all_weights = width * shape.parameters()
    way = rollout.weight_transfer
    if way == "ipc":
        buffer = ipc_buffer_bytes(largest)
        # The embedding is not freed yet while the next layer is gathered.
        return PublishBytes(
            buffer + largest + layer + pieces, max(buffer, experts) + module, 0
        )  # fmt: skip
    if way == "nccl":
        chunk = CHUNK_BYTES + largest
        received = max(NCCL_RECEIVED_CHUNKS * chunk, experts + chunk)
        return PublishBytes(NCCL_SENT_CHUNKS * chunk + layer + pieces, received + module, 0)
    if way == "gloo":
        return PublishBytes(largest + pieces, module, largest + layer)
    # Transfer "memory": each sampler with several workers reads a file in shared memory.
    return PublishBytes(largest + pieces, module, all_weights * (2 if span > 1 else 1))
