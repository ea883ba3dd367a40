"""What a run cannot have: absent parts and inputs, and settings that would change nothing.

The latter are listed in unused.toml; here are the conditions under which they are so.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ppo_cli.algo.estimators import POLICY_LOSSES
from ppo_cli.config.derived import (
    compute_dtype,
    engine_name,
    gpu_count,
    gpus_per_node,
    has_package,
    quantised,
    rejections,
    rollout_is,
    sampler_name,
    uses_critic,
    uses_reference,
    why_recompute_logprobs,
)
from ppo_cli.config.device_checks import cluster_remarks
from ppo_cli.config.keys import table, value_of
from ppo_cli.config.machine.gpus import has_bfloat16, list_gpus
from ppo_cli.config.machine.torch_build import find_fault
from ppo_cli.config.memory.devices import ASSUMED_MEMORY
from ppo_cli.config.mixture import has_mixture, judges_of, mixture_of, models_of, rules_of
from ppo_cli.config.model_checks import broken_models, missing_models
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.resolve import DEFAULT, Resolved
from ppo_cli.config.reward_checks import (
    judge_remarks,
    local_remarks,
    missing_for_judge,
    missing_for_sdks,
    missing_keys,
    mixture_remarks,
)
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.schema import Config
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
    if (fault := find_fault(used, environ)) is not None:
        yield str(fault)
    if config.model.dtype == "bfloat16" and sampler_name(config, gpus) == "vllm":
        yield from (
            f"vLLM does not compute in bfloat16 on a {gpu.name}: leave --dtype out (float32), or "
            "sample with --rollout_name hf."
            for gpu in list_gpus(environ)[:used]
            if not has_bfloat16([gpu])
        )


@dataclass(frozen=True)
class UnusedReason:
    """Why a setting changes nothing: a row of unused.toml, which explains it."""

    condition: str
    text: str
    absent: bool = False
    tuning: bool = False


def _all_judges(true: Callable[[ApiReward], bool]) -> Callable[[Config], bool]:
    """Tell whether something is true of all judges, and there are some."""

    def when(config: Config) -> bool:
        judges = judges_of(config.reward)
        return bool(judges) and all(true(judge.settings) for judge in judges)

    return when


def _all_models(served: bool) -> Callable[[Config], bool]:
    """Tell whether all reward models are served, or all are on this machine."""

    def when(config: Config) -> bool:
        models = models_of(config.reward)
        return bool(models) and all(is_url(model.settings.path or "") is served for model in models)

    return when


def _run_model_unused(config: Config) -> bool:
    """Tell whether a mixture never uses the run's reward model."""
    reward = config.reward
    parts = mixture_of(reward)
    return bool(parts) and not any(p.kind == "model" and "path" not in p.model for p in parts)


def _run_rule_unused(config: Config) -> bool:
    """Tell whether a mixture never uses the run's rule or function."""
    parts = [p for p in mixture_of(config.reward) if p.kind == "rule"]
    all_named = all(p.rule is not None or p.function is not None for p in parts)
    return has_mixture(config.reward) and all_named


def _runs_no_code(config: Config) -> bool:
    """Tell whether surely no rule runs code; a rule chosen by data_source may."""
    rules = rules_of(config.reward)
    return all(r.function is not None or r.rule not in (None, "code") for r in rules)


def _one_process(config: Config) -> bool:
    return engine_name(config) == "local"


# By the name of a table in unused.toml.
CONDITIONS: Final[dict[str, Callable[[Config], bool]]] = {
    "no_judge": lambda c: not judges_of(c.reward),
    "no_reward_model": lambda c: not models_of(c.reward),
    "no_rule": lambda c: not rules_of(c.reward),
    "no_code": _runs_no_code,
    "judge_elsewhere": _all_judges(lambda api: api.type != "local"),
    "no_monitor": _all_judges(lambda api: api.monitor.model is None),
    "no_labels": _all_judges(lambda api: api.monitor.labels is None),
    "decision_endpoint": _all_judges(lambda api: api.mode == "decision"),
    "no_rubric": _all_judges(lambda api: api.rubric is None),
    "fixed_scale": _all_judges(lambda api: api.mode == "compare" or api.rubric is not None),
    "fixed_output": _all_judges(lambda api: api.mode != "text" or api.rubric is not None),
    "own_judge_prompt": _all_judges(
        lambda api: (
            (api.prompt_file, api.scoring_prompt, api.rubric) != (None, None, None)
            or api.mode == "compare"
        )
    ),
    "no_comparison": _all_judges(lambda api: api.mode != "compare"),
    "not_in_pairs": _all_judges(lambda api: (api.mode, api.compare) != ("compare", "pairs")),
    "own_prices": _all_judges(lambda api: None not in (api.price_input, api.price_output)),
    "hedge_after_timeout": _all_judges(lambda api: (api.hedge_after or 0) >= api.timeout),
    "every_rule_its_own": _run_rule_unused,
    "every_model_its_own": _run_model_unused,
    "model_is_served": _all_models(served=True),
    "model_is_local": _all_models(served=False),
    "mixture_off": lambda c: c.reward.composite.enable is False,
    "no_overlong_buffer": lambda c: c.reward.shaping.overlong_buffer is None,
    "no_budget": lambda c: (
        c.reward.shaping.thought_budget is None and c.reward.shaping.answer_budget is None
    ),
    "no_repetition_penalty": lambda c: c.reward.shaping.repetition_penalty is None,
    "hf_sampler": lambda c: sampler_name(c) == "hf",
    "on_gpus": lambda c: gpus_per_node(c) > 0,
    "nothing_sharded": _one_process,
    "no_workers": _one_process,
    "nothing_to_offload": lambda c: _one_process(c) and gpus_per_node(c) == 0,
    "nothing_in_float32": lambda c: gpus_per_node(c) > 0 or compute_dtype(c) == "bfloat16",
    "nothing_to_spread": lambda c: compute_dtype(c) == "float32",
    "nothing_to_share": lambda c: c.rollout.n == 1 or c.model.packing is False,
    "no_lora": lambda c: c.model.lora_rank == 0,
    "no_critic_lora": lambda c: c.critic.model.lora_rank == 0,
    "no_adapter_sent": lambda c: c.model.lora_rank == 0 or _one_process(c),
    "one_node": lambda c: c.trainer.nnodes == 1,
    "no_critic": lambda c: not uses_critic(c),
    "not_grpo": lambda c: c.algorithm.adv_estimator not in ("grpo", "gdpo"),
    "no_dual_clip": lambda c: not POLICY_LOSSES[c.actor.policy_loss.loss_mode].dual,
    "no_clip": lambda c: not POLICY_LOSSES[c.actor.policy_loss.loss_mode].clips,
    "no_filter_groups": lambda c: not c.algorithm.filter_groups.enable,
    "not_clip_cov": lambda c: c.actor.policy_loss.loss_mode != "clip_cov",
    "not_kl_cov": lambda c: c.actor.policy_loss.loss_mode != "kl_cov",
    "no_kl_in_reward": lambda c: not c.algorithm.use_kl_in_reward,
    "kl_is_fixed": lambda c: (
        not c.algorithm.use_kl_in_reward or c.algorithm.kl_ctrl.type == "fixed"
    ),
    "no_kl_loss": lambda c: not c.actor.use_kl_loss,
    "no_reference": lambda c: not uses_reference(c),
    "no_importance_weights": lambda c: rollout_is(c) is None,
    "no_validation": lambda c: not c.data.val_files,
}


def _read_unused() -> dict[str, UnusedReason]:
    rows = tomllib.loads(Path(__file__).with_name("unused.toml").read_text(encoding="utf-8"))
    rows_of: dict[str, UnusedReason] = {}
    for condition, row in rows.items():
        rows_of |= dict.fromkeys(row.pop("keys"), UnusedReason(condition, **row))
    return rows_of


UNUSED: Final = _read_unused()


def find_unused(resolved: Resolved, gpus: int | None = None) -> tuple[list[str], list[str]]:
    """Return what to refuse, and what only to note, of settings that change nothing."""
    config = resolved.config
    # With the number of GPUs filled in no condition looks for them.
    counts = {"n_gpus_per_node": gpus_per_node(config, gpus)}
    counted = config.model_copy(update={"trainer": config.trainer.model_copy(update=counts)})
    refused: dict[tuple[str, str], list[str]] = {}
    noted: dict[tuple[str, str], list[str]] = {}
    for key, setting in table().items():
        origin = resolved.origins[key]
        if origin.startswith((DEFAULT, "verl ")) or value_of(config, key) == setting.default:
            continue
        idle = next((row for row in _reasons_of(key) if CONDITIONS[row.condition](counted)), None)
        if idle is not None:
            to = refused if _is_refused(resolved, key, idle) else noted
            to.setdefault((origin, idle.text), []).append(key)
    return _format_messages(refused), _format_messages(noted)


def describe_unused(key: str) -> Iterator[str]:
    """Why and when a setting has no effect: a sentence for each case in unused.toml."""
    return (f"{row.condition.replace('_', ' ')}: {row.text}" for row in _reasons_of(key))


def _format_messages(groups: dict[tuple[str, str], list[str]]) -> list[str]:
    return [f"{o}: {', '.join(keys)} has no effect: {text}." for (o, text), keys in groups.items()]


def _reasons_of(key: str) -> Iterator[UnusedReason]:
    """Find the rows of a key: its own, then those of its groups, the nearest first."""
    if key == "reward.api.enable":
        return
    parts = key.split(".")
    groups = [".".join(parts[:cut]) + ".*" for cut in range(len(parts) - 1, 0, -1)]
    yield from (UNUSED[name] for name in (key, *groups) if name in UNUSED)


def _is_refused(resolved: Resolved, key: str, idle: UnusedReason) -> bool:
    """Tell an error from a remark: who typed a setting wants it; a preset serves many runs."""
    origin = resolved.origins[key]
    if resolved.verl or idle.tuning or origin.startswith(("preset ", "bundled prompts")):
        return False
    if idle.absent:
        return True
    if idle.condition == "one_node" and origin.startswith("env "):
        return False  # launchers set MASTER_ADDR and NODE_RANK for one node, too
    twin = key.replace("critic.", "actor.", 1)
    if key.startswith("critic.") and resolved.origins.get(twin) == origin:
        # The older style has one name for both models: the actor's half has its effect.
        return bool(value_of(resolved.config, twin) != value_of(resolved.config, key))
    return origin == "override" or origin.startswith(("flag ", "env "))
