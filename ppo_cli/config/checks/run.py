"""Checks of the algorithm, batches, schedule and reward, and of settings that are not offered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.derived import (
    critic_mini_batch,
    lower_clip,
    rejections,
    upper_clip,
    uses_critic,
    why_recompute_logprobs,
)
from ppo_cli.config.layers import DEFAULT, Resolved
from ppo_cli.config.mixture import has_mixture
from ppo_cli.config.schema.keys import Clash, table, value_of
from ppo_cli.config.schema.run import Config


def range_remarks(resolved: Resolved) -> Iterator[str]:
    """Remark on values far from what usually works; presets and defaults were tried."""
    kind = resolved.config.actor.policy_loss.loss_mode
    for name, key in table().items():
        value, origin = value_of(resolved.config, name), resolved.origins[name]
        if key.usual is None or value is None or origin.startswith((DEFAULT, "preset ", "verl ")):
            continue
        if name.startswith("actor.clip_ratio") and kind != "vanilla":
            continue  # ratios of sequences, and weights, are clipped elsewhere
        low, high = key.usual
        if not low <= value <= high:
            yield f"{origin}: {name} {value:g} is far from what is usual: {low:g} to {high:g}."


def kl_remarks(config: Config) -> Iterator[str]:
    """Remark on a KL that counts twice or has no weight."""
    if config.actor.use_kl_loss and config.actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is on with weight 0: the KL to the reference is only reported."
        return
    if config.algorithm.use_kl_in_reward and config.actor.use_kl_loss:
        yield (
            "The KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward, "
            f"weight {config.algorithm.kl_ctrl.kl_coef:g}) and in the loss (actor.use_kl_loss, "
            f"weight {config.actor.kl_loss_coef:g}). Usually one of them is enough."
        )


def gspo_remarks(config: Config) -> Iterator[str]:
    """Remark on settings that differ from GSPO's paper (arXiv 2507.18071)."""
    actor, mode = config.actor, config.actor.loss_agg_mode
    if actor.policy_loss.loss_mode != "gspo":
        return
    # Clip ranges, then the aggregation of the loss.
    if (actor.clip_ratio_high or actor.clip_ratio) > 0.05:
        yield (
            "GSPO's ratio is a mean over the sequence and stays near 1, so wide ranges rarely "
            "clip. Its paper has actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4."
        )
    if mode.startswith("token-"):
        yield (
            f"GSPO counts each sequence once; with actor.loss_agg_mode {mode} a long one counts "
            "more. Its paper has actor.loss_agg_mode=seq-mean-token-mean."
        )


def verl_remarks(resolved: Resolved) -> Iterator[str]:
    """Remark on what verl does differently, or not at all, with the same settings."""
    config, origins = resolved.config, resolved.origins
    if config.trainer.save_freq == -1:
        yield "trainer.save_freq -1: verl would save nothing; here the end of the run is saved."
    if config.trainer.test_freq == -1 and config.data.val_files:
        yield "trainer.test_freq -1: verl would not validate at the end; here it is done."
    # clip_ratio_low and clip_ratio_high of verl's defaults win over a set clip_ratio.
    is_chosen = not origins["actor.clip_ratio"].startswith((DEFAULT, "preset "))
    clips = [origins[f"actor.clip_ratio_{side}"] for side in ("low", "high")]
    if is_chosen and all(origin.startswith("verl ") for origin in clips):
        yield (
            f"actor.clip_ratio {config.actor.clip_ratio:g} changes nothing, as in verl: "
            "actor.clip_ratio_low and actor.clip_ratio_high are 0.2 there; set these."
        )


# Argument of vLLM -> the setting that it follows from; None: the program chooses it.
VLLM_ARGUMENTS: Final = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "rollout.seed",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    **{
        name: f"rollout.{name}"
        for name in (
            "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
            "enable_prefix_caching",
        )
    },
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "model.lora_rank"),
    **dict.fromkeys(
        (
            "skip_tokenizer_init", "generation_config", "distributed_executor_backend",
            "enable_sleep_mode", "disable_log_stats", "use_tqdm_on_load", "load_format",
            "worker_extension_cls", "weight_transfer_config", "logprobs_mode",
        ),
    ),
}  # fmt: skip


def unsupported_settings(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that no machine can honour."""
    # Arguments of vLLM that the program sets itself.
    for name in config.rollout.engine_kwargs.vllm.keys() & VLLM_ARGUMENTS.keys():
        setting_name = VLLM_ARGUMENTS[name]
        use = "leave it out" if setting_name is None else f"set {setting_name} instead"
        yield f"rollout.engine_kwargs.vllm.{name}: the program chooses it for vLLM; {use}."
    # Settings of the rollout correction that contradict each other.
    try:
        rejections(config)
    except ValueError as error:
        yield str(error)
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and (why := why_recompute_logprobs(config)):
        yield (
            "algorithm.rollout_correction.bypass_mode: the actor must compute old log-probs, as "
            f"{why}; leave it out."
        )
    if (correction.rollout_is_threshold_lower or 0.0) > correction.rollout_is_threshold:
        yield (
            "algorithm.rollout_correction.rollout_is_threshold_lower "
            f"{correction.rollout_is_threshold_lower:g} is above rollout_is_threshold "
            f"{correction.rollout_is_threshold:g}; swap them."
        )
    # The verl engine is another program, which only `ppo train` starts.
    if config.trainer.engine == "verl":
        yield (
            "The engine 'verl' trains only by a line that names it: `ppo train --engine verl`. Use "
            "--engine ray, or --engine local for one process."
        )
    if config.model.attn_implementation == "flash_attention_2":
        yield (
            "model.attn_implementation flash_attention_2 cannot be used: it needs half-precision "
            "weights, and weights are kept in float32. Use sdpa."
        )


def check_batches(config: Config) -> Iterator[Clash]:
    """A mini-batch must divide the batch; the critic's only when it is set separately."""
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    # The critic's size follows the actor's unless it is set, so only a set one is checked.
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


def check_estimator(config: Config) -> Iterator[Clash]:
    """Yield clashes with what the advantage estimator needs.

    That is: groups, parts of the reward, no discount, no warm-up of the critic.
    """
    name = config.algorithm.adv_estimator
    # Groups of at least two responses.
    if ESTIMATORS[name].grouped and config.rollout.n < 2:
        yield Clash(
            ("algorithm.adv_estimator", "rollout.n"),
            f"the estimator {name} compares several responses to a prompt, but rollout.n is "
            f"{config.rollout.n}. Use --rollout_n 4, or --adv_estimator gae.",
        )
    # Parts of the reward.
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if ESTIMATORS[name].parts:
        yield from _check_gdpo(config)
    elif keys or weights:
        yield Clash(
            ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
            f"parts of the reward are only read by gdpo, but the estimator is {name}; use "
            "--adv_estimator gdpo, or leave them out.",
        )
    # Discount and critic.
    if name == "remax" and config.algorithm.gamma != 1.0:
        yield Clash(
            ("algorithm.gamma", "algorithm.adv_estimator"),
            f"remax has no discount, but algorithm.gamma is {config.algorithm.gamma:g}. "
            "Use --gamma 1.",
        )
    if not uses_critic(config) and config.trainer.critic_warmup:
        yield Clash(
            ("trainer.critic_warmup", "algorithm.adv_estimator"),
            f"the estimator {name} trains no critic, so trainer.critic_warmup "
            f"{config.trainer.critic_warmup} would leave steps without any update. Use 0.",
        )


def check_dynamic_sampling(config: Config) -> Iterator[Clash]:
    """What dynamic sampling (algorithm.filter_groups) needs, and data.gen_batch_size without it."""
    groups, n = config.algorithm.filter_groups, config.rollout.n
    size, batch = config.data.gen_batch_size, config.data.train_batch_size
    switch = "algorithm.filter_groups.enable"
    # A generation batch is only for dynamic sampling.
    if not groups.enable:
        if size is not None and size != batch:
            yield Clash(
                ("data.gen_batch_size", switch),
                f"data.gen_batch_size {size} is not data.train_batch_size {batch}, and only "
                f"dynamic sampling samples other prompts than it trains on: set {switch}=true, or "
                "leave it out.",
            )
        return
    # Groups that can differ, scores before the next step, scores without noise from the KL.
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


def _check_gdpo(config: Config) -> Iterator[Clash]:
    """Yield clashes with what gdpo needs, and with settings that it ignores.

    It reads the parts of the reward, not their sum.
    """
    algorithm, shaping = config.algorithm, config.reward.shaping
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    # Names of the parts, and their weights.
    if not keys:
        yield Clash(
            ("algorithm.adv_estimator",),
            "gdpo needs the names of the parts of the reward: algorithm.gdpo_reward_keys=[a,b], as "
            "a reward function returns them next to score, or the names of a mixture's parts.",
        )
    if weights and len(weights) != len(keys):
        yield Clash(
            ("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"),
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} parts.",
        )
    # What changes only the sum has no effect.
    if algorithm.use_kl_in_reward:
        yield Clash(
            ("algorithm.use_kl_in_reward", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, not the KL in it; use actor.use_kl_loss=true "
            "instead of algorithm.use_kl_in_reward.",
        )
    if shaping != type(shaping)():
        yield Clash(
            ("reward.shaping", "algorithm.adv_estimator"),
            "gdpo reads the parts of the reward, not their shaped sum; leave reward.shaping out.",
        )


def check_clip_ranges(config: Config) -> Iterator[Clash]:
    """The clip ranges must be ordered, below 1, and inside the dual-clip bound."""
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
    # The dual clip bounds negative advantages; it must be above the clip range (arXiv 1912.09729).
    bound = actor.clip_ratio_c if POLICY_LOSSES[kind].dual else None
    if bound is not None and upper_clip(actor) + 1 >= bound:
        yield Clash(
            ("actor.clip_ratio_c", "actor.clip_ratio_high", "actor.clip_ratio"),
            f"the dual-clip bound actor.clip_ratio_c {bound:g} is inside the clip "
            f"range (1 + {upper_clip(actor):g}); use 3, or a smaller range.",
        )


def check_losses(config: Config) -> Iterator[Clash]:
    """Settings of a loss or a schedule that has no such parameter."""
    chosen = config.actor.policy_loss
    if chosen.clip_cov_lb >= chosen.clip_cov_ub:
        yield Clash(
            ("actor.policy_loss.clip_cov_lb", "actor.policy_loss.clip_cov_ub"),
            f"actor.policy_loss.clip_cov_lb {chosen.clip_cov_lb:g} must be below clip_cov_ub "
            f"{chosen.clip_cov_ub:g}.",
        )
    # Divisor and schedule of each model.
    for who, part in (("actor", config.actor), ("critic", config.critic)):
        if part.loss_scale_factor is not None and part.loss_agg_mode != "seq-mean-token-sum-norm":
            yield Clash(
                (f"{who}.loss_scale_factor", f"{who}.loss_agg_mode"),
                f"{who}.loss_scale_factor has an effect only with {who}.loss_agg_mode="
                f"seq-mean-token-sum-norm, not with {part.loss_agg_mode}.",
            )
        if part.optim.lr_scheduler_type == "constant" and part.optim.min_lr_ratio:
            yield Clash(
                (f"{who}.optim.min_lr_ratio", f"{who}.optim.lr_scheduler_type"),
                f"{who}.optim.min_lr_ratio is the floor of the cosine; use it with "
                f"{who}.optim.lr_scheduler_type=cosine.",
            )


def check_kl(config: Config) -> Iterator[Clash]:
    """The adaptive KL controller needs the KL in the reward and a coefficient above 0."""
    algorithm = config.algorithm
    # The controller multiplies the coefficient, so 0 stays 0.
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        if algorithm.kl_ctrl.kl_coef == 0:
            yield Clash(
                ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.type"),
                "an adaptive KL coefficient that starts at 0 stays 0; use --kl_coef 0.001.",
            )
    elif algorithm.kl_ctrl.type == "adaptive":
        yield Clash(
            ("algorithm.kl_ctrl.type", "algorithm.use_kl_in_reward"),
            "the adaptive controller sets the weight of the KL in the reward, which is off; set "
            "algorithm.use_kl_in_reward=true.",
        )


def check_schedule(config: Config) -> Iterator[Clash]:
    """Critic warm-up and patience must leave something to train and to validate."""
    warmup, steps = config.trainer.critic_warmup, config.trainer.total_training_steps
    # Critic warm-up.
    if steps is not None and 0 < steps <= warmup:
        yield Clash(
            ("trainer.critic_warmup", "trainer.total_training_steps"),
            f"trainer.critic_warmup {warmup} leaves no step to train the actor in {steps} step(s); "
            "use "
            f"{steps - 1} or less, or more --max_steps.",
        )
    # Patience.
    if config.trainer.patience is not None and config.trainer.test_freq < 1:
        yield Clash(
            ("trainer.patience", "trainer.test_freq"),
            "--patience counts validations during the run, but there are none; set --test_freq 10.",
        )
    if config.trainer.patience is not None and not config.data.val_files:
        yield Clash(
            ("trainer.patience", "data.val_files"),
            "--patience watches validation, but there are no validation prompts: --val_files FILE.",
        )


def check_reward_sources(config: Config) -> Iterator[Clash]:
    """Without a mixture, only one source may score every row."""
    reward = config.reward
    sources = {
        "reward.api.enable": ("judge", reward.api.enable),
        "reward.model.path": ("model", reward.model.path is not None),
        "reward.function": ("rule", reward.function is not None),
        "reward.rule": (f"rule:{reward.rule}", reward.rule is not None),
    }
    # With a mixture, each of these may be the source of a part.
    keys = tuple(key for key, (_, is_set) in sources.items() if is_set)
    if has_mixture(reward):
        if reward.function is not None and reward.rule is not None:
            yield Clash(
                ("reward.rule", "reward.function"),
                "reward.function and reward.rule each score a part of kind rule; keep "
                f"one, and make the other a separate part: --reward rule:{reward.rule}:0.2.",
            )
    elif len(keys) > 1:
        share = f"{1 / len(keys):.2g}"
        mix = " ".join(f"--reward {sources[key][0]}:{share}" for key in keys)
        out = " without --rule" if keys[-2:] == ("reward.function", "reward.rule") else ""
        yield Clash(
            keys,
            f"{', '.join(keys[:-1])} and {keys[-1]} each score every row. Keep one, or "
            f"mix them{out}: {mix}.",
        )


def check_shaping(config: Config) -> Iterator[Clash]:
    """The over-long penalty must leave some responses without a penalty."""
    buffer, longest = config.reward.shaping.overlong_buffer, config.data.max_response_length
    if buffer is not None and buffer > longest:
        yield Clash(
            ("reward.shaping.overlong_buffer", "data.max_response_length"),
            f"reward.shaping.overlong_buffer {buffer} is longer than the longest response "
            f"({longest} tokens), so every response gets a penalty; use {max(1, longest // 4)}.",
        )
