"""Checks of batches and of the reward's sources, settings that are not offered, and remarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.choices import why_recompute
from ppo_cli.config.mixture import has_mixture
from ppo_cli.config.schema.algorithm import Actor, Algorithm
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import value_of
from ppo_cli.config.schema.run import Trainer
from ppo_cli.config.settle import Settling
from ppo_cli.data_sets.files import count_episodes
from ppo_cli.planning.findings.scene import Scene
from ppo_cli.plugins import runs_elsewhere


def kl_remarks(actor: Actor, algorithm: Algorithm) -> Iterator[str]:
    """Remark on a KL that counts twice or has no weight."""
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is on with weight 0: the KL to the reference is only reported."
        return
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "The KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward, "
            f"weight {algorithm.kl_ctrl.kl_coef:g}) and in the loss (actor.use_kl_loss, "
            f"weight {actor.kl_loss_coef:g}). Usually one of them is enough."
        )


def loss_remarks(actor: Actor, *, bypass: bool) -> Iterator[str]:
    """Remark on settings that differ from the papers of GSPO (2507.18071) and SAO (2607.07508).

    `bypass`: old log-probs are those of the sampler.
    """
    mode = actor.loss_agg_mode
    if actor.policy_loss.loss_mode == "dis":
        if actor.clip_ratio_high <= 0.5:
            yield (
                "The policy loss dis masks tokens on both sides of the clip range, so a narrow one "
                "masks many. Its paper has actor.clip_ratio_low=0.8 actor.clip_ratio_high=3 for "
                "agents, and 0.3 and 5 for reasoning."
            )
        if not bypass:
            yield (
                "The policy loss dis is meant for a ratio to the sampler, but "
                "algorithm.rollout_correction.bypass_mode is false: its ratio is to the policy "
                "before the update."
            )
    if actor.policy_loss.loss_mode != "gspo":
        return
    # Clip ranges, then the aggregation of the loss.
    if actor.clip_ratio_high > 0.05:
        yield (
            "GSPO's ratio is a mean over the sequence and stays near 1, so wide ranges rarely "
            "clip. Its paper has actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4."
        )
    if mode.startswith("token-"):
        yield (
            f"GSPO counts each sequence once; with actor.loss_agg_mode {mode} a long one counts "
            "more. Its paper has actor.loss_agg_mode=seq-mean-token-mean."
        )


def sampler_remarks(engine: str, sampler: str, *, bypass: bool) -> Iterator[str]:
    """Remark that no log-probs of the trainer show which weights a sampler of its own has."""
    if bypass and engine == "ray" and sampler == "vllm":
        yield (
            "The old log-probs are those of vLLM (algorithm.rollout_correction.bypass_mode), so "
            "nothing compares its weights with the trainer's: watch ppo_ratio and clip_fraction."
        )


def missing_alert(alert: str | None, environ: Mapping[str, str]) -> Iterator[str]:
    """Say that no variable holds the address of --alert."""
    if alert and "://" not in alert and not environ.get(alert, "").startswith("http"):
        yield f"There is no address in {alert}, the variable that --alert names: set it to one."


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


def unsupported_settings(scene: Scene) -> Iterator[Finding]:
    """Yield the settings that no machine can honour."""
    config = scene.config
    # Arguments of vLLM that the program sets itself.
    for name in config.rollout.engine_kwargs.vllm.keys() & VLLM_ARGUMENTS.keys():
        setting_name = VLLM_ARGUMENTS[name]
        use = "leave it out" if setting_name is None else f"set {setting_name} instead"
        yield Finding(
            ("rollout.engine_kwargs.vllm",),
            f"rollout.engine_kwargs.vllm.{name}: the program chooses it for vLLM; {use}.",
        )
    # Settings of the rollout correction that contradict each other.
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    try:
        correction.rejections()
    except ValueError as error:
        yield Finding((f"{key}.rollout_rs",), str(error))
    if correction.bypass_mode and (why := why_recompute(Settling(config, scene.machine))):
        yield Finding(
            (f"{key}.bypass_mode",),
            f"{key}.bypass_mode: the actor must compute old log-probs, as {why}; leave it out.",
        )
    # The engine of a package is another program, which only `ppo train` starts.
    if runs_elsewhere(engine := config.trainer.engine):
        yield Finding(
            ("trainer.engine",),
            f"The engine '{engine}' trains only by a line that names it: `ppo train --engine "
            f"{engine}`. Use --engine ray, or --engine local for one process.",
        )
    if config.model.attn_implementation == "flash_attention_2":
        yield Finding(
            ("model.attn_implementation",),
            "model.attn_implementation flash_attention_2 cannot be used: it needs half-precision "
            "weights, and weights are kept in float32. Use sdpa.",
        )


def refused_in_session(trainer: Trainer, algorithm: Algorithm) -> Iterator[str]:
    """Yield a sentence for each setting that a session (`run/session.py`) cannot honour."""
    if trainer.nnodes > 1:
        yield (
            f"trainer.nnodes {trainer.nnodes}: a session runs on one machine; leave it out, "
            "or use `ppo train`."
        )
    if trainer.on_hacking == "restrain":
        yield (
            "--on_hacking restrain goes back to an earlier step, and the scores of a session are "
            "its caller's; use --on_hacking stop, or `ppo train`."
        )
    estimator, afterwards = algorithm.adv_estimator, "which a session gets afterwards"
    if algorithm.filter_groups.enable:
        yield f"algorithm.filter_groups.enable needs scores while it samples, {afterwards}."
    if ESTIMATORS[estimator].baseline:
        yield f"{estimator} needs scores of greedy responses, {afterwards}; use grpo or rloo."


def check_batches(scene: Scene) -> Iterator[Finding]:
    """A mini-batch must divide the batch; the critic's only when it is set separately.

    Of data and of each trained model, with sizes that are worked out.
    """
    config = scene.config
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    sizes = [("actor.ppo_mini_batch_size", mini)]
    if config.uses_critic and config.critic.ppo_mini_batch_size != mini:
        sizes.append(("critic.ppo_mini_batch_size", config.critic.ppo_mini_batch_size))
    for key, size in sizes:
        keys = (key, "data.train_batch_size")
        if size > batch:
            yield Finding(
                keys,
                f"{key} {size} is larger than data.train_batch_size {batch}; a mini-batch is a "
                f"part of the batch. Use {batch} or less.",
            )
        elif batch % size:
            divisor = next(n for n in range(size, 0, -1) if batch % n == 0)
            yield Finding(
                keys,
                f"data.train_batch_size {batch} is not divisible by {key} {size}. "
                f"Use {key}={divisor}, or data.train_batch_size={batch - batch % size}.",
            )


def check_episodes(scene: Scene) -> Iterator[Finding]:
    """What episodes of several turns do not go with."""
    config, algorithm = scene.config, scene.config.algorithm
    for split, flag in {"train": "--episodes", "val": "--val_episodes"}.items():
        key = f"data.{split}_files"
        if config.environment.path is None and any(map(count_episodes, value_of(config, key))):
            yield Finding(
                (key, "environment.path"),
                f"{flag} N is for an --environment that opens its episodes: without one, an "
                "episode begins with the messages of its row. Name rows with "
                f"--{split}_files FILE.",
            )
    if not config.environment.is_set:
        return
    if config.rollout.partial_tokens is not None:
        yield Finding(
            ("rollout.partial_tokens", "environment.path"),
            "rollout.partial_tokens stops a response between two updates, and an episode is played "
            "in one go: leave it out; --async_steps works alone.",
        )
    if not config.data.apply_chat_template:
        yield Finding(
            ("data.apply_chat_template", "environment.path"),
            "episodes are conversations, which a chat template renders: leave "
            "data.apply_chat_template=false out.",
        )
    if config.environment.history != "split":
        return
    if algorithm.adv_estimator != "gae" or algorithm.subtract_group_mean:
        option = "algorithm.subtract_group_mean"
        if not algorithm.subtract_group_mean:
            option = f"--adv_estimator {algorithm.adv_estimator}"
        yield Finding(
            ("environment.history", "algorithm.adv_estimator", "algorithm.subtract_group_mean"),
            f"environment.history=split makes each turn a sample, and {option} compares whole "
            "responses to one prompt: use --adv_estimator gae without it, or "
            "environment.history=keep.",
        )


def check_reward_sources(scene: Scene) -> Iterator[Finding]:
    """Without a mixture, only one source may score every row; the mixture is read for that."""
    reward = scene.config.reward
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
            yield Finding(
                ("reward.rule", "reward.function"),
                "reward.function and reward.rule each score a part of kind rule; keep "
                f"one, and make the other a separate part: --reward rule:{reward.rule}:0.2.",
            )
    elif len(keys) > 1:
        share = f"{1 / len(keys):.2g}"
        mix = " ".join(f"--reward {sources[key][0]}:{share}" for key in keys)
        out = " without --rule" if keys[-2:] == ("reward.function", "reward.rule") else ""
        yield Finding(
            keys,
            f"{', '.join(keys[:-1])} and {keys[-1]} each score every row. Keep one, or "
            f"mix them{out}: {mix}.",
        )
