"""What models' files allow: heads, reward heads, precision, and whose log-probs are used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import ConfigError
from ppo_cli.planning.memory.plan import cpu_plan
from tests.config.settling import problems, refusals, settle
from tests.rewards.models import twins
from tests.settings import with_gpus

RM = "reward.model.path=a/b"
BYPASS = "algorithm.rollout_correction.bypass_mode"
URL = "reward.model.path=http://h:1/classify"
OPENRLHF = "reward.model.path=http://h:1/get_reward"


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_a_gpu_that_is_there_may_be_named(device: str) -> None:
    resolved = settle(RM, f"reward.model.device={device}", machine=with_gpus(1))
    assert resolved.config.reward.model.device == device
    with pytest.raises(ConfigError, match=r"the last of 1 GPU\(s\) is cuda:0"):
        settle(RM, "reward.model.device=cuda:1", machine=with_gpus(1))


def test_what_cannot_be_read_is_told_before_the_run(tmp_path: Path) -> None:
    twins.skywork_llama_twin(tmp_path / "judge_model")
    twins.plain_causal_twin(tmp_path / "headless")
    for path, message in {
        "./jugde_model": "Did you mean 'judge_model'?",
        "./headless": "has no reward head",
    }.items():
        (line,) = refusals(settle(f"reward.model.path={path}"), {})
        assert message in line
    assert refusals(settle("reward.model.path=./judge_model"), {}) == []


def test_a_served_model_needs_the_key_that_is_named() -> None:
    resolved = settle(URL, "reward.model.key_env=RM_KEY")
    assert refusals(resolved, {"RM_KEY": "k"}) == []
    (line,) = refusals(resolved, {"RM_KEY": " "})
    assert line == "There is no key for the reward model: set RM_KEY, as key_env says."


RS = "algorithm.rollout_correction.rollout_rs=token_k1"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ("", ""),
        ("model.dtype=bfloat16", "in bfloat16"),
        (f"model.dtype=bfloat16 {BYPASS}=true", ""),
        ("trainer.engine=ray", "separate weights"),
        (f"trainer.engine=ray trainer.async_steps=2 {BYPASS}=true", ""),
        ("trainer.async_steps=2 model.dtype=bfloat16 actor.policy_loss.loss_mode=dis", ""),
        ("algorithm.kl_penalty=full", "full KL"),
        ("algorithm.rollout_correction.rollout_is=token", "rollout_is and rollout_rs"),
        (f"{RS} algorithm.rollout_correction.rollout_rs_threshold=2", "rollout_is and rollout_rs"),
        ("algorithm.kl_penalty=full algorithm.use_kl_in_reward=false", ""),
        ("model.quantization=nf4 model.lora_rank=4", "with 4-bit weights"),
        (f"model.quantization=nf4 model.lora_rank=4 {BYPASS}=true", ""),
        ("model.path=./mixed", "another expert"),
        ("model.path=./nested", "another expert"),
        (f"model.path=./mixed {BYPASS}=true", ""),
    ],
)
def test_the_sampler_gives_old_logprobs_where_it_computes_as_the_actor_does(
    overrides: str, why: str, tmp_path: Path
) -> None:
    for name, model_config in (
        ("mixed", {"num_experts": 8}),
        ("nested", {"text_config": {"num_local_experts": 8}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "llama"} | model_config)
        )
    resolved = settle(*overrides.split())
    bypass = resolved.config.algorithm.rollout_correction.bypass_mode
    assert bypass is not bool(why) and why in resolved.why.get(BYPASS, "")
    if bypass:  # one ratio corrects for both
        assert resolved.config.algorithm.rollout_correction.rollout_is == "off"


IS = "algorithm.rollout_correction.rollout_is"
VLLM = "trainer.engine=ray rollout.name=vllm"


@pytest.mark.parametrize(
    ("overrides", "level", "why"),
    [
        ("", "off", "own program"),
        ("trainer.engine=ray model.dtype=bfloat16", "off", "own program"),
        (VLLM, "token", "another program"),
        (f"{VLLM} {IS}=off", "off", ""),
        (f"{VLLM} {IS}=none", "off", ""),
        (f"{VLLM} {IS}=auto", "token", "another program"),
        (f"{VLLM} {BYPASS}=true", "off", "ratio of the loss"),
        (f"{VLLM} actor.policy_loss.loss_mode=dis", "off", "ratio of the loss"),
        ("trainer.async_steps=1", "token", "ahead of training"),
        (f"trainer.async_steps=1 {IS}=none", "off", ""),
        ("trainer.async_steps=1 actor.policy_loss.loss_mode=dis", "off", "ratio of the loss"),
        # A line of verl leaves them out, as verl does where sampling does not run ahead.
        ("actor_rollout_ref.rollout.name=vllm trainer.engine=ray rollout.n=1", "off", ""),
        ("actor_rollout_ref.rollout.name=vllm trainer.async_steps=1", "token", "ahead"),
        (f"actor_rollout_ref.rollout.n=1 trainer.async_steps=1 {IS}=null", "token", "ahead"),
    ],
)
def test_weights_are_on_where_another_policy_samples(overrides: str, level: str, why: str) -> None:
    resolved = settle(*overrides.split())
    assert resolved.config.algorithm.rollout_correction.rollout_is == level
    assert why in resolved.why.get(IS, "")


@pytest.mark.parametrize(
    ("overrides", "lams"),
    [
        ("", (0.95, 1.0)),
        ("algorithm.lam=0.9", (0.9, 0.9)),
        ("algorithm.lam=0.9 critic.lam=0.8", (0.9, 0.8)),
        ("algorithm.lam_alpha=1.5", (0.95, 1.0)),
        ("trainer.engine=verl", (0.95, 0.95)),  # verl has one lambda
    ],
)
def test_the_critics_lambda_is_1_unless_one_is_set_for_both(
    overrides: str, lams: tuple[float, float]
) -> None:
    config = settle(*overrides.split()).config
    assert (config.algorithm.lam, config.critic.lam) == lams


def test_what_the_sampler_cannot_give_is_refused() -> None:
    (line,) = refusals(settle(f"{BYPASS}=true", "algorithm.kl_penalty=full"))
    assert "the full KL needs" in line and "leave it out" in line


FAST = {"hidden_size": 320}


@pytest.mark.parametrize(
    ("overrides", "model_config", "fast", "gpus", "dtype", "message"),
    [
        ("", FAST, True, 0, "bfloat16", "bfloat16 (faster on this processor)"),
        ("", {"text_config": FAST}, True, 0, "bfloat16", "bfloat16 (faster"),
        ("", {"n_embd": 768}, True, 0, "bfloat16", "bfloat16 (faster"),
        ("", FAST, False, 0, "float32", "float32"),
        ("", {"hidden_size": 319}, True, 0, "float32", "float32"),
        ("", {"hidden_size": "big"}, True, 0, "float32", "float32"),
        ("", {}, True, 0, "float32", "float32"),
        ("model.dtype=float32", FAST, True, 0, "float32", "float32"),
        ("model.dtype=bfloat16", {}, False, 0, "bfloat16", "bfloat16, as set"),
        ("trainer.engine=ray", FAST, True, 0, "float32", "float32"),
        ("model.quantization=nf4 model.lora_rank=4", FAST, True, 0, "float32", "float32"),
        ("", {}, False, 1, "bfloat16", ""),
    ],
)
def test_the_precision_that_is_faster(
    overrides: str, model_config: dict[str, Any], fast: bool, gpus: int, dtype: str, message: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"model_type": "llama"} | model_config)
    )
    machine = replace(with_gpus(gpus), fast_bfloat16=fast)
    resolved = settle("model.path=./model", *overrides.split(), machine=machine)
    config = resolved.config
    assert config.model.dtype == dtype
    lines = cpu_plan(resolved.requested.model, config.model, config.trainer, jemalloc=False)
    assert message in " ".join(lines)


def ranks(size: int, path: str) -> tuple[str, ...]:
    sizes = f"trainer.num_workers={size} trainer.tensor_parallel_size={size}"
    return (*sizes.split(), f"model.path={path}")


def write_config(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_layers_are_split_only_where_the_heads_divide(tmp_path: Path) -> None:
    path = write_config(tmp_path, json.dumps({"num_attention_heads": 12}))
    (line,) = problems(*ranks(5, path))
    assert f"the 12 attention heads of {path}" in line
    assert line.endswith("--tensor_parallel_size 1, 2, 3, 4, 6 or 12.")
    for size, model in ((6, path), (2, "embedded"), (3, "some/model"), (3, str(tmp_path / "none"))):
        assert problems(*ranks(size, model)) == ()


def test_a_critic_is_split_only_where_its_heads_divide(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    path = write_config(tmp_path, json.dumps(heads))
    overrides = (*ranks(2, "embedded"), f"critic.model.path={path}")
    (line,) = problems(*overrides)
    assert f"2 does not divide the 9 attention heads of {path}" in line
    assert problems(*overrides, "algorithm.adv_estimator=grpo", "rollout.n=2") == ()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "\x00", '{"num_attention_heads": "4"}',
        '{"num_attention_heads": 0}', '{"num_attention_heads": 4, "num_key_value_heads": [1]}',
        '{"text_config": {"num_attention_heads": 4}}',
    ],
)  # fmt: skip
def test_heads_that_cannot_be_read_are_left_to_the_run(text: str, tmp_path: Path) -> None:
    assert problems(*ranks(3, write_config(tmp_path, text))) == ()
