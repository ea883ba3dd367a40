"""What publishing and the host's memory need, worked out by hand, and what is changed for them."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.devices import (
    CONTEXT_BYTES,
    DeviceNeeds,
    ModelShapes,
    RunNeeds,
)
from ppo_cli.planning.memory.plan import (
    Estimate,
    estimate_memory,
    find_smallest_change,
)
from ppo_cli.planning.memory.publishing import CHUNK_BYTES
from tests.settings import CPU, complete, with_gpus

GB = 10**9
QWEN_3B = Shape(2048, 11008, 36, 16, 2048, 256, 151936, tied=True)
QWEN_7B = Shape(3584, 18944, 28, 28, 3584, 512, 152064, tied=False)
PHI_3 = Shape(3072, 8192, 32, 32, 3072, 3072, 32064, tied=False)


# What `auto` takes depends on what a self-test has proven.
SAMPLER = {"name": "vllm", "weight_transfer": "ipc", "sleep": "discard"}


def settings(gpus: int = 8, nodes: int = 1, **changes: Any) -> Config:
    trainer = {"engine": "ray", "n_gpus_per_node": gpus, "nnodes": nodes}
    batch = {"data": {"train_batch_size": 256}, "actor": {"ppo_mini_batch_size": 256}}
    config = Config.model_validate(
        batch
        | {"rollout": SAMPLER, "trainer": trainer}
        | {"model": {"path": "x", "dtype": "bfloat16", "enable_gradient_checkpointing": True}}
    )
    return with_settings(config, {key.replace("__", "."): value for key, value in changes.items()})


def shapes(shape: Shape) -> ModelShapes:
    return ModelShapes(shape, shape, shape)


def estimate(config: Config, shape: Shape, machine: Machine) -> Estimate:
    return estimate_memory(settle(config, machine).config, shapes(shape), machine)


def count_gpu(config: Config, shape: Shape, capacity: int = 80 * GB) -> DeviceNeeds:
    machine = with_gpus(8, capacity)
    (place,) = RunNeeds(complete(config, machine), shapes(shape), machine).devices()
    return place


def test_publishing_wakes_weights_next_to_what_the_learner_gathers() -> None:
    place = count_gpu(settings(), QWEN_7B)
    rest = place.phases["rollout"] - int(0.5 * 80 * GB)  # gpu_memory_utilization
    embedding, layer = 2 * QWEN_7B.embedding, 2 * QWEN_7B.layer
    # IPC: its buffer, the embedding whole with its pieces, and a layer; a clone and a module.
    learner = 2 * embedding + embedding // 8 + layer
    expected = rest + 2 * QWEN_7B.parameters() + learner + 2 * embedding
    assert place.phases["publishing"] == expected > rest + 15 * GB
    assert embedding > CHUNK_BYTES


def test_weights_that_travel_by_memory_have_left_the_learner_when_samplers_wake() -> None:
    place = count_gpu(settings(rollout__weight_transfer="memory"), QWEN_7B)
    rest = place.phases["rollout"] - int(0.5 * 80 * GB)
    module = 2 * QWEN_7B.embedding
    assert place.phases["publishing"] == rest + 2 * QWEN_7B.parameters() + module


def test_a_model_that_fits_but_for_publishing_does_not_fit() -> None:
    """3B on 8 GPUs that have room for a step, and less than a transfer takes."""
    tight = settings(
        rollout__gpu_memory_utilization=0.3,
        actor__ppo_max_token_len_per_gpu=4096,
        critic__ppo_max_token_len_per_gpu=4096,
        ref__log_prob_max_token_len_per_gpu=4096,
    )
    place = count_gpu(tight, QWEN_3B, 24 * GB)
    assert place.phase == "publishing"
    capacity = int(place.needed / 0.9) - 1
    others = max(need for phase, need in place.phases.items() if phase != "publishing")
    assert others < 0.9 * capacity
    machine = with_gpus(8, capacity)
    assert not estimate(tight, QWEN_3B, machine).fits
    changes = find_smallest_change(tight, shapes(QWEN_3B), machine)
    assert changes == {"rollout.tensor_model_parallel_size": 2}
    assert estimate(with_settings(tight, changes), QWEN_3B, machine).fits


def test_devices_of_their_own_publish_with_the_cache_awake() -> None:
    apart = settings(trainer__placement="train:0-3,rollout:4-7")
    machine = with_gpus(8, 80 * GB)
    learner, sampler = RunNeeds(complete(apart, machine), shapes(QWEN_7B), machine).devices()
    assert sampler.name == "a GPU that samples"
    assert sampler.phases["publishing"] > sampler.phases["rollout"] == 40 * GB
    assert learner.phases["publishing"] > learner.phases["rollout"]
    assert estimate(apart, QWEN_7B, machine).places == (learner, sampler)


def test_small_gpus_leave_room_for_contexts() -> None:
    large, small = (count_gpu(settings(), QWEN_3B, size * GB) for size in (80, 12))
    # A learner, a sampler, the group of ranks and that of the transfer.
    assert small.left_free == 4 * CONTEXT_BYTES > 0.1 * 12 * GB
    assert large.left_free == 8 * GB


AWAY = {
    f"{model}__fsdp_config__{what}": True
    for model in ("actor", "critic")
    for what in ("param_offload", "optimizer_offload")
}
TRAINED = 4 * QWEN_7B.parameters()
CRITIC = TRAINED - 4 * QWEN_7B.embedding  # without the head over the vocabulary


@pytest.mark.parametrize(
    ("changes", "nodes", "expected"),
    [
        # Float32 weights and two moments of actor and critic while a checkpoint is written.
        ({}, 1, 3 * (TRAINED + CRITIC)),
        ({}, 2, 3 * (TRAINED + CRITIC) / 2),
        # Copies of a model on other nodes are not written.
        ({"actor__fsdp_config__fsdp_size": 8, "critic__fsdp_config__fsdp_size": 8}, 2,
         3 * (TRAINED + CRITIC) / 2),
        # And weights, gradients and moments that are never on the GPU.
        (AWAY, 1, 7 * (TRAINED + CRITIC)),
        ({"actor__fsdp_config__optimizer_offload": True}, 1, 5 * TRAINED + 3 * CRITIC),
        ({"ref__param_offload": True, "algorithm__adv_estimator": "grpo"}, 1, 3.5 * TRAINED),
    ],
)  # fmt: skip
def test_the_host_holds_checkpoints_and_what_is_offloaded(
    changes: dict[str, Any], nodes: int, expected: float
) -> None:
    machine = with_gpus(8, host_bytes=2000 * GB)
    config = complete(settings(nodes=nodes, **changes), machine)
    host = RunNeeds(config, shapes(QWEN_7B), machine).host()
    assert host is not None
    assert host.phases["training"] == pytest.approx(expected, rel=1e-6)
    assert host.phases["loading"] >= TRAINED
    assert host.name == ("the host's memory" if nodes == 1 else "the memory of a node")


def test_a_run_that_fits_its_gpus_but_not_the_host_does_not_fit() -> None:
    config = settings()
    for host_gb, fits in ((500, True), (128, False)):
        machine = with_gpus(8, 80 * GB, host_bytes=host_gb * GB)
        assert estimate(config, QWEN_7B, machine).fits is fits


def test_memory_beside_gpus_that_are_elsewhere_is_not_known() -> None:
    for machine in (CPU, with_gpus(8)):
        elsewhere = estimate(settings(), QWEN_7B, machine.assume_memory(80 * GB))
        assert elsewhere.host is not None
        assert (elsewhere.fits, elsewhere.host.fits) == (True, None)


@pytest.mark.parametrize(
    ("gpus", "rows", "limit", "cached"),
    [(1, 2, 1024, 512), (4, 2, 1024, 128), (8, 8, 1024, 256), (8, 8, 64, 64)],
)
def test_samplers_share_the_rows(gpus: int, rows: int, limit: int, cached: int) -> None:
    """256 prompts are dealt to one sampler a GPU, each with all its rows."""
    config = settings(gpus, rollout__name="hf", rollout__n=rows, rollout__max_num_seqs=limit)
    place = count_gpu(config, PHI_3)
    layer = 2 * 2 * 3072 * cached * 1024  # keys and values of rows of 512 + 512 in bfloat16
    sampler = place.roles["sampler"]
    assert sampler.kv_cache == layer * (32 + 1)
    wide = with_settings(config, {"model.float32_head": True})
    widened = count_gpu(wide, PHI_3).roles["sampler"]
    assert widened.logits - sampler.logits == 4 * 3072 * 32064  # a copy in float32


def test_vllm_starts_with_room_for_its_weights_and_a_row() -> None:
    """15.23 GB of weights and 0.06 of a cache, on a GPU of 40 GB of its own."""
    for share, starts in ((0.38, False), (0.39, True)):
        config = settings(
            trainer__placement="train:0-3,rollout:4-7", rollout__gpu_memory_utilization=share
        )
        machine = with_gpus(8, 40 * GB)
        learner, sampler = RunNeeds(complete(config, machine), shapes(QWEN_7B), machine).devices()
        assert sampler.vllm_least == 2 * QWEN_7B.parameters() + 2 * 2 * 512 * 28 * 1024
        assert (sampler.vllm_starts, sampler.fits, learner.vllm_starts) == (starts, starts, True)


def test_the_change_for_vllm_is_a_larger_share_or_more_gpus() -> None:
    frozen = ADAPTER | {"rollout__n": 8, "actor__ppo_max_token_len_per_gpu": 2048}
    frozen |= {"ref__log_prob_max_token_len_per_gpu": 2048}
    for gpu, share, changes in (
        (40, 0.35, {"rollout.gpu_memory_utilization": 0.4}),
        (24, 0.45, {"rollout.gpu_memory_utilization": 0.65}),
        (16, 0.5, {"rollout.tensor_model_parallel_size": 2}),
    ):
        config = settings(**frozen, rollout__gpu_memory_utilization=share)
        assert find_smallest_change(config, shapes(QWEN_7B), with_gpus(8, gpu * GB)) == changes


ADAPTER = {"model__lora_rank": 16, "model__lora_merge": False, "algorithm__adv_estimator": "grpo"}


def test_a_base_sleeps_on_the_gpu_where_it_fits_and_else_in_host_memory() -> None:
    config = settings(gpus=1, **ADAPTER, rollout__n=4, rollout__sleep=None)
    base = 2 * QWEN_7B.parameters()
    large, small = (
        estimate(config, QWEN_7B, with_gpus(1, size * GB, host_bytes=500 * GB))
        for size in (141, 40)
    )
    assert (large.config.rollout.sleep, small.config.rollout.sleep) == ("keep", "offload")
    assert large.host is not None and small.host is not None
    assert small.host.phases["training"] - large.host.phases["training"] == base
    assert small.host.roles["sleeping samplers"].parameters == base
