"""What a setting comes to when others stand in for it, where each has its effect, and limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppo_cli.config import derived
from ppo_cli.config.checks.unused import find_unused
from ppo_cli.config.schema.run import Config
from tests.config.settling import problems, settle, unchecked

RAY = "trainer.engine=ray"
LORA = "model.lora_rank=8"
LEVEL = "algorithm.rollout_correction.rollout_is=sequence"


# Settings, and a value that follows from them.
DERIVED: list[tuple[str, Callable[[Config], object], object]] = [
    ("actor.clip_ratio=0.3", lambda c: (c.actor.lower_clip, c.actor.upper_clip), (0.3, 0.3)),
    ("actor.clip_ratio=0.3 actor.clip_ratio_low=0.1", lambda c: c.actor.lower_clip, 0.1),
    ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3",
     lambda c: (c.actor.lower_clip, c.actor.upper_clip), (0.1, 0.3)),
    ("actor.ppo_mini_batch_size=6", derived.critic_mini_batch, 6),
    ("critic.ppo_mini_batch_size=3", derived.critic_mini_batch, 3),
    ("model.path=a/b", derived.critic_path, "a/b"),
    ("model.path=a/b critic.model.path=c/d", derived.critic_path, "c/d"),
    ("trainer.seed=7", derived.sampler_seed, 7),
    ("trainer.seed=7 rollout.seed=0", derived.sampler_seed, 0),
    ("", derived.rollout_is, None),
    ("trainer.async_steps=1", derived.rollout_is, "token"),
    (f"trainer.async_steps=1 {LEVEL}", derived.rollout_is, "sequence"),
    (LEVEL, derived.rollout_is, "sequence"),
    ("actor.use_kl_loss=true algorithm.use_kl_in_reward=false", derived.uses_reference, True),
    ("algorithm.use_kl_in_reward=true", derived.uses_reference, True),
    ("algorithm.use_kl_in_reward=false", derived.uses_reference, False),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "function", "value"), DERIVED)
def test_one_setting_stands_in_for_another_only_while_that_is_unset(
    overrides: str, function: Callable[[Config], object], value: object
) -> None:
    assert function(unchecked(overrides)) == value


TAKEN = [
    ("algorithm.lam=0.5 algorithm.whiten_advantages=false critic.optim.lr=0.003", 0),
    ("algorithm.adv_estimator=grpo rollout.n=2 algorithm.norm_adv_by_std_in_grpo=false", 0),
    ("algorithm.kl_penalty=k3 algorithm.kl_ctrl.kl_coef=0.02", 0),
    ("algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.horizon=7 algorithm.kl_ctrl.target_kl=0.2",
     0),
    ("actor.use_kl_loss=true actor.kl_loss_coef=0.02 actor.kl_loss_type=k1 ref.path=a/b", 0),
    ("ref.path=a/b", 0),
    (f"{LORA} model.lora_alpha=32 model.target_modules=q_proj", 0),
    ("critic.model.lora_rank=4 critic.model.lora_alpha=8 critic.model.target_modules=q_proj", 0),
    (f"{RAY} {LORA} model.lora_merge=true trainer.max_restarts=5 trainer.worker_timeout=99", 0),
    (f"{RAY} actor.fsdp_config.param_offload=true ref.param_offload=true", 0),
    (f"{RAY} critic.fsdp_config.optimizer_offload=true actor.fsdp_config.fsdp_size=1", 0),
    ("actor.fsdp_config.param_offload=true ref.param_offload=true", 1),
    ("rollout.num_samplers=2", 0),
    ("rollout.name=vllm rollout.gpu_memory_utilization=0.3 rollout.enforce_eager=true", 1),
    ("trainer.nnodes=2 trainer.master_addr=host trainer.master_port=2000 trainer.node_rank=1", 0),
    ("algorithm.rollout_correction.rollout_is=token "
     "algorithm.rollout_correction.rollout_is_threshold=3", 0),
    ("algorithm.rollout_correction.rollout_is=sequence "
     "algorithm.rollout_correction.rollout_is_batch_normalize=true", 0),
    ("data.val_files=x.jsonl data.val_max_samples=3", 0),
]  # fmt: skip
# One that is not enough: the setting, and why it still changes nothing.
IDLE = [
    ("algorithm.kl_ctrl.horizon=7", "algorithm.kl_ctrl.horizon"),
    (f"{LORA} model.lora_merge=true", "model.lora_merge"),
    (f"{RAY} model.lora_merge=true", "model.lora_merge"),
    (f"{LORA} critic.model.lora_alpha=8", "critic.model.lora_alpha"),
    ("actor.use_kl_loss=true algorithm.kl_ctrl.kl_coef=0.02", "algorithm.kl_ctrl.kl_coef"),
    ("algorithm.use_kl_in_reward=false ref.path=a/b", "ref.path"),
]


def test_a_setting_is_taken_where_it_has_its_effect_and_nowhere_else() -> None:
    wrong = {overrides: find_unused(settle(*overrides.split()), gpus) for overrides, gpus in TAKEN}
    assert {overrides: unused for overrides, unused in wrong.items() if unused != ([], [])} == {}
    for overrides, key in IDLE:
        refused, _ = find_unused(settle(*overrides.split()), 0)
        assert [line.split()[1] for line in refused] == [key], overrides


# What is just refused, and what is just taken, where a declared conflict does not show the edge.
EDGES = [
    ("data.train_batch_size=8 actor.ppo_mini_batch_size=9",
     "data.train_batch_size=8 actor.ppo_mini_batch_size=8"),
    ("actor.clip_ratio_low=0.21", "actor.clip_ratio_low=0.2"),
    ("actor.clip_ratio=0.5 actor.clip_ratio_c=1.5", "actor.clip_ratio=0.5 actor.clip_ratio_c=1.6"),
    *[(f"{who}.optim.betas={wrong}", f"{who}.optim.betas=[0,0.5]")
      for who in ("actor", "critic")
      for wrong in ("[1.0,0.9]", "[0.9,1.0]", "[-0.1,0.9]", "[0.9,-0.1]")],
    ("trainer.save_freq=0", "trainer.save_freq=-1"),
    ("trainer.test_freq=0", "trainer.test_freq=1"),
    ("trainer.patience=2 data.val_files=x trainer.test_freq=-1",
     "trainer.patience=2 data.val_files=x trainer.test_freq=1"),
    ("data.train_max_samples=0", "data.train_max_samples=1"),
    ("data.max_response_length=32 reward.shaping.overlong_buffer=33",
     "data.max_response_length=32 reward.shaping.overlong_buffer=32"),
    *[(f"trainer.profile_steps={wrong}", f"trainer.profile_steps={right}")
      for wrong, right in (("0", "1"), ("3-2", "2-2"), ("x", "2-3"), ("2-x", "10-11"), ("-3", "3"),
                           ("2-", "2"), ("0-1", "1-2"), ("²", "12"))],
]  # fmt: skip


def test_what_clashes_is_refused_up_to_its_edge_and_no_further() -> None:
    for refused, accepted in EDGES:
        assert (len(problems(*refused.split())), problems(*accepted.split())) == (1, ()), refused
