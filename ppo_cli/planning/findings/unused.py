"""Settings that have no effect: the conditions under which that is so, and the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.layers import DEFAULT
from ppo_cli.config.mixture import (
    has_mixture,
    is_watched,
    judges_of,
    mixture_of,
    models_of,
    rules_of,
)
from ppo_cli.config.models.known_models import is_url
from ppo_cli.config.schema.finding import Finding, Kind
from ppo_cli.config.schema.keys import Key, table, value_of
from ppo_cli.config.schema.reward import ApiReward, Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.resolved import Resolved


@dataclass(frozen=True)
class Unused:
    """A reason why a setting has no effect: what to do, and the condition.

    `absent`: the part that the setting belongs to is missing, so it is refused in files as well.
    `tuning`: the setting concerns memory or speed, so it is only remarked on.
    """

    text: str
    applies: Callable[[Config], bool]
    absent: bool = False
    tuning: bool = False


def _all_judges(holds: Callable[[ApiReward], bool]) -> Callable[[Config], bool]:
    """Return a condition: some judge scores, and `holds` is true of all of them."""

    def when(config: Config) -> bool:
        # With several judges, a setting counts if one of them uses it.
        judges = judges_of(config.reward)
        return bool(judges) and all(holds(judge.settings) for judge in judges)

    return when


def _all_models(*, served: bool) -> Callable[[Config], bool]:
    """Return a condition: reward models score, and all are served (or all are local)."""

    def when(config: Config) -> bool:
        models = models_of(config.reward)
        # Served and local models have different settings; with both kinds, each setting has a use.
        return bool(models) and all(is_url(model.settings.path or "") is served for model in models)

    return when


def _run_model_unused(reward: Reward) -> bool:
    """Whether a mixture never uses the run's own reward model."""
    # A part with a path has another model than the run's.
    parts = mixture_of(reward)
    return bool(parts) and not any(p.kind == "model" and "path" not in p.model for p in parts)


def _run_rule_unused(reward: Reward) -> bool:
    """Whether a mixture never uses the run's own rule or function."""
    parts = [p for p in mixture_of(reward) if p.kind == "rule"]
    all_named = all(p.rule is not None or p.function is not None for p in parts)
    return has_mixture(reward) and all_named


def _runs_no_code(reward: Reward) -> bool:
    """Whether no rule runs code for certain; a rule chosen by data_source may."""
    # A function may run code too, but not by the rule `code`.
    return all(r.function is not None or r.rule not in (None, "code") for r in rules_of(reward))


# By the name that a setting's declaration gives as `unused`.
UNUSED: Final[dict[str, Unused]] = {
    # Parts that are missing: judge, reward model, rule, code.
    "no_judge": Unused(
        "no LLM judge scores this run (reward.api.enable is off); leave it out",
        lambda c: not judges_of(c.reward),
        absent=True,
    ),
    "no_reward_model": Unused(
        "no reward model scores this run; name one with --reward_model, or leave it out",
        lambda c: not models_of(c.reward),
        absent=True,
    ),
    "no_rule": Unused(
        "rules and functions use it, and none of them scores this run; judges and reward models "
        "have settings under reward.api and reward.model, or leave it out",
        lambda c: not rules_of(c.reward),
    ),
    "no_code": Unused(
        "no rule runs code in this run; set --rule code, or leave it out",
        lambda c: _runs_no_code(c.reward),
    ),
    "no_built_in_rule": Unused(
        "no built-in rule scores this run; functions and judges place rewards themselves, so leave "
        "it out",
        lambda c: all(rules.function is not None for rules in rules_of(c.reward)),
    ),
    "judge_elsewhere": Unused(
        "the run starts no judge; set --rm_api_type local, or leave it out",
        _all_judges(lambda api: api.type != "local"),
    ),
    "no_monitor": Unused(
        "no second judge is named; set --rm_monitor_model, or leave it out",
        _all_judges(lambda api: api.monitor.model is None),
    ),
    "no_cascade": Unused(
        "no cheaper judge is asked first; set --rm_cascade, or leave it out",
        _all_judges(lambda api: api.cascade.model is None),
    ),
    "no_panel": Unused(
        "one judge scores alone; name further ones with --rm_panel, or leave it out",
        _all_judges(lambda api: not api.panel.judges),
    ),
    "no_other_judge": Unused(
        "no further judge is asked; name one with --rm_cascade or --rm_panel, or leave it out",
        _all_judges(lambda api: api.cascade.model is None and not api.panel.judges),
    ),
    "no_labels": Unused(
        "no labelled responses are named; set --rm_monitor_labels, or leave it out",
        _all_judges(lambda api: api.monitor.labels is None),
    ),
    "decision_endpoint": Unused(
        "a decision endpoint writes no text (reward.api.mode decision); leave it out",
        _all_judges(lambda api: api.mode == "decision"),
    ),
    "no_episodes": Unused(
        "each response is a single turn; set --environment or --tools, or leave it out",
        lambda c: not c.environment.is_set,
    ),
    "no_rubric": Unused(
        "no criteria are given; set --rm_rubric, or leave it out",
        _all_judges(lambda api: api.rubric is None),
    ),
    "none_held_out": Unused(
        "no criteria are held out; set --rm_rubric_held_out, or leave it out",
        _all_judges(lambda api: api.rubric_held_out is None),
    ),
    "votes_show_noise": Unused(
        "the votes on each response (reward.api.votes) show how much verdicts differ; leave it out",
        _all_judges(lambda api: not api.repeats),
    ),
    # Judges that do not read the setting: their kind of answer, prompt or comparison replaces it.
    "fixed_scale": Unused(
        "criteria (reward.api.rubric) and comparisons come to a score from 0 to 1; leave it out",
        _all_judges(lambda api: api.mode == "compare" or api.rubric is not None),
    ),
    "fixed_output": Unused(
        "a decision endpoint writes no text, and criteria, comparisons and places are decided in "
        "JSON; leave it out",
        _all_judges(lambda api: api.mode != "text" or bool(api.rubric or api.place)),
    ),
    "own_judge_prompt": Unused(
        "the judge has another prompt (reward.api.prompt_file, scoring_prompt, rubric or mode "
        "compare); leave one of them out",
        _all_judges(
            lambda api: (
                (api.prompt_file, api.scoring_prompt, api.rubric) != (None, None, None)
                or api.mode == "compare"
            ),
        ),
    ),
    "no_comparison": Unused(
        "no responses are compared; set --rm_mode compare, or leave it out",
        _all_judges(lambda api: api.mode != "compare"),
    ),
    "not_in_pairs": Unused(
        "no responses are compared in pairs; set --rm_mode compare and --rm_compare pairs, or "
        "leave it out",
        _all_judges(lambda api: (api.mode, api.compare) != ("compare", "pairs")),
    ),
    "own_prices": Unused(
        "reward.api.price_input and price_output say what a token costs; leave one of them out",
        _all_judges(lambda api: None not in (api.price_input, api.price_output)),
    ),
    "hedge_after_timeout": Unused(
        "a call has ended by then (reward.api.timeout); set a shorter time, or leave it out",
        _all_judges(lambda api: (api.hedge_after or 0) >= api.timeout),
    ),
    # The run's own rule or model, next to a mixture whose parts all name others.
    "every_rule_its_own": Unused(
        "no part of the mixture is scored by it; add --reward rule:0.5, or leave it out",
        lambda c: _run_rule_unused(c.reward),
        absent=True,
    ),
    "every_model_its_own": Unused(
        "no part of the mixture is scored by it; add --reward model:0.5, or leave it out",
        lambda c: _run_model_unused(c.reward),
        absent=True,
    ),
    "model_is_served": Unused(
        "the reward model runs at its server, which has its own settings; leave it out",
        _all_models(served=True),
    ),
    "model_is_local": Unused(
        "only a served reward model (--reward_model http://HOST) uses it; leave it out",
        _all_models(served=False),
    ),
    "mixture_off": Unused(
        "the mixture is off (reward.composite.enable false); leave that out, or this",
        lambda c: c.reward.composite.enable is False,
    ),
    # Penalties that are off.
    "no_overlong_buffer": Unused(
        "the over-long penalty is off; set --overlong_buffer TOKENS, or leave it out",
        lambda c: c.reward.shaping.overlong_buffer is None,
    ),
    "no_budget": Unused(
        "there is no budget; set --thought_budget or --answer_budget TOKENS, or leave it out",
        lambda c: (
            c.reward.shaping.thought_budget is None and c.reward.shaping.answer_budget is None
        ),
    ),
    "no_repetition_penalty": Unused(
        "the repetition penalty is off; set --repetition_penalty, or leave it out",
        lambda c: c.reward.shaping.repetition_penalty is None,
    ),
    # Samplers and devices: these concern memory and speed, so most of them are only remarked on.
    "hf_sampler": Unused(
        "the hf sampler has no such setting; use --rollout_name vllm, or leave it out",
        lambda c: c.rollout.name == "hf",
        tuning=True,
    ),
    "on_gpus": Unused(
        "on GPUs it follows from their number and --rollout_tp; leave it out",
        lambda c: c.trainer.n_gpus_per_node > 0,
    ),
    "nothing_sharded": Unused(
        "one process holds whole models and shards nothing; leave it out",
        lambda c: c.trainer.engine == "local",
        tuning=True,
    ),
    "no_workers": Unused(
        "one process has no workers and no nodes to lose; leave it out",
        lambda c: c.trainer.engine == "local",
        tuning=True,
    ),
    "nothing_to_offload": Unused(
        "in one process without a GPU everything is in host memory; leave it out",
        lambda c: c.trainer.engine == "local" and c.trainer.n_gpus_per_node == 0,
        tuning=True,
    ),
    "nothing_in_float32": Unused(
        "it is for models that compute in float32 on the CPU; leave it out",
        lambda c: c.trainer.n_gpus_per_node > 0 or c.model.dtype != "float32",
        tuning=True,
    ),
    "nothing_in_bfloat16": Unused(
        "all layers compute in float32 already; leave it out, or set --dtype bfloat16",
        lambda c: c.model.dtype == "float32",
    ),
    "nothing_to_spread": Unused(
        "weights are spread where matrices are multiplied in bfloat16 (--dtype bfloat16)",
        lambda c: c.model.dtype != "bfloat16",
        tuning=True,
    ),
    "nothing_to_share": Unused(
        "rows share a prompt where rollout.n is above 1 and they are packed (model.packing)",
        lambda c: c.rollout.n == 1 or c.model.packing is False,
        tuning=True,
    ),
    # LoRA and processes.
    "no_lora": Unused(
        "without LoRA (model.lora_rank 0) it changes nothing; leave it out",
        lambda c: c.model.lora_rank == 0,
    ),
    "no_critic_lora": Unused(
        "without LoRA for the critic (critic.model.lora_rank 0) it changes nothing; leave it out",
        lambda c: c.critic.model.lora_rank == 0,
    ),
    "no_adapter_sent": Unused(
        "it is for LoRA in several processes; leave it out",
        lambda c: c.model.lora_rank == 0 or c.trainer.engine == "local",
    ),
    "one_node": Unused(
        "with one node it changes nothing; leave it out", lambda c: c.trainer.nnodes == 1
    ),
    # Estimators and losses without such a parameter.
    "no_scale_factor": Unused(
        "it divides losses with loss_agg_mode=seq-mean-token-sum-norm; set that, or leave it out",
        lambda c: "seq-mean-token-sum-norm" not in (c.actor.loss_agg_mode, c.critic.loss_agg_mode),
    ),
    "no_critic": Unused(
        "only the estimator gae uses it; set --adv_estimator gae, or leave it out",
        lambda c: not c.uses_critic,
    ),
    "no_discount": Unused(
        "only gae and reinforce_plus_plus discount tokens; the estimators for pieces discount by "
        "algorithm.gamma_piece; leave it out",
        lambda c: not ESTIMATORS[c.algorithm.adv_estimator].discounts,
    ),
    "no_pieces": Unused(
        "only gae and the estimators for pieces use it; leave it out",
        lambda c: not c.uses_critic and not ESTIMATORS[c.algorithm.adv_estimator].pieces,
    ),
    "no_lam": Unused(
        "only the estimator gae uses it, until lam_alpha and critic.lam replace it; leave it out",
        lambda c: (
            not c.uses_critic
            or (c.algorithm.lam_alpha is not None and c.critic.lam != c.algorithm.lam)
        ),
    ),
    "not_grpo": Unused(
        "the estimator never divides by a deviation, or always; set --adv_estimator grpo, or leave "
        "it out",
        lambda c: not ESTIMATORS[c.algorithm.adv_estimator].scales,
    ),
    "no_dual_clip": Unused(
        "only the policy losses vanilla, dppo_tv and dppo_kl use it; leave it out",
        lambda c: not POLICY_LOSSES[c.actor.policy_loss.loss_mode].bounds,
    ),
    "no_clip": Unused(
        "the policy losses gpg, sapo and kl_cov do not clip; choose another with --policy_loss, or "
        "leave it out",
        lambda c: not POLICY_LOSSES[c.actor.policy_loss.loss_mode].clips,
    ),
    "no_filter_groups": Unused(
        "dynamic sampling is off; set algorithm.filter_groups.enable=true, or leave it out",
        lambda c: not c.algorithm.filter_groups.enable,
    ),
    "not_sapo": Unused(
        "only the policy loss sapo uses it; set --policy_loss sapo, or leave it out",
        lambda c: c.actor.policy_loss.loss_mode != "sapo",
    ),
    "no_positive_nll": Unused(
        "no likelihood of right answers is in the loss; set actor.positive_nll_coef=0.1, or leave "
        "it out",
        lambda c: c.actor.positive_nll_coef == 0,
    ),
    "not_clip_cov": Unused(
        "only the policy loss clip_cov uses it; set --policy_loss clip_cov, or leave it out",
        lambda c: c.actor.policy_loss.loss_mode != "clip_cov",
    ),
    "not_kl_cov": Unused(
        "only the policy loss kl_cov uses it; set --policy_loss kl_cov, or leave it out",
        lambda c: c.actor.policy_loss.loss_mode != "kl_cov",
    ),
    # The KL to the reference, and what compares sampler and trainer.
    "no_kl_in_reward": Unused(
        "the KL in the reward is off; set algorithm.use_kl_in_reward=true, or leave it out",
        lambda c: not c.algorithm.use_kl_in_reward,
    ),
    "no_kl_coef": Unused(
        "no KL has this weight; set algorithm.use_kl_in_reward=true or actor.use_kl_loss=true "
        "without another actor.kl_loss_coef, or leave it out",
        lambda c: (
            not c.algorithm.use_kl_in_reward
            and not (c.actor.use_kl_loss and c.actor.kl_loss_coef == c.algorithm.kl_ctrl.kl_coef)
        ),
    ),
    "kl_is_fixed": Unused(
        "only the adaptive controller of the KL in the reward uses it; set "
        "algorithm.use_kl_in_reward=true and algorithm.kl_ctrl.type=adaptive, or leave it out",
        lambda c: not c.algorithm.use_kl_in_reward or c.algorithm.kl_ctrl.type == "fixed",
    ),
    "no_kl_loss": Unused(
        "the KL loss is off; set actor.use_kl_loss=true, or leave it out",
        lambda c: not c.actor.use_kl_loss,
    ),
    "no_reference": Unused(
        "no reference is used; set algorithm.use_kl_in_reward=true or actor.use_kl_loss=true, or "
        "leave it out",
        lambda c: not c.uses_reference,
    ),
    "no_importance_weights": Unused(
        "the importance weights are off; set algorithm.rollout_correction.rollout_is=token, or "
        "leave it out",
        lambda c: c.algorithm.rollout_correction.rollout_is == "off",
    ),
    "not_watched": Unused(
        "built-in rules are not watched for exploits, only judges, reward models and functions; "
        "leave it out",
        lambda c: not is_watched(c.reward),
    ),
    "all_kept": Unused(
        "--on_hacking restrain keeps all checkpoints, to go back to; leave it out",
        lambda c: c.trainer.on_hacking == "restrain",
    ),
    "no_validation": Unused(
        "there are no validation prompts; name them with --val_files, or leave it out",
        lambda c: not c.data.val_files,
    ),
}


def find_unused(resolved: Resolved) -> Iterator[Finding]:
    """Yield a finding for the settings of one origin without effect by one condition."""
    config = resolved.config
    groups: dict[tuple[str, str, Kind], list[str]] = {}
    applies = cache(lambda name: UNUSED[name].applies(config))
    for name, key in table().items():
        origin = resolved.origins[name]
        # Nobody chose a default; a value that equals the default changes nothing.
        if origin.startswith(DEFAULT) or value_of(resolved.requested, name) == key.default:
            continue
        # The setting's own condition first, then those of its sections.
        condition = next(filter(applies, key.unused), None)
        if condition is not None:
            kind: Kind = "refuse" if _is_refused(resolved, name, condition) else "no_effect"
            groups.setdefault((origin, UNUSED[condition].text, kind), []).append(name)
    for (origin, text, kind), keys in groups.items():
        yield Finding(tuple(keys), f"{origin}: {', '.join(keys)} has no effect: {text}.", kind)


def has_effect(config: Config, declaration: Key | None) -> bool:
    """Return whether a setting has an effect: none of its conditions applies."""
    conditions = declaration.unused if declaration else ()
    return not any(UNUSED[name].applies(config) for name in conditions)


def describe_unused(key: str) -> Iterator[str]:
    """Yield a sentence for each condition under which a setting has no effect."""
    conditions = table()[key].unused
    return (f"{name.replace('_', ' ')}: {UNUSED[name].text}" for name in conditions)


def _is_refused(resolved: Resolved, key: str, condition: str) -> bool:
    """Return whether a setting without effect is an error: when somebody typed it for this run.

    A preset and a settings file serve many runs, so theirs are only remarked on.
    """
    origin, reason = resolved.origins[key], UNUSED[condition]
    if resolved.foreign or reason.tuning or origin.startswith(("preset ", "bundled prompts")):
        return False
    if reason.absent:
        return True
    if condition == "one_node" and origin.startswith("env "):
        return False  # launchers set MASTER_ADDR and NODE_RANK for one node as well
    twin = key.replace("critic.", "actor.", 1)
    if key.startswith("critic.") and resolved.origins.get(twin) == origin:
        # The older style has one name for both models: the actor's half has its effect.
        return bool(value_of(resolved.config, twin) != value_of(resolved.config, key))
    return origin == "override" or origin.startswith(("flag ", "env "))
