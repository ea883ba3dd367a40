"""What a setting comes to when others stand in for it: small pure functions, one home each."""

from __future__ import annotations

from ppo_cli.config.schema import Config
from ppo_cli.config.training import Actor

GROUPED = frozenset({"grpo", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo"})


def clip_low(actor: Actor) -> float:
    """Return the lower clip range: clip_ratio unless clip_ratio_low is set."""
    return actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low


def clip_high(actor: Actor) -> float:
    """Return the upper clip range: clip_ratio unless clip_ratio_high is set."""
    return actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high


def critic_mini_batch(config: Config) -> int:
    """Return the prompts in a critic mini-batch: the actor's unless set."""
    own = config.critic.ppo_mini_batch_size
    return config.actor.ppo_mini_batch_size if own is None else own


def critic_path(config: Config) -> str:
    """Return the critic's backbone: the actor's model unless set."""
    return config.critic.model.path or config.model.path


def uses_critic(config: Config) -> bool:
    """Tell whether a critic is trained; only gae needs one."""
    return config.algorithm.adv_estimator == "gae"


def uses_reference(config: Config) -> bool:
    """Tell whether a reference policy is needed, in the reward or in the loss."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def sampler_seed(config: Config) -> int:
    """Return the sampler's seed: the run's unless set."""
    return config.trainer.seed if config.rollout.seed is None else config.rollout.seed


def learner_ranks(config: Config) -> int:
    """Return how many processes share a mini-batch; unset, one GPU is used."""
    if config.trainer.num_workers:
        return config.trainer.num_workers
    return max(1, config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes
