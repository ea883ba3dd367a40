"""Settings that have no effect: the conditions under which that is so, and the messages."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ppo_cli.algo.estimators import POLICY_LOSSES
from ppo_cli.config.derived import compute_dtype, rollout_is, uses_critic, uses_reference
from ppo_cli.config.layers import DEFAULT, Resolved
from ppo_cli.config.mixture import has_mixture, judges_of, mixture_of, models_of, rules_of
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.placement import engine_name, gpus_per_node, sampler_name
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.run import Config


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
