"""The older YAML style: algorithm.learning_rate, ppo.*, training.*, distributed.*."""

from __future__ import annotations

from typing import Final

# In that style one number served actor and critic; here each has its own.
_OF_THE_UPDATE: Final[dict[str, tuple[str, ...]]] = {
    "learning_rate": ("actor.optim.lr",),
    "batch_size": ("data.train_batch_size",),
    "mini_batch_size": ("actor.ppo_mini_batch_size",),
    "epochs": ("actor.ppo_epochs", "critic.ppo_epochs"),
    "clip_range": ("actor.clip_ratio",),
    "value_loss_coef": ("critic.value_loss_coef",),
    "entropy_coef": ("actor.entropy_coeff",),
    "max_grad_norm": ("actor.grad_clip", "critic.grad_clip"),
}
RENAMED: Final[dict[str, tuple[str, ...]]] = {
    **{
        f"{group}.{name}": own
        for group in ("algorithm", "ppo")
        for name, own in _OF_THE_UPDATE.items()
    },
    "ppo.normalize_advantages": ("algorithm.whiten_advantages",),
    "ppo.advantage_estimator": ("algorithm.adv_estimator",),
    "ppo.gae_lambda": ("algorithm.lam",),
    "ppo.kl_target": ("algorithm.kl_ctrl.target_kl",),
    "ppo.kl_coef": ("algorithm.kl_ctrl.kl_coef",),
    "ppo.clip_grad_value": ("actor.clip_grad_value", "critic.clip_grad_value"),
    "training.gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "training.offload_optimizer": (
        "actor.fsdp_config.optimizer_offload",
        "critic.fsdp_config.optimizer_offload",
    ),
    "training.eval_steps": ("trainer.test_freq",),
    "trainer.eval_steps": ("trainer.test_freq",),
    "eval_steps": ("trainer.test_freq",),
    "distributed.tensor_parallel_size": ("trainer.tensor_parallel_size",),
    "distributed.pipeline_parallel_size": ("trainer.pipeline_parallel_size",),
    "composite_reward.*": ("reward.composite.*",),
}
SAME: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "algorithm.name": (
        ("ppo",),
        "this program trains with PPO; choose another estimator with algorithm.adv_estimator",
    ),
}
REMARKS: Final[dict[str, str]] = {
    "algorithm.learning_rate": "it sets the actor's; the critic has --critic_lr",
    "ppo.learning_rate": "it sets the actor's; the critic has --critic_lr",
    "distributed.tensor_parallel_size": "it splits what is trained; the sampler has --rollout_tp",
}
