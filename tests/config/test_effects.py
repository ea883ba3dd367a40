"""Settings that would change nothing are refused where typed, and noted where a preset has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppo_cli.config.checks.requirements import missing_parts, remarks
from ppo_cli.config.checks.unused import UNUSED, find_unused
from ppo_cli.config.plan import config_yaml
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ConfigError
from tests.config.settling import settle

OFF = "algorithm.adv_estimator=rloo rollout.n=2 algorithm.use_kl_in_reward=false data.val_files=[]"
JUDGE = "reward.api.enable=true reward.api.model=m"
MIXED = "reward.parts=[judge:1] reward.api.model=m"
MIXTURE_OFF = "reward.composite.enable=false"
LOCAL, AT_SERVER = "reward.model.dtype", "reward.model.timeout"
# Results are what was asked for, so a machine that cannot use these only remarks on them.
OF_MEMORY_AND_SPEED = {
    "rollout.gpu_memory_utilization", "rollout.max_num_batched_tokens", "rollout.enforce_eager",
    "rollout.enable_prefix_caching", "rollout.engine_kwargs.vllm",
    "actor.fsdp_config.fsdp_size", "critic.fsdp_config.fsdp_size",
    "actor.fsdp_config.reshard_after_forward", "critic.fsdp_config.reshard_after_forward",
    "actor.fsdp_config.param_offload", "critic.fsdp_config.param_offload", "ref.param_offload",
    "actor.fsdp_config.optimizer_offload", "critic.fsdp_config.optimizer_offload",
    "model.share_prompts", "model.float32_matmul", "model.spread_weights",
    "trainer.max_restarts", "trainer.worker_timeout", "trainer.node_timeout",
}  # fmt: skip
# What else must be set for a row to be idle, beside OFF.
BESIDE = {
    **dict.fromkeys([k for k in UNUSED if k.startswith("reward.api.monitor.")], JUDGE),
    "reward.api.local.*": JUDGE,
    "reward.api.prompt_preset": f"{JUDGE} reward.api.scoring_prompt=x",
    "reward.api.scale": f"{JUDGE} reward.api.rubric=extra_info.r",
    "reward.api.rubric_calls": JUDGE,
    "reward.api.compare": JUDGE,
    "reward.api.compare_calls": f"{JUDGE} reward.api.mode=compare reward.api.compare=list",
    "reward.api.prices": f"{JUDGE} reward.api.price_input=1 reward.api.price_output=2",
    "reward.api.hedge_after": f"{JUDGE} reward.api.timeout=32",
    "reward.api.temperature": f"{JUDGE} reward.api.mode=decision reward.api.type=openai",
    "reward.api.output": f"{JUDGE} reward.api.mode=decision reward.api.type=openai",
    "reward.api.max_tokens": f"{JUDGE} reward.api.mode=decision reward.api.type=openai",
    "model.share_prompts": "model.packing=false",
    "model.float32_matmul": "model.dtype=bfloat16",
    "model.spread_weights": "model.dtype=float32",
    "actor.clip_ratio_c": "actor.policy_loss.loss_mode=cispo",
    **dict.fromkeys(
        ("actor.clip_ratio", "actor.clip_ratio_low", "actor.clip_ratio_high"),
        "actor.policy_loss.loss_mode=gpg",
    ),
    "reward.timeout": JUDGE,
    "reward.num_workers": JUDGE,
    "reward.function_kwargs": JUDGE,
    "reward.function": MIXED,
    "reward.rule": MIXED,
    "reward.model.path": MIXED,
    **dict.fromkeys(
        [k for k, row in UNUSED.items() if row is UNUSED[LOCAL]], "reward.model.path=http://h"
    ),
    **dict.fromkeys(
        [k for k, row in UNUSED.items() if row is UNUSED[AT_SERVER]], "reward.model.path=a/b"
    ),
    "reward.code.*": "reward.rule=exact",
    "reward.parts": MIXTURE_OFF,
    "reward.composite.weights": MIXTURE_OFF,
    "reward.composite.parts": MIXTURE_OFF,
}
OTHER = {
    "algorithm.rollout_correction.rollout_is_threshold_lower": "0.5", "trainer.node_rank": "0",
    "actor.clip_ratio_low": "0.1", "actor.clip_ratio_high": "0.4",
    "trainer.master_addr": "host", "ref.path": "a/b", "model.target_modules": "q_proj",
    "algorithm.kl_penalty": "k3", "actor.kl_loss_type": "k1", "reward.api.monitor.type": "gemini",
    "reward.api.prompt_preset": "math", "reward.api.temperature": "1",
    "reward.api.output": "text", "reward.api.scale": "0-5", "reward.api.rubric_calls": "each",
    "reward.api.compare": "list", "reward.api.monitor.key_env": "KEY",
    "reward.api.monitor.base_url": "http://host/v1", "reward.api.local.devices": "[1]",
    "rollout.engine_kwargs.vllm": "{a: 1}", "model.share_prompts": "true",
    "model.spread_weights": "true",
    "model.float32_matmul": "blas", "actor.fsdp_config.reshard_after_forward": "false",
    "critic.fsdp_config.reshard_after_forward": "false",
    "reward.function_kwargs": "{a: 1}", "reward.function": "f.py", "reward.rule": "exact",
    "reward.model.path": "rm", "reward.model.dtype": "bfloat16", "reward.model.device": "cpu",
    "reward.model.outputs": "[1, 2]", "reward.model.revision": "main",
    "reward.model.model_name": "m", "reward.model.key_env": "RM_KEY", "reward.parts": "judge:1",
    "reward.composite.weights": "{judge: 1}", "reward.composite.parts": "{judge: 1}",
}  # fmt: skip


def changed(row: str) -> str:
    name = next(k for k in table() if k == row or k.startswith(row.removesuffix("*")))
    if row == "reward.api.*":
        return "reward.api.votes=3"
    if row == "reward.model.*":
        return "reward.model.self_test=off"
    if row == "reward.code.*":
        return "reward.code.score=share"
    if row == "critic.*":
        return "critic.optim.lr=0.003"
    default = table()[name].default
    if isinstance(default, bool):
        return f"{name}={str(not default).lower()}"
    return f"{name}={OTHER.get(name) or (default / 2 if isinstance(default, float) else 32)}"


@pytest.mark.parametrize("row", UNUSED)
def test_a_setting_without_effect_is_refused_or_noted(row: str) -> None:
    found = settle(*OFF.split(), *BESIDE.get(row, "").split(), changed(row))
    key, gpus = changed(row).partition("=")[0], int(row == "rollout.num_samplers")
    refused, noted = find_unused(found, gpus)
    (line,) = [*refused, *noted]
    assert line.startswith(f"override: {key} has no effect: ")
    assert bool(noted) == (key in OF_MEMORY_AND_SPEED)
    assert missing_parts(found, gpus=gpus) == refused
    preset = replace(found, origins={**found.origins, key: "preset x line 1"})
    assert missing_parts(preset, gpus=gpus) == []
    (note,) = remarks(preset, gpus=gpus)
    assert note.startswith("preset x line 1: ")
    file = replace(found, origins={**found.origins, key: "my.yaml line 1"})
    refused, noted = find_unused(file, gpus)
    assert (len(refused), len(noted)) == ((1, 0) if _absent(key) else (0, 1))


def _absent(key: str) -> bool:
    groups = [row for row in UNUSED if row.endswith("*") and key.startswith(row[:-1])]
    return UNUSED[key if key in UNUSED else max(groups, key=len)].absent


@pytest.mark.parametrize(
    "given",
    [
        f"{JUDGE} reward.api.monitor.model=m reward.api.monitor.share=0.5",
        f"{JUDGE} reward.api.monitor.labels=f.jsonl reward.api.monitor.labels_every=5",
        f"{JUDGE} reward.api.prompt_preset=math reward.api.system_prompt=x",
        f"{JUDGE} reward.api.prices=p.yaml reward.api.budget_usd=3",
        f"{JUDGE} reward.api.price_input=1 reward.api.price_output=2",
        f"{JUDGE} reward.api.temperature=0.5 reward.api.type=claude",
        f"{JUDGE} reward.api.hedge_after=5",
        "reward.timeout=3 reward.num_workers=4",
    ],
)
def test_what_a_judge_uses_is_taken(given: str) -> None:
    assert find_unused(settle(*given.split())) == ([], [])


def test_while_no_judge_scores_that_is_the_reason_given() -> None:
    (line,) = missing_parts(settle("reward.api.monitor.share=0.5"), gpus=0)
    assert "no LLM judge scores this run" in line


@pytest.mark.parametrize(
    ("given", "gpus", "said"),
    [
        ("trainer.n_gpus_per_node=0", 1, 'CUDA_VISIBLE_DEVICES=""'),
        ("model.attn_implementation=flash_attention_2", 1, "Use sdpa"),
    ],
)
def test_what_cannot_be_honoured_is_told(given: str, gpus: int, said: str) -> None:
    (line,) = missing_parts(settle(given), gpus=gpus)
    assert said in line


def test_a_warmup_as_long_as_the_run_is_a_clash() -> None:
    with pytest.raises(ConfigError, match="never lets the actor train"):
        settle("trainer.critic_warmup=3", "trainer.total_training_steps=3")


def test_a_dump_masks_secrets_of_a_function() -> None:
    text = config_yaml(
        settle("reward.function_kwargs.api_key=hush1", "reward.function_kwargs.max_tokens=77")
    )
    assert "hush1" not in text and "77" in text
