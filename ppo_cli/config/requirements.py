"""What a run cannot have: parts that are not there yet, and inputs it cannot start without."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ppo_cli.config.derived import engine_name, has_package
from ppo_cli.config.device_checks import cluster_remarks
from ppo_cli.config.devices import gpu_count
from ppo_cli.config.judge_checks import judge_remarks, missing_keys
from ppo_cli.config.keys import table, value_of
from ppo_cli.config.mixture_checks import mixture_remarks
from ppo_cli.config.model_checks import missing_models
from ppo_cli.config.model_folder import broken_models
from ppo_cli.config.resolve import DEFAULT, Resolved
from ppo_cli.config.schema import Config
from ppo_cli.config.unused import idle_settings
from ppo_cli.errors import ppo


def missing_parts(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return one sentence for each thing that is asked for and cannot be honoured."""
    config, there = resolved.config, gpu_count() if gpus is None else gpus
    wrong = _gpus(config.trainer.n_gpus_per_node, there, environ)
    verl = config.trainer.engine == "verl"
    return [
        *([wrong] if wrong and not verl else []),
        *_missing_packages(config, there),
        *refused_settings(resolved, there),
    ]


def refused_settings(resolved: Resolved, gpus: int | None = None) -> list[str]:
    """Return one sentence for each setting that no machine could honour, or that has no effect."""
    there = gpu_count() if gpus is None else gpus
    return [*_not_offered(resolved.config), *idle_settings(resolved, there)[0]]


def remarks(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return what does not stop a run, but may surprise."""
    there = gpu_count() if gpus is None else gpus
    config = resolved.config
    return [
        *idle_settings(resolved, there)[1],
        *_unusual(resolved),
        *_two_kls(config),
        *judge_remarks(config),
        *mixture_remarks(config.reward),
        *cluster_remarks(config, there, environ),
    ]


def missing_inputs(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what a run cannot start without: prompts, reward models, and keys."""
    said = [
        *broken_models(config),
        *missing_keys(config, environ),
        *missing_models(config, environ),
    ]
    if not config.data.train_files:
        said.append(
            "There are no prompts to train on: name them with --train_files FILE. "
            f"`{ppo('data prepare gsm8k --source openai/gsm8k --out data/gsm8k')}` makes a set, "
            "and --preset embedded trains on the bundled one."
        )
    return said


def _unusual(resolved: Resolved) -> Iterator[str]:
    """Remark on values far from what works elsewhere; presets and defaults are tried."""
    for name, key in table().items():
        value, origin = value_of(resolved.config, name), resolved.origins[name]
        if key.usual is None or value is None or origin.startswith((DEFAULT, "preset ")):
            continue
        low, high = key.usual
        if not low <= value <= high:
            yield f"{origin}: {name} {value:g} is far from what is usual: {low:g} to {high:g}."


def _two_kls(config: Config) -> Iterator[str]:
    if config.algorithm.use_kl_in_reward and config.actor.use_kl_loss:
        yield (
            "The KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward, "
            f"weight {config.algorithm.kl_ctrl.kl_coef:g}) and in the loss (actor.use_kl_loss, "
            f"weight {config.actor.kl_loss_coef:g}). Usually one of them is enough."
        )


def _not_offered(config: Config) -> Iterator[str]:
    if config.trainer.engine == "verl":
        yield (
            "The engine 'verl' is not offered: this program trains by itself. Use --engine ray, or "
            "--engine local for one process."
        )
    if config.model.attn_implementation == "flash_attention_2":
        yield (
            "model.attn_implementation flash_attention_2 cannot be used: it needs half-precision "
            "weights, and weights are kept in float32. Use sdpa."
        )


def _missing_packages(config: Config, gpus: int) -> Iterator[str]:
    """Name the packages that this run needs and Python does not find; nothing is imported."""
    if engine_name(config, gpus) == "ray" and not has_package("ray"):
        yield "Several processes need the package ray, which is not installed: pip install ray."
    if config.model.lora_rank and not has_package("peft"):
        yield "LoRA needs the package peft, which is not installed: pip install peft."
    span = config.rollout.tensor_model_parallel_size
    if has_package("vllm"):
        return
    if config.rollout.name == "vllm":
        yield (
            "The vLLM sampler needs the package vllm, which is not installed: run "
            "`scripts/setup vllm`, or use --rollout_name hf."
        )
    elif span > 1:
        yield (
            f"A sampler of {span} GPUs needs the package vllm, which is not installed: run "
            "`scripts/setup vllm`, or use --rollout_tp 1."
        )


def missing_gpus(
    config: Config, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Say why a number of GPUs cannot be had; of a running cluster this machine may know none."""
    there = gpu_count() if gpus is None else gpus
    said = _gpus(config.trainer.n_gpus_per_node, there, environ)
    return [said] if said else []


def _gpus(wanted: int | None, there: int, environ: Mapping[str, str]) -> str:
    if wanted is None or wanted == there or environ.get("RAY_ADDRESS"):
        return ""
    if wanted == 0:
        return (
            f"trainer.n_gpus_per_node is 0, but {there} GPU(s) are visible and would be used; "
            'to train on the CPU set CUDA_VISIBLE_DEVICES="" and leave --n_gpus out.'
        )
    if there == 0:
        return (
            f"trainer.n_gpus_per_node is {wanted}, but no GPU is visible here; leave --n_gpus "
            "out to train on the CPU."
        )
    if wanted > there:
        return f"trainer.n_gpus_per_node is {wanted}, but {there} GPU(s) are visible; use {there}."
    return ""
