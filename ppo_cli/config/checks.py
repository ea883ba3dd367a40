"""What no single setting can tell: settings that clash, each with its mend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.derived import (
    clip_high,
    clip_low,
    critic_mini_batch,
    gpu_count,
    uses_critic,
)
from ppo_cli.config.device_checks import cluster_clashes
from ppo_cli.config.judge_checks import judge_clashes
from ppo_cli.config.keys import Clash
from ppo_cli.config.mixture import has_mixture
from ppo_cli.config.mixture_checks import mixture_clashes
from ppo_cli.config.model_checks import head_clashes, model_clashes
from ppo_cli.config.schema import Config


def cross_checks(config: Config, environ: Mapping[str, str]) -> list[Clash]:
    """Return every clash between settings."""
    return [
        *_batches(config),
        *_estimator(config),
        *_clips(config),
        *_losses(config),
        *_kl(config),
        *cluster_clashes(config, gpu_count(environ)),
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
            yield Clash(
                keys,
                f"data.train_batch_size {batch} is not divisible by {key} {size}. "
                f"Use a mini-batch of {_divisor(batch, size)}, or a batch of "
                f"{batch - batch % size}.",
            )


def _divisor(batch: int, size: int) -> int:
    return next(n for n in range(size, 0, -1) if batch % n == 0)


def _estimator(config: Config) -> Iterator[Clash]:
    name = config.algorithm.adv_estimator
    if ESTIMATORS[name].grouped and config.rollout.n < 2:
        yield Clash(
            ("algorithm.adv_estimator", "rollout.n"),
            f"the estimator {name} compares several responses to a prompt, but rollout.n is "
            f"{config.rollout.n}. Use --rollout_n 4, or --adv_estimator gae.",
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


def _clips(config: Config) -> Iterator[Clash]:
    actor = config.actor
    if clip_low(actor) > clip_high(actor):
        yield Clash(
            ("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the lower clip range {clip_low(actor):g} is above the upper one "
            f"{clip_high(actor):g}; swap actor.clip_ratio_low and actor.clip_ratio_high.",
        )
    if clip_high(actor) + 1 >= actor.clip_ratio_c:
        yield Clash(
            ("actor.clip_ratio_c", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the dual-clip bound actor.clip_ratio_c {actor.clip_ratio_c:g} lies inside the clip "
            f"range (1 + {clip_high(actor):g}); use 3, or a smaller range.",
        )


def _losses(config: Config) -> Iterator[Clash]:
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
        beta1, beta2 = part.optim.betas
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
            yield Clash(
                (f"{who}.optim.betas",),
                f"{who}.optim.betas must each be at least 0 and below 1, but are "
                f"{beta1:g} and {beta2:g}.",
            )


def _kl(config: Config) -> Iterator[Clash]:
    actor, algorithm = config.actor, config.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Clash(
            ("actor.use_kl_loss", "actor.kl_loss_coef"),
            "actor.use_kl_loss is on with weight 0; set actor.kl_loss_coef, or leave it off.",
        )
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
    for word in config.trainer.profile_steps:
        first, dash, last = word.partition("-")
        numbers = [first, last] if dash else [first]
        readable = all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers)
        if not readable or int(numbers[-1]) < int(first):
            yield Clash(
                ("trainer.profile_steps",),
                f"trainer.profile_steps {word!r} names no steps. Use a number from 1, a list (2,5) "
                "or a range (2-4): --profile 3.",
            )
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    if steps is not None and 0 < steps <= warmup:
        yield Clash(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup {warmup} never lets the actor train in {steps} step(s); use "
            f"{steps - 1} or less, or more --max_steps.",
        )
    freqs = {"save_freq": config.trainer.save_freq, "test_freq": config.trainer.test_freq}
    for key, freq in freqs.items():
        if freq == 0:
            yield Clash((f"trainer.{key}",), f"trainer.{key} 0 means nothing; use -1 or 1 and up.")
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
    if config.data.train_max_samples == 0:
        text = "data.train_max_samples 0 leaves no prompts; use -1 for all."
        yield Clash(("data.train_max_samples",), text)


def _reward(config: Config) -> Iterator[Clash]:
    reward = config.reward
    given = {
        "reward.api.enable": ("judge", reward.api.enable),
        "reward.model.path": ("model", reward.model.path is not None),
        "reward.function": ("rule", reward.function is not None),
        "reward.rule": (f"rule:{reward.rule}", reward.rule is not None),
    }
    keys = tuple(key for key, (_, there) in given.items() if there)
    if has_mixture(reward):
        if reward.function is not None and reward.rule is not None:
            yield Clash(
                ("reward.rule", "reward.function"),
                "reward.function and reward.rule each say how a part of kind rule scores; keep "
                f"one, and give the other a part of its own: --reward rule:{reward.rule}:0.2.",
            )
    elif len(keys) > 1:
        share = f"{1 / len(keys):.2g}"
        mix = " ".join(f"--reward {given[key][0]}:{share}" for key in keys)
        out = " without --rule" if keys[-2:] == ("reward.function", "reward.rule") else ""
        yield Clash(
            keys,
            f"{_listed(keys)} each say how every row is scored. Keep one, or mix them{out}: {mix}.",
        )


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _shaping(config: Config) -> Iterator[Clash]:
    buffer, longest = config.reward.shaping.overlong_buffer, config.data.max_response_length
    if buffer is not None and buffer >= longest:
        yield Clash(
            ("reward.shaping.overlong_buffer", "data.max_response_length"),
            f"reward.shaping.overlong_buffer {buffer} must be shorter than the longest response "
            f"({longest} tokens), or every response is penalised; use {max(1, longest // 4)}.",
        )
