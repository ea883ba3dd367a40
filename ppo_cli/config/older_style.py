"""The older YAML style: algorithm.learning_rate, ppo.*, training.*, distributed.*."""

from __future__ import annotations

from typing import Final

# In that style one number served actor and critic; here each has its own.
RENAMED: Final[dict[str, tuple[str, ...]]] = {
    "algorithm.learning_rate": ("actor.optim.lr",),
    "algorithm.batch_size": ("data.train_batch_size",),
    "algorithm.mini_batch_size": ("actor.ppo_mini_batch_size",),
    "algorithm.epochs": ("actor.ppo_epochs", "critic.ppo_epochs"),
    "algorithm.clip_range": ("actor.clip_ratio",),
    "algorithm.value_loss_coef": ("critic.value_loss_coef",),
    "algorithm.entropy_coef": ("actor.entropy_coeff",),
    "algorithm.max_grad_norm": ("actor.grad_clip", "critic.grad_clip"),
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
    "distributed.tensor_parallel_size": ("rollout.tensor_model_parallel_size",),
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
    "distributed.tensor_parallel_size": "it is the sampler's; see --tensor_parallel_size",
}
