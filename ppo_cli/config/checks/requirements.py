"""What a run lacks on this machine, settings that cannot be honoured, and remarks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from ppo_cli.config.checks.devices import cluster_remarks
from ppo_cli.config.checks.judge_server import local_remarks, missing_for_judge
from ppo_cli.config.checks.models import broken_models
from ppo_cli.config.checks.reward_models import missing_models
from ppo_cli.config.checks.rewards import (
    judge_remarks,
    missing_for_sdks,
    missing_keys,
    mixture_remarks,
)
from ppo_cli.config.checks.unused import find_unused
from ppo_cli.config.derived import quantised, rejections, uses_critic, why_recompute_logprobs
from ppo_cli.config.layers import DEFAULT, Resolved
from ppo_cli.config.machine.gpus import has_bfloat16, list_gpus
from ppo_cli.config.machine.torch_build import find_gpu_fault
from ppo_cli.config.memory.devices import ASSUMED_MEMORY
from ppo_cli.config.placement import (
    engine_name,
    gpu_count,
    gpus_per_node,
    has_package,
    sampler_name,
)
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ppo


def missing_parts(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return one sentence for each thing that is asked for and cannot be honoured."""
    config, visible = resolved.config, gpu_count() if gpus is None else gpus
    return [
        *(missing_gpus(config, visible, environ) if config.trainer.engine != "verl" else []),
        *_unusable_gpus(config, visible, environ),
        *_missing_packages(config, visible),
        *refused_settings(resolved, visible),
    ]


def refused_settings(resolved: Resolved, gpus: int | None = None) -> list[str]:
    """Return one sentence for each setting that no machine could honour, or that has no effect."""
    visible = gpu_count() if gpus is None else gpus
    return [*_unsupported_settings(resolved.config), *find_unused(resolved, visible)[0]]


def remarks(
    resolved: Resolved, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return what does not stop a run, but may surprise."""
    visible = gpu_count() if gpus is None else gpus
    config = resolved.config
    return [
        *find_unused(resolved, visible)[1],
        *_range_remarks(resolved),
        *_kl_remarks(config),
        *_gspo_remarks(config),
        *(_verl_remarks(resolved) if resolved.verl else ()),
        *judge_remarks(config),
        *local_remarks(config),
        *mixture_remarks(config.reward),
        *cluster_remarks(config, visible, environ),
    ]


def missing_inputs(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what a run cannot start without: prompts, reward models, and keys."""
    problems = [
        *broken_models(config),
        *missing_keys(config, environ),
        *missing_for_sdks(config, environ),
        *missing_models(config, environ),
        *missing_for_judge(config, environ),
    ]
    if not config.data.train_files:
        problems.append(
            "There are no prompts to train on: name them with --train_files FILE. "
            f"`{ppo('data prepare gsm8k --source openai/gsm8k --out data/gsm8k')}` makes a set, "
            "and --preset embedded trains on the bundled one."
        )
    return problems


def _range_remarks(resolved: Resolved) -> Iterator[str]:
    """Remark on values far from what works elsewhere; presets and defaults are tried."""
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


def _kl_remarks(config: Config) -> Iterator[str]:
    if config.actor.use_kl_loss and config.actor.kl_loss_coef == 0:
        yield "actor.use_kl_loss is on with weight 0: the KL to the reference is only reported."
        return
    if config.algorithm.use_kl_in_reward and config.actor.use_kl_loss:
        yield (
            "The KL to the reference counts twice: in the reward (algorithm.use_kl_in_reward, "
            f"weight {config.algorithm.kl_ctrl.kl_coef:g}) and in the loss (actor.use_kl_loss, "
            f"weight {config.actor.kl_loss_coef:g}). Usually one of them is enough."
        )


def _gspo_remarks(config: Config) -> Iterator[str]:
    actor, mode = config.actor, config.actor.loss_agg_mode
    if actor.policy_loss.loss_mode != "gspo":
        return
    if (actor.clip_ratio_high or actor.clip_ratio) > 0.05:
        yield (
            "GSPO's ratio is the mean over a sequence and stays near 1, so wide ranges hardly ever "
            "clip. Its paper has actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4."
        )
    if mode.startswith("token-"):
        yield (
            f"GSPO counts each sequence once; with actor.loss_agg_mode {mode} a long one counts "
            "more. Its paper has actor.loss_agg_mode=seq-mean-token-mean."
        )


def _verl_remarks(resolved: Resolved) -> Iterator[str]:
    """Remark on what verl does otherwise, or leaves undone, with the same settings."""
    config, origins = resolved.config, resolved.origins
    if config.trainer.save_freq == -1:
        yield "trainer.save_freq -1: verl would save nothing; here the end of the run is saved."
    if config.trainer.test_freq == -1 and config.data.val_files:
        yield "trainer.test_freq -1: verl would not validate at the end; here it is done."
    is_chosen = not origins["actor.clip_ratio"].startswith((DEFAULT, "preset "))
    clips = [origins[f"actor.clip_ratio_{side}"] for side in ("low", "high")]
    if is_chosen and all(origin.startswith("verl ") for origin in clips):
        yield (
            f"actor.clip_ratio {config.actor.clip_ratio:g} changes nothing, as in verl: "
            "actor.clip_ratio_low and actor.clip_ratio_high are 0.2 there; set these."
        )


# Arguments of vLLM that follow from settings of ours, and which; None: from no single one.
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


def _unsupported_settings(config: Config) -> Iterator[str]:
    # Refuse arguments of vLLM that the program sets by itself.
    for name in config.rollout.engine_kwargs.vllm.keys() & VLLM_ARGUMENTS.keys():
        setting_name = VLLM_ARGUMENTS[name]
        use = "leave it out" if setting_name is None else f"set {setting_name} instead"
        yield f"rollout.engine_kwargs.vllm.{name}: the program chooses it for vLLM; {use}."
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


def _missing_packages(config: Config, gpus: int) -> Iterator[str]:
    """Name the packages that this run needs and Python does not find; nothing is imported."""
    lora = config.model.lora_rank or (uses_critic(config) and config.critic.model.lora_rank)
    optims = {"actor": config.actor.optim, "critic": config.critic.optim}
    in_bits = [
        f"{name}.optim.optimizer AdamW8bit"
        for name, optim in optims.items()
        if optim.optimizer == "AdamW8bit"
    ]
    in_bits += [f"{key} nf4" for key in quantised(config)]
    span = config.rollout.tensor_model_parallel_size
    vllm = "`scripts/setup vllm`, or use --rollout_"
    needs = (
        ("ray", engine_name(config, gpus) == "ray", "Several processes need", "pip install ray"),
        ("peft", lora, "LoRA needs", "pip install peft"),
        ("bitsandbytes", in_bits, f"{' and '.join(in_bits)} needs",
         "pip install bitsandbytes, or leave that out"),
        ("vllm", config.rollout.name == "vllm", "The vLLM sampler needs", f"run {vllm}name hf"),
        ("vllm", config.rollout.name != "vllm" and span > 1, f"A sampler of {span} GPUs needs",
         f"run {vllm}tp 1"),
    )  # fmt: skip
    for name, needed, who, mend in needs:
        if needed and not has_package(name):
            yield f"{who} the package {name}, which is not installed: {mend}."


def missing_gpus(
    config: Config, gpus: int | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Say why a number of GPUs cannot be had; of a running cluster this machine may know none."""
    present = gpu_count() if gpus is None else gpus
    configured = config.trainer.n_gpus_per_node
    if (
        configured is None
        or 0 < configured <= present
        or configured == present
        or environ.get("RAY_ADDRESS")
    ):
        return []
    if configured and ASSUMED_MEMORY.get() is not None:  # the plan is of GPUs elsewhere
        return []
    if configured == 0:
        mend = 'to train on the CPU set CUDA_VISIBLE_DEVICES="" and leave --n_gpus out'
    else:
        mend = f"use {present}" if present else "leave --n_gpus out to train on the CPU"
    visible = f"{present or 'no'} GPU{'s are' if present > 1 else ' is'} visible here"
    return [f"trainer.n_gpus_per_node is {configured}, but {visible}; {mend}."]


def _unusable_gpus(config: Config, gpus: int, environ: Mapping[str, str]) -> Iterator[str]:
    """Say why torch cannot use the GPUs of this machine; of a running cluster each node looks."""
    if config.trainer.engine == "verl" or environ.get("RAY_ADDRESS"):
        return
    used = gpus_per_node(config, gpus)
    if (fault := find_gpu_fault(used, environ)) is not None:
        yield str(fault)
    if config.model.dtype == "bfloat16" and sampler_name(config, gpus) == "vllm":
        yield from (
            f"vLLM does not compute in bfloat16 on a {gpu.name}: leave --dtype out (float32), or "
            "sample with --rollout_name hf."
            for gpu in list_gpus(environ)[:used]
            if not has_bfloat16([gpu])
        )
