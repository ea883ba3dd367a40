"""What may surprise in a run of several processes, or in one that could have been."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppo_cli.config.device_list import read_placement
from ppo_cli.config.effective import (
    critic_mini_batch,
    data_ranks,
    engine_name,
    gpus_per_node,
    has_package,
    uses_critic,
)
from ppo_cli.config.placement import hosts_reward
from ppo_cli.config.schema import Config


def cluster_remarks(config: Config, gpus: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Say what is allowed and easily overlooked; `gpus` are those visible on this node."""
    trainer = config.trainer
    if gpus > 1 and trainer.n_gpus_per_node is None:
        used = gpus_per_node(config, gpus)
        if used < gpus:
            yield (
                f"{gpus} GPUs are visible, and {'one is' if used == 1 else f'{used} are'} used; "
                f"--n_gpus {gpus} uses them all."
            )
    for who, part in (("actor", config.actor), ("critic", config.critic)):
        if part.strategy == "fsdp":
            yield f"{who}.strategy fsdp is FSDP2 here."
    if engine_name(config, gpus) == "local":
        if environ.get("RAY_ADDRESS"):
            yield (
                "RAY_ADDRESS is set, but this run is one process and needs no Ray; --engine ray "
                "runs it in that cluster."
            )
        return
    yield from _ranks(config, gpus)
    on_gpus = gpus_per_node(config, gpus) > 0
    if on_gpus and config.rollout.name is None and not has_package("vllm"):
        yield (
            "vLLM is not installed, so the hf sampler takes its place, which is much slower: "
            "`scripts/setup vllm` installs it."
        )
    if trainer.async_steps and config.algorithm.rollout_correction.rollout_is is None:
        yield (
            f"With --async_steps {trainer.async_steps} responses come from older weights, so "
            "algorithm.rollout_correction.rollout_is is token unless you set it."
        )
    if trainer.async_steps > 1:
        yield (
            f"--async_steps {trainer.async_steps} makes responses staler than 1 does, and nothing "
            "faster: new weights wait for the sampling under way."
        )
    roles = read_placement(trainer.placement or "")
    if "reward" in roles and not hosts_reward(config):
        yield "--placement names devices for reward, but no reward model runs on any of them."


def _ranks(config: Config, gpus: int) -> Iterator[str]:
    ranks, tensor = data_ranks(config, gpus), config.trainer.tensor_parallel_size
    sizes = {"actor": config.actor.ppo_mini_batch_size}
    if uses_critic(config):
        sizes["critic"] = critic_mini_batch(config)
    for who, prompts in sizes.items():
        rows = prompts * config.rollout.n
        if rows < ranks:
            yield (
                f"{who}.ppo_mini_batch_size makes {rows} response(s) for {ranks} ranks: some have "
                "nothing to do in each step. Fewer ranks, or more prompts, use them better."
            )
            break
    per_node = gpus_per_node(config, gpus)
    if per_node and per_node % tensor:
        yield (
            f"trainer.tensor_parallel_size {tensor} does not divide the {per_node} GPU(s) of a "
            "node, so some layers are split over two nodes, which is slow."
        )
