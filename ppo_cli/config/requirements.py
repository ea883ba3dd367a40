"""What a run cannot have: absent parts and inputs, and settings that would change nothing.

One table of the latter: key (`x.*` covers everything below x), when it has no effect, why, and
what to use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from ppo_cli.config.derived import (
    engine_name,
    gpu_count,
    gpus_per_node,
    has_package,
    rollout_is,
    sampler_name,
    uses_critic,
    uses_reference,
)
from ppo_cli.config.device_checks import cluster_remarks
from ppo_cli.config.judge_checks import judge_remarks, missing_keys
from ppo_cli.config.keys import table, value_of
from ppo_cli.config.known_models import is_url
from ppo_cli.config.mixture import has_mixture, judges_of, mixture_of, models_of, rules_of
from ppo_cli.config.mixture_checks import mixture_remarks
from ppo_cli.config.model_checks import broken_models, missing_models
from ppo_cli.config.resolve import DEFAULT, Resolved
from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.schema import Config
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


@dataclass(frozen=True)
class Idle:
    """When a setting changes nothing; `absent` means that its part is not there.

    A setting of memory or speed (`tuning`) is only remarked on: results are what was asked for.
    """

    when: Callable[[Config], bool]
    text: str
    absent: bool = False
    tuning: bool = False


def _every_judge(true: Callable[[ApiReward], bool]) -> Callable[[Config], bool]:
    """Tell whether something is true of all judges, and there are some."""

    def when(config: Config) -> bool:
        judges = judges_of(config.reward)
        return bool(judges) and all(true(judge.settings) for judge in judges)

    return when


def _every_model(served: bool) -> Callable[[Config], bool]:
    """Tell whether all reward models are served, or all are on this machine."""

    def when(config: Config) -> bool:
        models = models_of(config.reward)
        return bool(models) and all(is_url(model.settings.path or "") is served for model in models)

    return when


def _all_paths_own(config: Config) -> bool:
    """Tell whether a mixture never uses the run's reward model."""
    reward = config.reward
    parts = mixture_of(reward)
    return bool(parts) and not any(p.kind == "model" and "path" not in p.model for p in parts)


def _all_rules_own(config: Config) -> bool:
    """Tell whether a mixture never uses the run's rule or function."""
    parts = [p for p in mixture_of(config.reward) if p.kind == "rule"]
    own = all(p.rule is not None or p.function is not None for p in parts)
    return has_mixture(config.reward) and own


def _no_code(config: Config) -> bool:
    """Tell whether surely no rule runs code; a rule chosen by data_source may."""
    rules = rules_of(config.reward)
    return all(r.function is not None or r.rule not in (None, "code") for r in rules)


_JUDGE = Idle(
    lambda c: not judges_of(c.reward),
    "no LLM judge scores this run (reward.api.enable is off); leave it out",
    absent=True,
)
_MODEL = Idle(
    lambda c: not models_of(c.reward),
    "no reward model scores this run; name one with --reward_model, or leave it out",
    absent=True,
)
_MONITOR = Idle(
    _every_judge(lambda api: api.monitor.model is None),
    "no second judge is named; set --rm_monitor_model, or leave it out",
)
_RULES = Idle(
    lambda c: not rules_of(c.reward),
    "rules and functions use it, and none of them scores this run; judges and reward models have "
    "settings under reward.api and reward.model, or leave it out",
)
_DECISION = Idle(
    _every_judge(lambda api: api.mode == "decision"),
    "a decision endpoint writes no text (reward.api.mode decision); leave it out",
)
_OTHER_RULES = Idle(
    _all_rules_own,
    "no part of the mixture is scored by it; add --reward rule:0.5, or leave it out",
    absent=True,
)
_LOCAL = Idle(
    _every_model(served=True),
    "the reward model runs at its server, which has settings of its own; leave it out",
)
_AT_SERVER = Idle(
    _every_model(served=False),
    "only a served reward model (--reward_model http://HOST) uses it; leave it out",
)
_MIXTURE = Idle(
    lambda c: c.reward.composite.enable is False,
    "the mixture is off (reward.composite.enable false); leave that out, or this",
)

REWARD_EFFECTS: Final[dict[str, Idle]] = {
    "reward.api.*": _JUDGE,
    "reward.api.monitor.*": _MONITOR,
    "reward.api.output": _DECISION,
    "reward.api.temperature": _DECISION,
    "reward.api.max_tokens": _DECISION,
    "reward.api.prompt_preset": Idle(
        _every_judge(lambda api: (api.prompt_file, api.scoring_prompt) != (None, None)),
        "the judge has a prompt of your own (reward.api.prompt_file or scoring_prompt); leave "
        "one of them out",
    ),
    "reward.api.prices": Idle(
        _every_judge(lambda api: None not in (api.price_input, api.price_output)),
        "reward.api.price_input and price_output say what a token costs; leave one of them out",
    ),
    "reward.api.hedge_after": Idle(
        _every_judge(lambda api: (api.hedge_after or 0) >= api.timeout),
        "a call has ended by then (reward.api.timeout); set a shorter time, or leave it out",
    ),
    "reward.timeout": _RULES,
    "reward.num_workers": _RULES,
    "reward.function_kwargs": _RULES,
    "reward.function": _OTHER_RULES,
    "reward.rule": _OTHER_RULES,
    "reward.model.path": Idle(
        _all_paths_own,
        "no part of the mixture is scored by it; add --reward model:0.5, or leave it out",
        absent=True,
    ),
    "reward.model.*": _MODEL,
    **dict.fromkeys(
        [f"reward.model.{k}" for k in ("dtype", "device", "offload", "batch_tokens", "outputs")],
        _LOCAL,
    ),
    "reward.model.revision": _LOCAL,
    **dict.fromkeys(
        [f"reward.model.{k}" for k in ("timeout", "concurrency", "request_rows", "outage_wait")],
        _AT_SERVER,
    ),
    "reward.model.model_name": _AT_SERVER,
    "reward.model.key_env": _AT_SERVER,
    "reward.code.*": Idle(
        _no_code,
        "no rule runs code in this run; set --rule code, or leave it out",
    ),
    "reward.parts": _MIXTURE,
    "reward.composite.weights": _MIXTURE,
    "reward.composite.parts": _MIXTURE,
    "reward.shaping.overlong_penalty": Idle(
        lambda c: c.reward.shaping.overlong_buffer is None,
        "the over-long penalty is off; set --overlong_buffer TOKENS, or leave it out",
    ),
    "reward.shaping.repetition_ngram": Idle(
        lambda c: c.reward.shaping.repetition_penalty is None,
        "the repetition penalty is off; set --repetition_penalty, or leave it out",
    ),
}


_SAMPLER = Idle(
    lambda c: sampler_name(c) == "hf",
    "the hf sampler has no such setting; use --rollout_name vllm, or leave it out",
    tuning=True,
)
_SHARDS = Idle(
    lambda c: engine_name(c) == "local",
    "one process holds whole models and shards nothing; leave it out",
    tuning=True,
)
_OFFLOAD = Idle(
    lambda c: engine_name(c) == "local" and gpus_per_node(c) == 0,
    "in one process without a GPU everything is in host memory; leave it out",
    tuning=True,
)
_RESTARTS = Idle(
    lambda c: engine_name(c) == "local",
    "one process has no workers and no nodes to lose; leave it out",
    tuning=True,
)
_LORA = Idle(
    lambda c: c.model.lora_rank == 0,
    "without LoRA (model.lora_rank 0) it changes nothing; leave it out",
)
_MERGE = Idle(
    lambda c: c.model.lora_rank == 0 or engine_name(c) == "local",
    "it is for LoRA in several processes; leave it out",
)
_NODES = Idle(lambda c: c.trainer.nnodes == 1, "with one node it changes nothing; leave it out")
_GAE = Idle(
    lambda c: not uses_critic(c),
    "only the estimator gae uses it; set --adv_estimator gae, or leave it out",
)
_REWARD_KL = Idle(
    lambda c: not c.algorithm.use_kl_in_reward,
    "the KL in the reward is off; set algorithm.use_kl_in_reward=true, or leave it out",
)
_ADAPTIVE = Idle(
    lambda c: not c.algorithm.use_kl_in_reward or c.algorithm.kl_ctrl.type == "fixed",
    "only the adaptive controller of the KL in the reward uses it; set "
    "algorithm.use_kl_in_reward=true and algorithm.kl_ctrl.type=adaptive, or leave it out",
)
_KL_LOSS = Idle(
    lambda c: not c.actor.use_kl_loss,
    "the KL loss is off; set actor.use_kl_loss=true, or leave it out",
)
_WEIGHTS = Idle(
    lambda c: rollout_is(c) is None,
    "the importance weights are off; set algorithm.rollout_correction.rollout_is=token, or "
    "leave it out",
)

MODELS = ("actor", "critic")
SHARDING = ("fsdp_size", "reshard_after_forward")
OFFLOADED = ("param", "optimizer")

EFFECTS: dict[str, Idle] = {
    "rollout.gpu_memory_utilization": _SAMPLER,
    "rollout.max_num_batched_tokens": _SAMPLER,
    "rollout.enforce_eager": _SAMPLER,
    "rollout.enable_prefix_caching": _SAMPLER,
    "rollout.num_samplers": Idle(
        lambda c: gpus_per_node(c) > 0,
        "on GPUs it follows from their number and --rollout_tp; leave it out",
    ),
    **{f"{who}.fsdp_config.{name}": _SHARDS for who in MODELS for name in SHARDING},
    **{f"{who}.fsdp_config.{name}_offload": _OFFLOAD for who in MODELS for name in OFFLOADED},
    "ref.param_offload": _OFFLOAD,
    "model.lora_alpha": _LORA,
    "model.target_modules": _LORA,
    "model.lora_merge": _MERGE,
    "trainer.max_restarts": _RESTARTS,
    "trainer.worker_timeout": _RESTARTS,
    "trainer.node_timeout": _RESTARTS,
    "trainer.master_addr": _NODES,
    "trainer.master_port": _NODES,
    "trainer.node_rank": _NODES,
    "critic.*": _GAE,
    "algorithm.lam": _GAE,
    "algorithm.whiten_advantages": _GAE,
    "algorithm.norm_adv_by_std_in_grpo": Idle(
        lambda c: c.algorithm.adv_estimator != "grpo",
        "only the estimator grpo uses it; set --adv_estimator grpo, or leave it out",
    ),
    "algorithm.kl_penalty": _REWARD_KL,
    "algorithm.kl_ctrl.kl_coef": _REWARD_KL,
    "algorithm.kl_ctrl.horizon": _ADAPTIVE,
    "algorithm.kl_ctrl.target_kl": _ADAPTIVE,
    "actor.kl_loss_coef": _KL_LOSS,
    "actor.kl_loss_type": _KL_LOSS,
    "ref.path": Idle(
        lambda c: not uses_reference(c),
        "no reference is used; set algorithm.use_kl_in_reward=true or actor.use_kl_loss=true, "
        "or leave it out",
    ),
    "algorithm.rollout_correction.rollout_is_threshold": _WEIGHTS,
    "algorithm.rollout_correction.rollout_is_batch_normalize": _WEIGHTS,
    "data.val_max_samples": Idle(
        lambda c: not c.data.val_files,
        "there are no validation prompts; name them with --val_files, or leave it out",
    ),
    **REWARD_EFFECTS,
}


def idle_settings(resolved: Resolved, gpus: int | None = None) -> tuple[list[str], list[str]]:
    """Return what to refuse, and what only to note, of settings that change nothing."""
    refused: dict[tuple[str, str], list[str]] = {}
    noted: dict[tuple[str, str], list[str]] = {}
    for key, idle in _idle(resolved, _counted(resolved.config, gpus)):
        origin = resolved.origins[key]
        to = refused if _is_refused(resolved, key, idle) else noted
        to.setdefault((origin, idle.text), []).append(key)
    return _told(refused), _told(noted)


def _counted(config: Config, gpus: int | None) -> Config:
    """Return the settings with the number of GPUs filled in, so that no row looks for them."""
    known = {"n_gpus_per_node": gpus_per_node(config, gpus)}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=known)})


def _told(found: dict[tuple[str, str], list[str]]) -> list[str]:
    return [f"{o}: {', '.join(keys)} has no effect: {text}." for (o, text), keys in found.items()]


def _idle(resolved: Resolved, counted: Config) -> Iterator[tuple[str, Idle]]:
    for key, setting in table().items():
        same = value_of(resolved.config, key) == setting.default
        if same or resolved.origins[key] == "default":
            continue
        rows = (row for row in _rows(key) if row.when(counted))
        yield from ((key, row) for row in islice(rows, 1))


def _rows(key: str) -> Iterator[Idle]:
    """Find the rows of a key: its own, then those of its groups, the nearest first."""
    if key == "reward.api.enable":
        return
    parts = key.split(".")
    groups = [".".join(parts[:cut]) + ".*" for cut in range(len(parts) - 1, 0, -1)]
    yield from (EFFECTS[name] for name in (key, *groups) if name in EFFECTS)


def _is_refused(resolved: Resolved, key: str, idle: Idle) -> bool:
    """Tell an error from a remark: who typed a setting wants it; a preset serves many runs."""
    origin = resolved.origins[key]
    if idle.tuning or origin.startswith(("preset ", "bundled prompts")):
        return False
    if idle.absent:
        return True
    if idle is _NODES and origin.startswith("env "):
        return False  # launchers set MASTER_ADDR and NODE_RANK for one node, too
    twin = key.replace("critic.", "actor.", 1)
    if key.startswith("critic.") and resolved.origins.get(twin) == origin:
        # The older style has one name for both models: the actor's half has its effect.
        return bool(value_of(resolved.config, twin) != value_of(resolved.config, key))
    return origin == "override" or origin.startswith(("flag ", "env "))
