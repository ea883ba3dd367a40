"""What is advised where memory has run out: by cause, and only what is not set already."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.memory.advice import Cause, advise_memory
from tests.settings import complete, with_gpus

CAUSES: tuple[Cause, ...] = ("weights", "sequence", "step", "sampling")
OFFLOAD = {
    f"{model}.fsdp_config.{what}": True
    for model in ("actor", "critic")
    for what in ("optimizer_offload", "param_offload")
}


def settings(gpus: int = 8, **changes: Any) -> Config:
    trainer = {"engine": "ray", "n_gpus_per_node": gpus}
    sampler = {"name": "vllm" if gpus else "hf"}
    config = Config.model_validate({"trainer": trainer, "rollout": sampler})
    config = with_settings(config, {key.replace("__", "."): v for key, v in changes.items()})
    return complete(config, with_gpus(gpus))


@pytest.mark.parametrize(
    ("cause", "first", "more_gpus"),
    [
        ("weights", "Add ref.param_offload=true", True),
        ("sequence", "Lower --max_response_length", True),
        ("step", "Add actor.fsdp_config.optimizer_offload=true critic.fsdp_config", True),
        ("sampling", "Lower --gpu_memory_utilization", False),
    ],
)
def test_each_cause_has_its_own_advice(cause: Cause, first: str, more_gpus: bool) -> None:
    text = advise_memory(settings(), cause)
    assert text.startswith(first)
    assert ("use more GPUs (--n_gpus, --nnodes)" in text) == more_gpus
    assert text.endswith("take a smaller --model.")
    assert ("max_response_length" in text) == (cause in ("sequence", "sampling"))
    assert ("AdamW8bit" in text) == (cause == "step")


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_what_is_to_be_added_is_valid_and_new(cause: Cause, gpus: int) -> None:
    """A user who adds all of it is not told again."""
    config = settings(gpus, model__enable_gradient_checkpointing=False)
    offered = re.findall(r"([a-z_.]+)=([A-Za-z0-9]+)", advise_memory(config, cause))
    values = {"true": True}
    changed = {
        key: values.get(value, int(value) if value.isdigit() else value) for key, value in offered
    }
    followed = Config.model_validate(with_settings(config, changed).model_dump())
    assert followed != config or not offered
    second_advice = advise_memory(followed, cause)
    for key, value in offered:
        if not value.isdigit():  # a smaller number of rows can be made smaller still
            assert key not in second_advice


def test_without_gpus_none_are_asked_for_and_nothing_is_offloaded() -> None:
    for cause in CAUSES:
        text = advise_memory(settings(0), cause)
        assert "GPUs" not in text and "offload" not in text


@pytest.mark.parametrize("cause", ["weights", "sequence", "step"])
def test_ranks_without_gpus_may_be_fewer_or_train_less(cause: Cause) -> None:
    text = advise_memory(settings(0, trainer__num_workers=4), cause)
    assert "run fewer of the 4 learner ranks on a machine (--num_workers)" in text
    assert "dd model.lora_rank=16 critic.model.lora_rank=16" in text
    assert "add algorithm.adv_estimator=grpo rollout.n=4 (trains no critic)" in text


def test_a_rank_alone_without_a_critic_is_offered_an_adapter_only() -> None:
    config = settings(0, algorithm__adv_estimator="grpo", rollout__n=4)
    text = "Add model.lora_rank=16 or take a smaller --model."
    assert advise_memory(config, "step") == text


def test_a_reference_that_is_the_base_of_the_adapter_has_nothing_to_offload() -> None:
    assert "ref.param_offload" not in advise_memory(settings(model__lora_rank=8), "weights")
    away = settings(**{key.replace(".", "__"): value for key, value in OFFLOAD.items()})
    assert "fsdp_config" not in advise_memory(away, "weights")
