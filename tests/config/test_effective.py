"""What a setting comes to when others stand in for it, where each has its effect, and limits."""

from __future__ import annotations

import pytest

from ppo_cli.config import derived, placement
from ppo_cli.config.checks.unused import find_unused
from ppo_cli.config.schema.algorithm import Actor
from ppo_cli.config.schema.run import Config
from tests.config.settling import problems, settle

RAY = "trainer.engine=ray"
LORA = "model.lora_rank=8"


def config_of(overrides: str) -> Config:
    return settle(*overrides.split()).config


def test_one_setting_stands_in_for_another_only_while_that_is_unset() -> None:
    wrong = [
        (overrides, function, value)
        for overrides, function, expected in [
            ("actor.clip_ratio=0.3", Actor.lower_clip.fget, 0.3),
            ("actor.clip_ratio=0.3", Actor.upper_clip.fget, 0.3),
            ("actor.clip_ratio=0.3 actor.clip_ratio_low=0.1", Actor.lower_clip.fget, 0.1),
            ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3", Actor.lower_clip.fget, 0.1),
            ("actor.clip_ratio=0.1 actor.clip_ratio_high=0.3", Actor.upper_clip.fget, 0.3),
            ("data.train_batch_size=12 actor.ppo_mini_batch_size=6", derived.critic_mini_batch, 6),
            (
                "data.train_batch_size=12 actor.ppo_mini_batch_size=6 critic.ppo_mini_batch_size=3",
                derived.critic_mini_batch, 3,
            ),
            ("model.path=a/b", derived.critic_path, "a/b"),
            ("model.path=a/b critic.model.path=c/d", derived.critic_path, "c/d"),
            ("trainer.seed=7", derived.sampler_seed, 7),
            ("trainer.seed=7 rollout.seed=0", derived.sampler_seed, 0),
            ("", derived.rollout_is, None),
            ("trainer.async_steps=1", derived.rollout_is, "token"),
            (
                "trainer.async_steps=1 algorithm.rollout_correction.rollout_is=sequence",
                derived.rollout_is, "sequence",
            ),
            ("algorithm.rollout_correction.rollout_is=sequence", derived.rollout_is, "sequence"),
            ("actor.use_kl_loss=true", derived.uses_reference, True),
            ("algorithm.use_kl_in_reward=true", derived.uses_reference, True),
            ("algorithm.use_kl_in_reward=false", derived.uses_reference, False),
        ]
        for config in [config_of(overrides)]
        for value in [function(config.actor if "clip" in overrides else config)]
        if value != expected
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize(
    ("overrides", "gpus", "engine", "sampler", "trains", "ranks"),
    [
        ("", 0, "local", "hf", 1, 1),
        ("", 8, "local", "hf", 1, 1),
        ("trainer.engine=ray", 0, "ray", "hf", 1, 1),
        ("trainer.engine=local trainer.nnodes=1", 8, "local", "hf", 1, 1),
        ("trainer.n_gpus_per_node=4", 8, "ray", "hf", 4, 4),
        ("trainer.n_gpus_per_node=1", 8, "local", "hf", 1, 1),
        ("trainer.num_workers=3", 0, "ray", "hf", 3, 3),
        ("trainer.num_workers=3", 8, "ray", "hf", 3, 3),
        ("trainer.num_workers=1", 0, "local", "hf", 1, 1),
        ("trainer.nnodes=2", 0, "ray", "hf", 2, 2),
        ("trainer.nnodes=2", 8, "ray", "hf", 2, 2),
        ("rollout.num_samplers=2", 0, "ray", "hf", 1, 1),
        ("rollout.num_samplers=1", 0, "local", "hf", 1, 1),
        ("rollout.num_samplers=2", 1, "local", "hf", 1, 1),
        ("rollout.name=hf", 1, "local", "hf", 1, 1),
        ("rollout.name=vllm", 0, "ray", "vllm", 1, 1),
        ("trainer.placement=train:0,rollout:1", 0, "ray", "hf", 1, 1),
        ("trainer.async_steps=1", 0, "ray", "hf", 1, 1),
        ("rollout.name=vllm", 8, "ray", "vllm", 1, 1),
        ("rollout.name=hf trainer.n_gpus_per_node=2", 8, "ray", "hf", 2, 2),
        ("trainer.async_steps=1 trainer.n_gpus_per_node=8", 8, "ray", "hf", 6, 6),
        ("trainer.async_steps=1 trainer.n_gpus_per_node=4", 4, "ray", "hf", 3, 3),
        ("trainer.async_steps=1 trainer.n_gpus_per_node=2", 2, "ray", "hf", 1, 1),
        ("trainer.tensor_parallel_size=2", 8, "ray", "hf", 2, 1),
        ("trainer.tensor_parallel_size=2 trainer.n_gpus_per_node=8", 8, "ray", "hf", 8, 4),
        ("rollout.tensor_model_parallel_size=4", 8, "ray", "hf", 4, 4),
        # 8 - 2 would be no whole number of splits of 4 GPUs, so 4 are set apart.
        (
            "trainer.async_steps=1 trainer.n_gpus_per_node=8 trainer.tensor_parallel_size=4",
            8, "ray", "hf", 4, 1,
        ),
        (
            "trainer.async_steps=1 trainer.n_gpus_per_node=8 actor.fsdp_config.fsdp_size=4",
            8, "ray", "hf", 4, 4,
        ),
    ],
)  # fmt: skip
def test_where_the_work_runs_and_on_how_many_devices(
    overrides: str, gpus: int, engine: str, sampler: str, trains: int, ranks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(placement, "has_package", lambda name: False)
    config = Config.model_validate(_nested(overrides))
    assert placement.engine_name(config, gpus) == engine
    assert placement.sampler_name(config, gpus) == sampler
    assert placement.train_devices(config, gpus) == tuple(range(trains))
    assert (placement.learner_ranks(config, gpus), placement.data_ranks(config, gpus)) == (
        trains,
        ranks,
    )
    monkeypatch.setattr(placement, "has_package", lambda name: name == "vllm")
    on_gpus = engine == "ray" and gpus > 0 and "num_workers" not in overrides
    usual = "vllm" if on_gpus and "rollout.name=hf" not in overrides else sampler
    assert placement.sampler_name(config, gpus) == usual


def _nested(overrides: str) -> dict[str, object]:
    """Settings as the schema takes them, whatever this machine has."""
    tree: dict[str, object] = {}
    for text in overrides.split():
        name, _, raw = text.partition("=")
        *groups, last = name.split(".")
        place: dict[str, object] = tree
        for group in groups:
            place = place.setdefault(group, {})  # type: ignore[assignment]
        place[last] = {"true": True, "false": False}.get(raw, int(raw) if raw.isdigit() else raw)
    return tree


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


# What is just refused, and what is just taken.
EDGES = [
    ("data.train_batch_size=8 actor.ppo_mini_batch_size=9",
     "data.train_batch_size=8 actor.ppo_mini_batch_size=8"),
    ("actor.clip_ratio_low=0.21", "actor.clip_ratio_low=0.2"),
    ("actor.clip_ratio=0.5 actor.clip_ratio_c=1.5", "actor.clip_ratio=0.5 actor.clip_ratio_c=1.6"),
    ("critic.loss_scale_factor=2",
     "critic.loss_scale_factor=2 critic.loss_agg_mode=seq-mean-token-sum-norm"),
    ("actor.optim.min_lr_ratio=0.1",
     "actor.optim.min_lr_ratio=0.1 actor.optim.lr_scheduler_type=cosine"),
    *[(f"{who}.optim.betas={wrong}", f"{who}.optim.betas=[0,0.5]")
      for who in ("actor", "critic")
      for wrong in ("[1.0,0.9]", "[0.9,1.0]", "[-0.1,0.9]", "[0.9,-0.1]")],
    ("trainer.critic_warmup=3 trainer.total_training_steps=3",
     "trainer.critic_warmup=2 trainer.total_training_steps=3"),
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
        assert len(problems(*refused.split())) == 1, refused
        settle(*accepted.split())
