"""Settings that would change nothing are refused where typed, and noted where a preset has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppo_cli.config.checks.runner import missing_parts, remarks
from ppo_cli.config.checks.unused import UNUSED, find_unused
from ppo_cli.config.plan import config_yaml
from ppo_cli.config.schema.keys import table
from ppo_cli.errors import ConfigError
from tests.config.settling import settle

OFF = "algorithm.adv_estimator=rloo rollout.n=2 algorithm.use_kl_in_reward=false data.val_files=[]"
JUDGE = "reward.api.enable=true reward.api.model=m"
DECISION = f"{JUDGE} reward.api.mode=decision reward.api.type=openai"
# What else must be set for a condition to apply, as well as OFF.
NEEDED = {
    **dict.fromkeys(("no_monitor", "no_labels", "judge_elsewhere", "no_rule"), JUDGE),
    **dict.fromkeys(("no_rubric", "no_comparison"), JUDGE),
    **dict.fromkeys(("decision_endpoint", "fixed_output"), DECISION),
    **dict.fromkeys(
        ("every_rule_its_own", "every_model_its_own"), "reward.parts=[judge:1] reward.api.model=m"
    ),
    "own_judge_prompt": f"{JUDGE} reward.api.scoring_prompt=x",
    "fixed_scale": f"{JUDGE} reward.api.rubric=extra_info.r",
    "not_in_pairs": f"{JUDGE} reward.api.mode=compare reward.api.compare=list",
    "own_prices": f"{JUDGE} reward.api.price_input=1 reward.api.price_output=2",
    "hedge_after_timeout": f"{JUDGE} reward.api.timeout=32",
    "nothing_to_share": "model.packing=false",
    "nothing_in_float32": "model.dtype=bfloat16",
    "nothing_to_spread": "model.dtype=float32",
    "no_dual_clip": "actor.policy_loss.loss_mode=cispo",
    "no_clip": "actor.policy_loss.loss_mode=gpg",
    "model_is_served": "reward.model.path=http://h",
    "model_is_local": "reward.model.path=a/b",
    "no_code": "reward.rule=exact",
    "mixture_off": "reward.composite.enable=false",
}
# One setting of each section that a condition covers as a whole.
OF_SECTIONS = (
    "reward.api.votes", "reward.model.self_test", "reward.code.score", "critic.optim.lr",
    "reward.api.local.devices", "algorithm.lam", "algorithm.whiten_advantages",
)  # fmt: skip
SECTIONS = {"no_judge", "no_reward_model", "no_code", "no_critic", "judge_elsewhere"}
ROWS = [
    name
    for name, key in table().items()
    if name in OF_SECTIONS or (key.unused and key.unused[0] not in SECTIONS)
]
OTHER = {
    "reward.model.self_test": "off", "reward.code.score": "share",
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


def changed(name: str) -> str:
    default = table()[name].default
    if isinstance(default, bool):
        return f"{name}={str(not default).lower()}"
    return f"{name}={OTHER.get(name) or (default / 2 if isinstance(default, float) else 32)}"


@pytest.mark.parametrize("key", ROWS)
def test_a_setting_without_effect_is_refused_or_noted(key: str) -> None:
    condition = table()[key].unused[0]
    reason = UNUSED[condition]
    resolved = settle(*OFF.split(), *NEEDED.get(condition, "").split(), changed(key))
    gpus = int(condition == "on_gpus")
    refused, remarked = find_unused(resolved, gpus)
    (line,) = [*refused, *remarked]
    assert line == f"override: {key} has no effect: {reason.text}."
    assert bool(remarked) == reason.tuning
    assert missing_parts(resolved, gpus=gpus) == refused
    preset = replace(resolved, origins={**resolved.origins, key: "preset x line 1"})
    assert missing_parts(preset, gpus=gpus) == []
    (note,) = remarks(preset, gpus=gpus)
    assert note.startswith("preset x line 1: ")
    file = replace(resolved, origins={**resolved.origins, key: "my.yaml line 1"})
    refused, remarked = find_unused(file, gpus)
    assert (len(refused), len(remarked)) == ((1, 0) if reason.absent else (0, 1))


def test_every_condition_belongs_to_a_setting() -> None:
    assert {name for key in table().values() for name in key.unused} == set(UNUSED)
    assert {name for name, reason in UNUSED.items() if reason.tuning} == {
        "hf_sampler", "nothing_sharded", "nothing_to_share", "nothing_in_float32",
        "nothing_to_spread", "nothing_to_offload", "no_workers",
    }  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
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
def test_what_a_judge_uses_is_taken(overrides: str) -> None:
    assert find_unused(settle(*overrides.split())) == ([], [])


def test_while_no_judge_scores_that_is_the_reason_given() -> None:
    (line,) = missing_parts(settle("reward.api.monitor.share=0.5"), gpus=0)
    assert "no LLM judge scores this run" in line


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        ("trainer.n_gpus_per_node=0", 1, 'CUDA_VISIBLE_DEVICES=""'),
        ("model.attn_implementation=flash_attention_2", 1, "Use sdpa"),
    ],
)
def test_what_cannot_be_honoured_is_told(overrides: str, gpus: int, message: str) -> None:
    (line,) = missing_parts(settle(overrides), gpus=gpus)
    assert message in line


def test_a_warmup_as_long_as_the_run_is_a_clash() -> None:
    with pytest.raises(ConfigError, match="leaves no step to train the actor"):
        settle("trainer.critic_warmup=3", "trainer.total_training_steps=3")


def test_a_dump_masks_secrets_of_a_function() -> None:
    text = config_yaml(
        settle("reward.function_kwargs.api_key=hush1", "reward.function_kwargs.max_tokens=77")
    )
    assert "hush1" not in text and "77" in text
