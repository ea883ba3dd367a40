"""Advice when memory has run out: settings to change, and other ways.

Each cause has different advice: shorter rows do not shrink gathered weights, and smaller
micro-batches do not shrink moments. Advice for the transfer of weights is in `engine/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from ppo_cli.config.schema.algorithm import Sharding
from ppo_cli.config.schema.run import Config, Rollout
from ppo_cli.planning.memory.plan import LORA_RANK
from ppo_cli.planning.placement import placement_of

Cause = Literal["weights", "sequence", "step", "sampling"]


def advise_memory(config: Config, cause: Cause) -> str:
    """Return one sentence with what to add to the command, the least costly first."""
    # Settings first, then more devices, then a smaller model.
    ways = [*_suggestions(config, cause)]
    if config.trainer.n_gpus_per_node and cause != "sampling":
        ways.append("use more GPUs (--n_gpus, --nnodes)")
    elif cause != "sampling" and (ranks := placement_of(config).ranks) > 1:
        if ranks > config.trainer.nnodes:
            ways.append(f"run fewer of the {ranks} learner ranks on a machine (--num_workers)")
        ways.append("use more machines (--nnodes)")
    ways.append("take a smaller --model")
    text = " or ".join((", ".join(ways[:-1]), ways[-1])) if ways[1:] else ways[0]
    return f"{text[0].upper()}{text[1:]}."


def _suggestions(config: Config, cause: Cause) -> Iterator[str]:
    """Yield changes of settings that lower the peak of memory with this cause."""
    if cause == "sampling":
        gpus, prompts = config.trainer.n_gpus_per_node, config.data.gen_batch_size
        yield from _suggest_for_sampling(config.rollout, prompts, gpus)
        return
    if cause == "sequence":
        yield "lower --max_response_length or --max_prompt_length"
        if config.model.enable_gradient_checkpointing is False:
            yield "add model.enable_gradient_checkpointing=true"
    if not config.trainer.n_gpus_per_node:
        yield from _suggest_training_less(config)
        return
    # A reference that is a separate model and stays on the device.
    separate = config.uses_reference and not config.shares_reference
    if cause in ("weights", "sequence") and separate and not config.ref.param_offload:
        yield "add ref.param_offload=true"
    trained = {"actor": config.actor.fsdp_config}
    if config.uses_critic:
        trained["critic"] = config.critic.fsdp_config
    yield from _suggest_offload(trained, "optimizer_offload")
    if cause == "step" and config.actor.optim.optimizer != "AdamW8bit":
        yield "add actor.optim.optimizer=AdamW8bit (moments in 8 bits)"
    # A step on offloaded weights saves memory only if several ranks step in host memory.
    if cause != "step" or placement_of(config).ranks > 1:
        yield from _suggest_offload(trained, "param_offload")
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


def _suggest_offload(parts: Mapping[str, Sharding], what: str) -> Iterator[str]:
    missing = [name for name, sharding in parts.items() if not getattr(sharding, what)]
    if missing:
        yield "add " + " ".join(f"{name}.fsdp_config.{what}=true" for name in missing)


def _suggest_for_sampling(rollout: Rollout, prompts: int, gpus: int) -> Iterator[str]:
    rows = min(rollout.max_num_seqs, prompts * rollout.n)
    if rollout.name == "vllm" and gpus:
        yield "lower --gpu_memory_utilization"
    if rows > 1:
        yield f"add rollout.max_num_seqs={rows // 2}"
    yield "lower --max_response_length or --max_prompt_length"
