"""Whether the way that was chosen for new weights can be gone by this run's samplers."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_cli.config.clash import Clash
from ppo_cli.config.effective import gpus_per_node, publishes_adapter, sampler_name, shared_samplers
from ppo_cli.config.schema import Config

KEY = "rollout.weight_transfer"
LEAVE = "or leave it out"


def transfer_clashes(config: Config, gpus: int) -> Iterator[Clash]:
    """Return the clash of `rollout.weight_transfer`, if any; the placement must be readable."""
    way = config.rollout.weight_transfer
    if way in ("auto", "memory"):
        return
    if sampler_name(config, gpus) != "vllm":
        yield Clash(
            (KEY, "rollout.name"),
            f"{KEY} {way} is a way to vLLM, and the sampler here is hf; use --rollout_name vllm, "
            f"{LEAVE}.",
        )
    elif publishes_adapter(config):
        yield Clash(
            (KEY, "model.lora_rank", "model.lora_merge"),
            f"{KEY} {way} takes whole weights, but only the LoRA adapter travels here; use "
            f"model.lora_merge=true, {LEAVE}.",
        )
    elif way != "gloo":
        yield from _between_gpus(config, gpus)


def _between_gpus(config: Config, gpus: int) -> Iterator[Clash]:
    way, shared = config.rollout.weight_transfer, shared_samplers(config)
    if gpus_per_node(config, gpus) == 0:
        yield Clash(
            (KEY, "trainer.n_gpus_per_node"),
            f"{KEY} {way} goes from GPU to GPU, and none is used; use memory or gloo, or name the "
            "GPUs with --n_gpus.",
        )
    elif shared == "some":
        yield Clash(
            (KEY, "trainer.placement"),
            f"{KEY} {way} needs samplers that all share the GPUs that train (ipc) or all have "
            "their own (nccl), and here some of their GPUs train too; use memory or gloo, "
            f"{LEAVE}.",
        )
    elif way == "nccl" and shared == "all":
        yield Clash(
            (KEY, "trainer.placement"),
            f"{KEY} nccl needs samplers on GPUs of their own, and here they share those that "
            f"train; use ipc, {LEAVE}.",
        )
    elif way == "ipc" and shared == "none":
        yield Clash(
            (KEY, "trainer.placement"),
            f"{KEY} ipc needs samplers on the GPUs that train, and here they have their own; use "
            f"nccl, {LEAVE}.",
        )
