"""Clashes between settings of the algorithm, the batches, the schedule and the reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.checks.devices import cluster_clashes
from ppo_cli.config.checks.models import head_clashes
from ppo_cli.config.checks.reward_models import model_clashes
from ppo_cli.config.checks.rewards import judge_clashes, mixture_clashes
from ppo_cli.config.derived import critic_mini_batch, lower_clip, upper_clip, uses_critic
from ppo_cli.config.mixture import has_mixture
from ppo_cli.config.placement import gpu_count
from ppo_cli.config.schema.keys import Clash
from ppo_cli.config.schema.run import Config


def cross_checks(config: Config, environ: Mapping[str, str], *, verl: bool) -> list[Clash]:
    """Return every clash between settings; `verl` takes what changes nothing in its lines."""
    return [
        *_batches(config),
        *_estimator(config),
        *_groups(config),
        *_clips(config),
        *_losses(config),
        *([] if verl else _kl(config)),
        *cluster_clashes(config, gpu_count(environ), environ),
        *head_clashes(config),
        *_schedule(config),
        *_reward(config),
        *_shaping(config),
        *mixture_clashes(config),
        *judge_clashes(config),
        *model_clashes(config, gpu_count(environ)),
    ]


def _batches(config: Config) -> Iterator[Clash]:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    sizes = [("actor.ppo_mini_batch_size", mini)]
    if uses_critic(config) and config.critic.ppo_mini_batch_size is not None:
        sizes.append(("critic.ppo_mini_batch_size", critic_mini_batch(config)))
    for key, size in sizes:
        keys = (key, "data.train_batch_size")
        if size > batch:
            yield Clash(
                keys,
                f"{key} {size} is larger than data.train_batch_size {batch}; a mini-batch is a "
                f"part of the batch. Use {batch} or less.",
            )
        elif batch % size:
            divisor = next(n for n in range(size, 0, -1) if batch % n == 0)
            yield Clash(
                keys,
                f"data.train_batch_size {batch} is not divisible by {key} {size}. "
                f"Use a mini-batch of {divisor}, or a batch of "
                f"{batch - batch % size}.",
            )


def _estimator(config: Config) -> Iterator[Clash]:
    name = config.algorithm.adv_estimator
    if ESTIMATORS[name].grouped and config.rollout.n < 2:
        yield Clash(
            ("algorithm.adv_estimator", "rollout.n"),
            f"the estimator {name} compares several responses to a prompt, but rollout.n is "
            f"{config.rollout.n}. Use --rollout_n 4, or --adv_estimator gae.",
        )
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if ESTIMATORS[name].parts:
        yield from _parts(config)
    elif keys or weights:
        yield Clash(
            ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
            f"parts of the reward are named for gdpo, but the estimator is {name}; use "
            "--adv_estimator gdpo, or leave them out.",
        )
    if name == "remax" and config.algorithm.gamma != 1.0:
        yield Clash(
            ("algorithm.gamma", "algorithm.adv_estimator"),
            f"remax knows no discount, but algorithm.gamma is {config.algorithm.gamma:g}. "
            "Use --gamma 1.",
        )
    if not uses_critic(config) and config.trainer.critic_warmup:
        yield Clash(
            ("trainer.critic_warmup", "algorithm.adv_estimator"),
            f"the estimator {name} trains no critic, so trainer.critic_warmup "
            f"{config.trainer.critic_warmup} would leave steps without any update. Use 0.",
        )


def _groups(config: Config) -> Iterator[Clash]:
    """What dynamic sampling needs."""
    groups, n = config.algorithm.filter_groups, config.rollout.n
    size, batch = config.data.gen_batch_size, config.data.train_batch_size
    switch = "algorithm.filter_groups.enable"
    if not groups.enable:
        if size is not None and size != batch:
            yield Clash(
                ("data.gen_batch_size", switch),
                f"data.gen_batch_size {size} is not data.train_batch_size {batch}, and only "
                f"dynamic sampling samples other prompts than it trains on: set {switch}=true, or "
                "leave it out.",
            )
        return
    if n < 2:
        yield Clash(
            (switch, "rollout.n"),
            f"{switch} compares several responses to a prompt, not {n}. Use --rollout_n 4.",
        )
    if config.trainer.async_steps:
        yield Clash(
            (switch, "trainer.async_steps"),
            f"{switch} waits for scores, so sampling cannot run ahead; leave --async_steps out.",
        )
    if groups.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield Clash(
            ("algorithm.filter_groups.metric", "algorithm.use_kl_in_reward"),
            "with the KL in the reward every seq_final_reward differs: use metric=seq_reward.",
        )


def _parts(config: Config) -> Iterator[Clash]:
    """What gdpo needs, and what it would not read: it takes the parts, not their total."""
    algorithm, shaping = config.algorithm, config.reward.shaping
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield Clash(
            ("algorithm.adv_estimator",),
            "gdpo needs the names of the parts of the reward: algorithm.gdpo_reward_keys=[a,b], as "
            "a reward function returns them beside score, or as the parts of a mixture are called.",
        )
    if weights and len(weights) != len(keys):
        yield Clash(
            ("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"),
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} parts.",
        )
    if algorithm.use_kl_in_reward:
        yield Clash(
            ("algorithm.use_kl_in_reward", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, and not the KL in it; use actor.use_kl_loss=true "
            "instead of algorithm.use_kl_in_reward.",
        )
    if shaping != type(shaping)():
        yield Clash(
            ("reward.shaping", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, and not what reward.shaping makes of their sum; "
            "leave reward.shaping out.",
        )


def _clips(config: Config) -> Iterator[Clash]:
    actor, kind = config.actor, config.actor.policy_loss.loss_mode
    if lower_clip(actor) >= 1 and kind not in ("cispo", "geo_mean"):
        yield Clash(
            ("actor.clip_ratio_low",),
            f"the lower clip range {lower_clip(actor):g} must be below 1.",
        )
    elif lower_clip(actor) > upper_clip(actor) and kind not in ("cispo", "geo_mean"):
        yield Clash(
            ("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the lower clip range {lower_clip(actor):g} is above the upper one "
            f"{upper_clip(actor):g}; swap actor.clip_ratio_low and actor.clip_ratio_high.",
        )
    bound = actor.clip_ratio_c if POLICY_LOSSES[kind].dual else None
    if bound is not None and upper_clip(actor) + 1 >= bound:
        yield Clash(
            ("actor.clip_ratio_c", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the dual-clip bound actor.clip_ratio_c {bound:g} lies inside the clip "
            f"range (1 + {upper_clip(actor):g}); use 3, or a smaller range.",
        )


def _losses(config: Config) -> Iterator[Clash]:
    chosen = config.actor.policy_loss
    if chosen.clip_cov_lb >= chosen.clip_cov_ub:
        yield Clash(
            ("actor.policy_loss.clip_cov_lb", "actor.policy_loss.clip_cov_ub"),
            f"actor.policy_loss.clip_cov_lb {chosen.clip_cov_lb:g} must be below clip_cov_ub "
            f"{chosen.clip_cov_ub:g}.",
        )
    for who, part in (("actor", config.actor), ("critic", config.critic)):
        if part.loss_scale_factor is not None and part.loss_agg_mode != "seq-mean-token-sum-norm":
            yield Clash(
                (f"{who}.loss_scale_factor", f"{who}.loss_agg_mode"),
                f"{who}.loss_scale_factor has a meaning only with {who}.loss_agg_mode="
                f"seq-mean-token-sum-norm, not with {part.loss_agg_mode}.",
            )
        if part.optim.lr_scheduler_type == "constant" and part.optim.min_lr_ratio:
            yield Clash(
                (f"{who}.optim.min_lr_ratio", f"{who}.optim.lr_scheduler_type"),
                f"{who}.optim.min_lr_ratio is the floor of the cosine; use it with "
                f"{who}.optim.lr_scheduler_type=cosine.",
            )


def _kl(config: Config) -> Iterator[Clash]:
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        if algorithm.kl_ctrl.kl_coef == 0:
            yield Clash(
                ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
                "an adaptive KL coefficient that starts at 0 stays there; use --kl_coef 0.001.",
            )
    elif algorithm.kl_ctrl.type == "adaptive":
        yield Clash(
            ("algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"),
            "the adaptive controller steers the KL in the reward, which is off; set "
            "algorithm.use_kl_in_reward=true.",
        )


def _schedule(config: Config) -> Iterator[Clash]:
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    if steps is not None and 0 < steps <= warmup:
        yield Clash(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup {warmup} never lets the actor train in {steps} step(s); use "
            f"{steps - 1} or less, or more --max_steps.",
        )
    if config.trainer.patience is not None and config.trainer.test_freq < 1:
        yield Clash(
            ("trainer.patience", "trainer.test_freq"),
            "--patience counts validations, but there are none on the way; set --test_freq 10.",
        )
    if config.trainer.patience is not None and not config.data.val_files:
        yield Clash(
            ("trainer.patience", "data.val_files"),
            "--patience watches validation, but there are no validation prompts: --val_files FILE.",
        )


def _reward(config: Config) -> Iterator[Clash]:
    reward = config.reward
    sources = {
        "reward.api.enable": ("judge", reward.api.enable),
        "reward.model.path": ("model", reward.model.path is not None),
        "reward.function": ("rule", reward.function is not None),
        "reward.rule": (f"rule:{reward.rule}", reward.rule is not None),
    }
    keys = tuple(key for key, (_, is_set) in sources.items() if is_set)
    if has_mixture(reward):
        if reward.function is not None and reward.rule is not None:
            yield Clash(
                ("reward.rule", "reward.function"),
                "reward.function and reward.rule each say how a part of kind rule scores; keep "
                f"one, and give the other a part of its own: --reward rule:{reward.rule}:0.2.",
            )
    elif len(keys) > 1:
        share = f"{1 / len(keys):.2g}"
        mix = " ".join(f"--reward {sources[key][0]}:{share}" for key in keys)
        out = " without --rule" if keys[-2:] == ("reward.function", "reward.rule") else ""
        yield Clash(
            keys,
            f"{', '.join(keys[:-1])} and {keys[-1]} each say how every row is scored. Keep one, or "
            f"mix them{out}: {mix}.",
        )


def _shaping(config: Config) -> Iterator[Clash]:
    buffer, longest = config.reward.shaping.overlong_buffer, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield Clash(
            ("reward.shaping.overlong_buffer", "data.max_response_length"),
            f"reward.shaping.overlong_buffer {buffer} is longer than the longest response "
            f"({longest} tokens), so no response is without a penalty; use {max(1, longest // 4)}.",
        )
