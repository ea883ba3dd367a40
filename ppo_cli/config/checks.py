"""What no single setting can tell: settings that clash, and parts that are not there yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ppo_cli.config.effective import GROUPED, clip_high, clip_low, critic_mini_batch, uses_critic
from ppo_cli.config.schema import Config


@dataclass(frozen=True)
class Clash:
    """Settings that do not fit together, and what to do about it."""

    keys: tuple[str, ...]
    text: str


def cross_checks(config: Config, environ: Mapping[str, str]) -> list[Clash]:
    """Return every clash between settings."""
    return [*_batches(config), *_estimator(config), *_kl(config), *_run(config)]


def missing_parts(config: Config) -> list[str]:
    """Return one sentence for each part that is asked for and not there yet."""
    said = []
    reward = config.reward
    if config.trainer.engine in ("ray", "verl"):
        said.append(f"The engine '{config.trainer.engine}' is not there yet; use --engine local.")
    if config.rollout.name == "vllm":
        said.append("The vLLM sampler is not there yet; use --rollout_name hf.")
    if config.model.lora_rank > 0:
        said.append("LoRA is not there yet; leave --lora_rank out to train all weights.")
    if reward.api.enable:
        said.append("LLM judges are not there yet; leave --use_api_reward out.")
    if reward.model.path is not None:
        said.append("Reward models are not there yet; leave --reward_model out.")
    if reward.parts:
        said.append("Mixed rewards are not there yet; leave --reward out.")
    return said


def missing_inputs(config: Config) -> list[str]:
    """Return what a run cannot start without."""
    if config.data.train_files:
        return []
    return [
        "There are no prompts to train on: name them with --train_files FILE. "
        "`ppo data prepare gsm8k --source openai/gsm8k --out data/gsm8k` makes a set, "
        "and --preset embedded trains on the bundled one."
    ]


def _batches(config: Config) -> Iterator[Clash]:
    batch, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    sizes = [("actor.ppo_mini_batch_size", mini)]
    if uses_critic(config) and config.critic.ppo_mini_batch_size is not None:
        sizes.append(("critic.ppo_mini_batch_size", critic_mini_batch(config)))
    for key, size in sizes:
        keys = (key, "data.train_batch_size")
        if size > batch:
            text = (
                f"{key} {size} is larger than data.train_batch_size {batch}; a mini-batch is "
                f"a part of the batch. Use --mini_batch_size {batch} or less."
            )
            yield Clash(keys, text)
        elif batch % size:
            text = (
                f"data.train_batch_size {batch} is not divisible by {key} {size}. "
                f"Use a mini-batch of {_divisor(batch, size)} or a batch of {batch - batch % size}."
            )
            yield Clash(keys, text)


def _divisor(batch: int, size: int) -> int:
    return next(n for n in range(size, 0, -1) if batch % n == 0)


def _estimator(config: Config) -> Iterator[Clash]:
    name = config.algorithm.adv_estimator
    if name in GROUPED and config.rollout.n < 2:
        text = (
            f"the estimator {name} compares several responses to a prompt, but rollout.n is "
            f"{config.rollout.n}. Use --rollout_n 4, or --adv_estimator gae."
        )
        yield Clash(("algorithm.adv_estimator", "rollout.n"), text)
    if clip_low(config.actor) > clip_high(config.actor):
        text = (
            f"the lower clip range {clip_low(config.actor):g} is above the upper one "
            f"{clip_high(config.actor):g}; swap them."
        )
        yield Clash(("actor.clip_ratio_low", "actor.clip_ratio_high", "actor.clip_ratio"), text)


def _kl(config: Config) -> Iterator[Clash]:
    if config.actor.use_kl_loss and config.actor.kl_loss_coef == 0:
        text = "the KL loss is on with weight 0; set actor.kl_loss_coef or leave it off."
        yield Clash(("actor.use_kl_loss", "actor.kl_loss_coef"), text)


def _run(config: Config) -> Iterator[Clash]:
    trainer = config.trainer
    if trainer.nnodes > 1 and trainer.node_rank is None:
        text = f"{trainer.nnodes} nodes need the rank of this one: --node_rank 0 on the first."
        yield Clash(("trainer.nnodes", "trainer.node_rank"), text)
    for key, freq in (("save_freq", trainer.save_freq), ("test_freq", trainer.test_freq)):
        if freq == 0:
            yield Clash((f"trainer.{key}",), f"trainer.{key} 0 means nothing; use -1 or 1 and up.")
