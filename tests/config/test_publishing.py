"""What a transfer of weights takes, worked out by hand for three models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.schema.run import Model, Rollout
from ppo_cli.planning.memory.publishing import CHUNK_BYTES, PublishBytes, publish_bytes
from tests.settings import complete, with_gpus

QWEN_7B = Shape(3584, 18944, 28, 28, 3584, 512, 152064, tied=False)
MIXTRAL = Shape(4096, 28672, 32, 32, 4096, 1024, 32000, tied=False, experts=8, expert_width=114688)
LLAMA_70B = Shape(8192, 28672, 80, 64, 8192, 1024, 32000, tied=False)
EMBEDDING = 2 * 152064 * 3584  # bytes in bfloat16
LAYER = 2 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944)
WHOLE = 2 * EMBEDDING + 28 * LAYER
RANKS_8 = Device(half=True, gpu=True, shards=8, tensor=1, packed=True, keeps_freed=False)
ALONE = Device(half=True, gpu=True, shards=1, tensor=1, packed=True, keeps_freed=False)

CUT_2 = replace(ALONE, tensor=2)


def settings(way: str, rollout_tp: int = 1, **model: Any) -> tuple[Model, Rollout]:
    rollout = {"name": "vllm", "weight_transfer": way, "tensor_model_parallel_size": rollout_tp}
    config = complete({"rollout": rollout, "model": model}, with_gpus(8))
    return config.model, config.rollout


GROUP = CHUNK_BYTES + EMBEDDING


@pytest.mark.parametrize(
    ("way", "device", "expected"),
    [
        # IPC: the buffer, the embedding whole and the layer after it; a clone, and a fresh module.
        ("ipc", RANKS_8, (2 * EMBEDDING + LAYER + EMBEDDING // 8, 2 * EMBEDDING, 0)),
        ("ipc", ALONE, (2 * EMBEDDING + LAYER, 2 * EMBEDDING, 0)),
        ("nccl", ALONE, (3 * GROUP + LAYER, 2 * GROUP + EMBEDDING, 0)),
        ("gloo", ALONE, (EMBEDDING, EMBEDDING, EMBEDDING + LAYER)),
        ("memory", RANKS_8, (EMBEDDING + EMBEDDING // 8, EMBEDDING, WHOLE)),
        ("memory", CUT_2, (EMBEDDING + EMBEDDING // 2, EMBEDDING, WHOLE)),
    ],
)
def test_a_transfer_of_7b(way: str, device: Device, expected: tuple[int, int, int]) -> None:
    assert publish_bytes(*settings(way), QWEN_7B, device) == PublishBytes(*expected)


def test_a_sampler_of_two_gpus_loads_half_of_a_module_on_each() -> None:
    assert publish_bytes(*settings("memory", 2), QWEN_7B, ALONE) == PublishBytes(
        EMBEDDING, EMBEDDING // 2, 2 * WHOLE
    )


def test_gate_and_up_projection_are_loaded_as_one_module() -> None:
    assert publish_bytes(*settings("gloo"), LLAMA_70B, ALONE).sampler == 2 * 2 * 8192 * 28672


def test_experts_of_a_layer_wait_until_all_are_there() -> None:
    experts = 8 * 3 * 2 * 4096 * 14336
    assert publish_bytes(*settings("ipc"), MIXTRAL, RANKS_8).sampler == 2 * experts


def test_an_adapter_takes_nothing_of_a_device() -> None:
    published = publish_bytes(*settings("memory", lora_rank=8, lora_merge=False), QWEN_7B, ALONE)
    assert published == PublishBytes(0, 0, 4 * QWEN_7B.adapter(8))
