"""Advice when memory has run out: settings to change, and other ways.

Each cause has different advice: shorter rows do not shrink gathered weights, and smaller
micro-batches do not shrink moments. Advice for the transfer of weights is in `engine/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ppo_cli.config.schema.run import Config
from ppo_cli.planning.memory.plan import LORA_RANK
from ppo_cli.planning.placement import learner_ranks

Cause = Literal["weights", "sequence", "step", "sampling"]


def advise_memory(config: Config, cause: Cause) -> str:
    """Return one sentence with what to add to the command, the least costly first."""
    # Settings first, then more devices, then a smaller model.
    ways = [*_suggestions(config, cause)]
    if config.trainer.n_gpus_per_node and cause != "sampling":
        ways.append("use more GPUs (--n_gpus, --nnodes)")
    elif cause != "sampling" and (ranks := learner_ranks(config)) > 1:
        if ranks > config.trainer.nnodes:
            ways.append(f"run fewer of the {ranks} learner ranks on a machine (--num_workers)")
        ways.append("use more machines (--nnodes)")
    ways.append("take a smaller --model")
    text = " or ".join((", ".join(ways[:-1]), ways[-1])) if ways[1:] else ways[0]
    return f"{text[0].upper()}{text[1:]}."


def _suggestions(config: Config, cause: Cause) -> Iterator[str]:
    """Yield changes of settings that lower the peak of memory with this cause."""
    if cause == "sampling":
        yield from _suggest_for_sampling(config)
        return
    if cause == "sequence":
        yield "lower --max_response_length or --max_prompt_length"
        if config.model.enable_gradient_checkpointing is False:
            yield "add model.enable_gradient_checkpointing=true"
    if not config.trainer.n_gpus_per_node:
        yield from _suggest_training_less(config)
        return
    if cause in ("weights", "sequence") and _has_separate_reference(config):
        yield "add ref.param_offload=true"
    yield from _suggest_offload(config, "optimizer_offload")
    if cause == "step" and config.actor.optim.optimizer != "AdamW8bit":
        yield "add actor.optim.optimizer=AdamW8bit (moments in 8 bits)"
    # A step on offloaded weights saves memory only if several ranks step in host memory.
    if cause != "step" or learner_ranks(config) > 1:
        yield from _suggest_offload(config, "param_offload")
    if cause == "step":
        yield from _suggest_training_less(config)


def _suggest_training_less(config: Config) -> Iterator[str]:
    """Suggest training fewer weights, which changes what is learned."""
    ranks = {"model.lora_rank": config.model.lora_rank}
    if config.uses_critic:
        ranks["critic.model.lora_rank"] = config.critic.model.lora_rank
    full_keys = [key for key, rank in ranks.items() if not rank]
    if full_keys:
        yield "add " + " ".join(f"{key}={LORA_RANK}" for key in full_keys)
    if config.uses_critic:
        # GRPO needs several responses to a prompt.
        group = " rollout.n=4" if config.rollout.n < 2 else ""
        yield f"add algorithm.adv_estimator=grpo{group} (trains no critic)"


def _has_separate_reference(config: Config) -> bool:
    """Whether the reference is a separate model that stays on the device."""
    shared = config.shares_reference
    return config.uses_reference and not shared and not config.ref.param_offload


def _suggest_offload(config: Config, what: str) -> Iterator[str]:
    parts = ("actor", "critic") if config.uses_critic else ("actor",)
    missing = [name for name in parts if not getattr(getattr(config, name).fsdp_config, what)]
    if missing:
        yield "add " + " ".join(f"{name}.fsdp_config.{what}=true" for name in missing)


def _suggest_for_sampling(config: Config) -> Iterator[str]:
    rows = min(config.rollout.max_num_seqs, config.data.gen_batch_size * config.rollout.n)
    if config.rollout.name == "vllm" and config.trainer.n_gpus_per_node:
        yield "lower --gpu_memory_utilization"
    if rows > 1:
        yield f"add rollout.max_num_seqs={rows // 2}"
    yield "lower --max_response_length or --max_prompt_length"
