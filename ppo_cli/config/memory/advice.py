"""What helps where memory has run out: settings that are not set already, and what else there is.

Each cause has its own: gathered weights do not shrink with shorter rows, nor moments with smaller
micro-batches. What helps a transfer of weights is in `engine/base.py`, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ppo_cli.config.derived import gen_batch, uses_critic, uses_reference
from ppo_cli.config.memory.plan import LORA_RANK
from ppo_cli.config.placement import gpus_per_node, learner_ranks, sampler_name
from ppo_cli.config.schema.run import Config

Cause = Literal["weights", "sequence", "step", "sampling"]


def advise_memory(config: Config, cause: Cause) -> str:
    """Say in one sentence what to add to the command, the least costly first."""
    ways = [*_ways(config, cause)]
    if gpus_per_node(config) and cause != "sampling":
        ways.append("use more GPUs (--n_gpus, --nnodes)")
    elif cause != "sampling" and (ranks := learner_ranks(config)) > 1:
        if ranks > config.trainer.nnodes:
            ways.append(f"run fewer of the {ranks} learner ranks on a machine (--num_workers)")
        ways.append("use more machines (--nnodes)")
    ways.append("take a smaller --model")
    text = " or ".join((", ".join(ways[:-1]), ways[-1])) if ways[1:] else ways[0]
    return f"{text[0].upper()}{text[1:]}."


def _ways(config: Config, cause: Cause) -> Iterator[str]:
    if cause == "sampling":
        yield from _for_sampling(config)
        return
    if cause == "sequence":
        yield "lower --max_response_length or --max_prompt_length"
        if config.model.enable_gradient_checkpointing is False:
            yield "add model.enable_gradient_checkpointing=true"
    if not gpus_per_node(config):
        yield from _fewer_trained(config)
        return
    if cause in ("weights", "sequence") and _keeps_reference(config):
        yield "add ref.param_offload=true"
    yield from _offload(config, "optimizer_offload")
    if cause == "step" and config.actor.optim.optimizer != "AdamW8bit":
        yield "add actor.optim.optimizer=AdamW8bit (moments in 8 bits)"
    if cause != "step" or learner_ranks(config) > 1:  # then ranks step in host memory
        yield from _offload(config, "param_offload")
    if cause == "step":
        yield from _fewer_trained(config)


def _fewer_trained(config: Config) -> Iterator[str]:
    """Gradients and moments of fewer numbers, which changes what is learned."""
    ranks = {"model.lora_rank": config.model.lora_rank}
    if uses_critic(config):
        ranks["critic.model.lora_rank"] = config.critic.model.lora_rank
    whole = [key for key, rank in ranks.items() if not rank]
    if whole:
        yield "add " + " ".join(f"{key}={LORA_RANK}" for key in whole)
    if uses_critic(config):
        group = " rollout.n=4" if config.rollout.n < 2 else ""
        yield f"add algorithm.adv_estimator=grpo{group} (trains no critic)"


def _keeps_reference(config: Config) -> bool:
    """Whether a model of its own is the reference, and stays on the device."""
    shared = config.model.lora_rank > 0 and config.ref.path is None
    return uses_reference(config) and not shared and not config.ref.param_offload


def _offload(config: Config, what: str) -> Iterator[str]:
    parts = ("actor", "critic") if uses_critic(config) else ("actor",)
    missing = [name for name in parts if not getattr(getattr(config, name).fsdp_config, what)]
    if missing:
        yield "add " + " ".join(f"{name}.fsdp_config.{what}=true" for name in missing)


def _for_sampling(config: Config) -> Iterator[str]:
    rows = min(config.rollout.max_num_seqs, gen_batch(config) * config.rollout.n)
    if sampler_name(config) == "vllm" and gpus_per_node(config):
        yield "lower --gpu_memory_utilization"
    if rows > 1:
        yield f"add rollout.max_num_seqs={rows // 2}"
    yield "lower --max_response_length or --max_prompt_length"
