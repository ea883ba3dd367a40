"""When ranks on GPUs keep what they gather, and what a reference in host memory takes there."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.machine.device_record import Feature
from ppo_cli.planning.memory.devices import ModelShapes, RunNeeds
from ppo_cli.planning.memory.model import ModelOnRank
from ppo_cli.planning.memory.plan import (
    Estimate,
    estimate_memory,
    fit_memory,
    memory_plan,
)
from tests.settings import complete, with_gpus

GB = 10**9
QWEN_05B = Shape(896, 4864, 24, 14, 896, 128, 151936, True, True)
QWEN_15B = Shape(1536, 8960, 28, 12, 1536, 256, 151936, True, True)
QWEN_7B = Shape(3584, 18944, 28, 28, 3584, 512, 152064, False, True)


def settings(nodes: int = 1, gpus: int = 8, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "x", "dtype": "bfloat16"},
        "trainer": {"n_gpus_per_node": gpus, "nnodes": nodes, "engine": "ray"},
        "rollout": {"name": "vllm"},
        "data": {"train_batch_size": 1024},
        "actor": {"ppo_mini_batch_size": 256},
    }
    return Config.model_validate(
        {key: base.get(key, {}) | sections.get(key, {}) for key in base | sections}
    )


KEEPING: tuple[Feature, ...] = ("keep_gathered",)


def choose(
    config: Config, shape: Shape, memory_gb: int, proven: tuple[Feature, ...] = KEEPING
) -> Estimate:
    machine = with_gpus(8, memory_gb * GB, proven=proven)
    return estimate_memory(
        settle(config, machine).config, ModelShapes(shape, shape, shape), machine
    )


@pytest.mark.parametrize(
    ("shape", "memory_gb", "recompute", "expected"),
    [
        (QWEN_05B, 80, None, (False, False)),  # activations and weights are kept
        (QWEN_15B, 80, None, (True, False)),  # weights alone
        (QWEN_15B, 80, True, (True, False)),
        (QWEN_15B, 24, None, (True, True)),
        (QWEN_7B, 80, True, (True, True)),  # 82 GB with all gradients
        (QWEN_7B, 141, True, (True, False)),
    ],
)
def test_gpus_keep_gathered_weights_where_they_fit(
    shape: Shape, memory_gb: int, recompute: bool | None, expected: tuple[bool, bool]
) -> None:
    set_by_hand = {} if recompute is None else {"enable_gradient_checkpointing": recompute}
    config = settings(model=set_by_hand)
    settled = choose(config, shape, memory_gb).config
    for part in (settled.actor, settled.critic):
        assert part.fsdp_config.reshard_after_forward is expected[1]
    assert settled.model.enable_gradient_checkpointing is expected[0]


@pytest.mark.parametrize(
    ("nodes", "memory_gb", "expected"), [(1, 80, (False, True)), (2, 70, (True, False))]
)
def test_between_nodes_gathered_weights_save_more_time_than_activations(
    nodes: int, memory_gb: int, expected: tuple[bool, bool]
) -> None:
    """Activations are ample alone, and not with whole weights: 36 of 42 GB, 34 of 36 GB."""
    shape = Shape(2048, 8192, 16, 16, 2048, 2048, 32000, True, True)
    config = choose(settings(nodes), shape, memory_gb).config
    recompute = config.model.enable_gradient_checkpointing
    assert (recompute, config.actor.fsdp_config.reshard_after_forward) == expected


def test_what_was_set_and_what_is_in_host_memory_stays() -> None:
    careful = {"fsdp_config": {"reshard_after_forward": True}}
    away = {"fsdp_config": {"param_offload": True}}
    config = choose(settings(actor=careful, critic=away), QWEN_05B, 80).config
    assert config.actor.fsdp_config.reshard_after_forward is True
    assert config.critic.fsdp_config.reshard_after_forward is True


def test_without_a_self_test_nothing_is_kept_and_the_plan_says_so() -> None:
    settled = choose(settings(), QWEN_05B, 80, proven=()).config
    assert settled.actor.fsdp_config.reshard_after_forward is True

    def lines(config: Config, proven: tuple[Feature, ...] = ()) -> list[str]:
        machine = with_gpus(8, 80 * GB, proven=proven)
        sentences = memory_plan(config, fit_memory(settle(config, machine)), machine).sentences
        return [line for line in sentences if "weights are gathered" in line]

    model = {"path": "embedded"}
    (line,) = lines(settings(model=model))
    assert "in each micro-batch" in line and "doctor --self-test" in line
    careful = {"fsdp_config": {"reshard_after_forward": True}, "ppo_mini_batch_size": 256}
    assert not lines(settings(model=model, actor=careful))
    assert not lines(settings(model=model, gpus=1))
    (line,) = lines(settings(model=model), KEEPING)
    assert "once a step" in line and "self-test" not in line


def test_the_embedding_of_a_critic_is_gathered_while_its_first_layer_computes() -> None:
    config = choose(settings(), QWEN_7B, 80).config
    ranks = Device(half=True, gpu=True, shards=8, tensor=1, packed=True, keeps_freed=False)
    critic = ModelOnRank(config, ranks, QWEN_7B, config.critic, 256, config.critic.fsdp_config)
    peaks = critic.update_peaks()
    embedding, layer = 152064 * 3584, 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    # All activations are freed by then; the last layer is a neighbour of the head.
    ahead = peaks["the first layer"] - peaks["the last layer"] + critic.activations
    assert ahead == 2 * (embedding - layer) > 0


def test_a_reference_in_host_memory_is_on_the_device_for_an_annotation_alone() -> None:
    def phases(**sections: dict[str, Any]) -> dict[str, int]:
        shapes = ModelShapes(QWEN_7B, QWEN_7B, QWEN_7B)
        machine = with_gpus(8, 80 * GB)
        places = RunNeeds(complete(settings(**sections), machine), shapes, machine).devices()
        return dict(places[0].phases)

    resident, away = phases(), phases(ref={"param_offload": True})
    assert away["annotation"] == resident["annotation"]
    piece = resident["update of the actor"] - away["update of the actor"]
    assert piece > 1.9 * GB
    offload = {"fsdp_config": {"param_offload": True}, "ppo_mini_batch_size": 256}
    short = phases(actor=offload), phases(actor=offload, ref={"param_offload": True})
    assert short[0]["annotation"] - short[1]["annotation"] == piece  # it comes bit by bit there
    full = {"use_kl_loss": True, "kl_loss_type": "full", "ppo_mini_batch_size": 256}
    with_kl = phases(actor=full), phases(actor=full, ref={"param_offload": True})
    assert with_kl[0]["update of the actor"] == with_kl[1]["update of the actor"]
