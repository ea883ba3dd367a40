"""The plan of a run: values with origins, arithmetic, reward, devices and memory; settings as YAML.

Here too is the default second judge, which scores a share of the responses and rewards none
(rewards/judge/monitor.py). Only commands that train or plan a training add one, so that resolving
does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ppo_cli.algo.estimators import ESTIMATORS
from ppo_cli.config.checks.models import critic_remarks, template_remarks
from ppo_cli.config.checks.runner import missing_inputs, missing_parts, refused_settings, remarks
from ppo_cli.config.derived import (
    critic_mini_batch,
    gen_batch,
    micro_batch_tokens,
    most_gen_batches,
    pretrain_steps,
    train_rows,
    uses_critic,
    val_rows,
)
from ppo_cli.config.layers import DEFAULT, INHERITED, Resolved, is_chosen, read_yaml
from ppo_cli.config.memory.disk import find_disk_shortage, plan_disk
from ppo_cli.config.memory.plan import memory_plan
from ppo_cli.config.mixture import judges_of, mixture_line, mixture_of, models_of, other_judges
from ppo_cli.config.models.known_models import JUDGES, choose_adapter, effective_provider
from ppo_cli.config.placement import PlanPart, data_ranks, plan_devices
from ppo_cli.config.schema.algorithm import Trained
from ppo_cli.config.schema.keys import table, value_of, with_settings
from ppo_cli.config.schema.reward import ApiReward, Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, UserError, plural
from ppo_cli.secrets.redact import mask_secrets, redact, redact_url

# Providers that need no more than a key.
_PUBLIC = ("claude", "openai", "gemini", "dashscope")
# The section of the second judge.
_MONITOR = "reward.api.monitor"


def add_second_judge(resolved: Resolved, environ: Mapping[str, str]) -> Resolved:
    """Return the settings with a second judge when none was chosen and the key of one is set.

    With a budget there is none: a judge that nobody chose must not spend it. All judges of the run
    must be at public addresses: responses that go to a private server may not go to others.
    """
    # Only next to judges that are all at public addresses.
    judges = [judge.settings for judge in judges_of(resolved.config.reward)]
    monitor_origins = (
        resolved.origins[f"{_MONITOR}.{name}"] for name in ("model", "base_url", "key_env")
    )
    if resolved.foreign or not judges or any(origin != DEFAULT for origin in monitor_origins):
        return resolved
    if any(api.monitor.model or not _is_public(api.type, api, environ) for api in judges):
        return resolved
    # A chosen provider limits the candidates; else all public ones that do not judge already.
    named = resolved.origins[f"{_MONITOR}.type"] != DEFAULT
    candidates = (resolved.config.reward.api.monitor.type,) if named else _PUBLIC
    used_types = {api.type for api in judges}
    used_keys = {api.key_env for api in judges}  # variables with the judges' own keys
    available = [
        (kind, key)
        for kind in candidates
        if kind not in used_types and _is_public(kind, None, environ)
        for key in JUDGES[kind].keys
        if key not in used_keys and environ.get(key, "").strip()
    ]
    if not available:
        # The first candidate in the order of _PUBLIC whose key is set.
        return resolved
    kind, key = available[0]
    model, share = JUDGES[kind].example, judges[0].monitor.share
    # A budget is for the judges that were chosen.
    if any(api.has_budget for api in judges):
        note = (
            f"{key} is set, but there is a budget, so no second judge is added by itself: "
            f"--rm_monitor_type {kind} --rm_monitor_model {model} names one."
        )
        return replace(resolved, notes=(*resolved.notes, note))
    note = (
        f"{key} is set, so {share:.0%} of the responses are also sent to {kind} ({model}), a "
        "second judge that rewards nothing (judge/drift); --rm_monitor_model none switches it off."
    )
    values: dict[str, Any] = {"type": kind, "model": model}
    # A run does not stop because of a judge that nobody chose.
    if resolved.origins[f"{_MONITOR}.required"] == DEFAULT:
        values["required"] = False
    changed = _set_monitor(resolved, values, f"default: {key} is set")
    return replace(changed, notes=(*changed.notes, note))


def restore_second_judge(
    resolved: Resolved, checkpoint: Path | None, tell: Callable[[str], None]
) -> Resolved:
    """Return the settings with the second judge, or none, with which the checkpoint's run began.

    Drift is measured against one judge, and a run that sends its responses to one provider must not
    start to send them to another. A second judge that was chosen stays.
    """
    monitor = resolved.config.reward.api.monitor
    if checkpoint is None or monitor.model is None or monitor.required:
        return resolved
    # What the run wrote when it began.
    file = checkpoint.parents[1] / "config.yaml"
    try:
        then = {e.name: e.raw for e in read_yaml(file, file.name)}
    except ConfigError:  # not of a run that this program has written
        return resolved
    names = ("type", "model", "required")
    # No second judge, unless the run had one by default.
    values: dict[str, Any] = {name: table()[f"{_MONITOR}.{name}"].default for name in names}
    if then.get(f"{_MONITOR}.required") == "false":
        values = {name: str(then[f"{_MONITOR}.{name}"]) for name in ("type", "model")}
    changed = _set_monitor(resolved, values, "as the run began")
    # Say something only if the second judge changes.
    now = changed.config.reward.api.monitor
    if now == monitor:
        return resolved
    tell(
        f"This run began with {now.model or 'no model'} as its second judge and continues with it."
    )
    return changed


def _is_public(kind: str, api: ApiReward | None, environ: Mapping[str, str]) -> bool:
    """Return whether a judge is at the public address of its provider."""
    # Variables that change a provider's address make it as private as a base_url does.
    moved = any(environ.get(name, "").strip() for name in JUDGES[kind].url_variables)
    own_address = api is not None and api.base_url is not None
    return (
        kind in _PUBLIC
        and effective_provider(kind, environ) == kind
        and not moved
        and not own_address
    )


def _set_monitor(resolved: Resolved, values: Mapping[str, Any], origin: str) -> Resolved:
    """Return the settings with these values for the second judge."""
    config = with_settings(resolved.config, {f"{_MONITOR}.{k}": v for k, v in values.items()})
    origins = resolved.origins | {f"{_MONITOR}.{name}": origin for name in values}
    return replace(resolved, config=config, origins=origins)


# What the plan shows of a part; its source is shown next to it.
SHOWN_FIELDS = ("name", "kind", "weight", "scaling", "mean", "std", "clip", "only_if", "on_failure")


def reward_plan(reward: Reward, responses: int | None) -> PlanPart:
    """Return the formula of a mixture, how its reward models are read, and each judge's calls.

    `responses` is the number that the whole run scores; None if unknown. There are no sentences
    when one rule, function or judge scores alone.
    """
    parts = mixture_of(reward)
    total = mixture_line(parts) if parts else None
    sentences, models, calls = [total] if total else [], [], {}
    # Reward models: how each is read.
    for model in models_of(reward):
        path, name = redact_url(str(model.settings.path)), model.name.removeprefix("the ")
        facts: dict[str, Any] = {"part": model.part, "path": path, "adapter": None}
        try:
            choice = choose_adapter(str(model.settings.path), model.settings.adapter)
            facts |= {"adapter": choice.adapter, "reason": redact(choice.reason)}
            sentences.append(f"{name}: {path} is read as {choice.adapter} ({facts['reason']})")
        except UserError as error:
            facts["problem"] = redact(str(error))
            sentences.append(f"{name}: {path} cannot be read: {facts['problem']}")
        models.append(facts)
    # Judges of parts: how often each is called.
    for judge in judges_of(reward):
        if judge.part is not None:
            judges_asked = [judge.settings, *other_judges(judge.settings)]
            votes = sum(api.most_votes for api in judges_asked)
            count = calls[judge.part] = _multiply(responses, votes)
            number = "unknown calls" if count is None else plural(count, "call")
            fewer = " at most" if judge.settings.max_votes else ""
            if judges_asked[1:]:
                others = " and ".join(str(api.model) for api in judges_asked[1:])
                fewer = f" at most, those of {others} included"
            if judge.only_if:
                fewer = f" at most: it is asked only if {judge.only_if}"
            name = judge.name.removeprefix("the ")
            sentences.append(f"{name}: {number} for responses in the run{fewer}")
    shown = [part.model_dump(include=set(SHOWN_FIELDS)) for part in parts]
    laid = {"total": total, "parts": shown, "models": models, "judge_calls": calls}
    return PlanPart(tuple(sentences), laid)


@dataclass(frozen=True)
class Plan:
    """A configuration and everything that follows from it, for people and for programs."""

    values: dict[str, tuple[Any, str]]
    arithmetic: dict[str, int | None]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]
    reward: PlanPart
    placement: PlanPart
    memory: PlanPart
    disk: PlanPart

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values = {k: {"value": v, "origin": o} for k, (v, o) in self.values.items()}
        return {
            "values": values,
            "arithmetic": self.arithmetic,
            "placement": self.placement.facts,
            "memory": self.memory.facts,
            "disk": self.disk.facts,
            "reward": self.reward.facts,
            "notes": list(self.notes),
        }

    def as_lines(
        self,
        judge: PlanPart,
        *,
        every: bool = False,
        debug: bool = False,
        left_out: Collection[str] = (),
    ) -> list[str]:
        """Return the plan as text, with the forecast of the judges.

        Without `every`, settings at their default are only counted; without `debug` there are no
        details. `left_out` are sentences that the caller prints elsewhere.
        """
        rows = [
            (key, _format_value(value), origin)
            for key, (value, origin) in self.values.items()
            if every or is_chosen(origin)
        ]
        # Settings that somebody has set come first.
        rows.sort(key=lambda row: (not is_chosen(row[2]), row[2] == DEFAULT))
        lines = ["Settings", *_format_settings(rows)]
        if hidden := len(self.values) - len(rows):
            fork = any(origin == INHERITED for _, origin in self.values.values())
            of_run = " or as in the forked run" if fork else ""
            lines.append(f"  and {hidden} at their default{of_run} (--all shows them)")
        parts = {
            "Arithmetic": self.sentences,
            "Devices": self.placement.sentences,
            "Memory": self.memory.sentences,
            "Details": self.memory.details if debug else (),
            "Disk": self.disk.sentences,
            "Reward": self.reward.sentences,
            "Judge": judge.sentences,
            "Notes": self.notes,
        }
        # Sections without sentences are left out.
        for title, sentences in parts.items():
            block = [f"  {s}" for s in sentences if s not in left_out]
            lines += ["", title, *block] if block else []
        return lines


def _format_settings(rows: list[tuple[str, str, str]]) -> list[str]:
    """Return aligned lines of key, value and origin; long values do not widen their column."""
    if not rows:
        return []
    first = max(len(row[0]) for row in rows)
    second = min(40, max(len(row[1]) for row in rows))
    return [f"  {key:<{first}}  {value:<{second}}  {origin}" for key, value, origin in rows]


def _format_value(value: object) -> str:
    """Return a setting's value as the plan shows it."""
    if value is None:
        return "unset"
    if isinstance(value, list):
        return ", ".join(_format_value(item) for item in value) or "none"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_format_value(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_plan(resolved: Resolved) -> Plan:
    """Return the plan of a resolved configuration.

    ConfigError has the settings that would keep a run from starting on any machine.
    """
    # Refuse what would stop a run anywhere, before anything is computed.
    if wrong := refused_settings(resolved):
        raise ConfigError(wrong)
    sums = batch_arithmetic(resolved.config)
    # Values with origins, remarks, and the parts of the plan.
    values = {
        key: (_to_plain(value_of(resolved.config, key)), origin)
        for key, origin in resolved.origins.items()
    }
    notes = [
        *resolved.notes,
        *missing_inputs(resolved.config),
        *missing_parts(resolved),
        *remarks(resolved),
        *critic_remarks(resolved.config),
        *template_remarks(resolved.config),
        *find_disk_shortage(resolved.config, sums["total_steps"]),
    ]
    return Plan(
        values,
        sums,
        tuple(_describe_arithmetic(sums)),
        tuple(dict.fromkeys(redact(note) for note in notes)),
        reward_plan(resolved.config.reward, sums["reward_calls"]),
        plan_devices(resolved.config),
        memory_plan(resolved.config),
        plan_disk(resolved.config, sums["total_steps"]),
    )


def batch_arithmetic(config: Config) -> dict[str, int | None]:
    """Return counts for a step and for the run; None is a count that is unknown before the run."""
    batch, n, rows = config.data.train_batch_size, config.rollout.n, train_rows(config)
    sums: dict[str, int | None] = {
        "prompts_per_step": batch,
        "responses_per_prompt": n,
        "responses_per_step": batch * n,
        "train_rows": rows,
    }
    # Optimizer steps of each model.
    steps = _count_steps(config, rows)
    sums["total_steps"] = steps
    sums |= _count_updates("actor", config, config.actor, config.actor.ppo_mini_batch_size)
    if uses_critic(config):
        sums |= _count_updates("critic", config, config.critic, critic_mini_batch(config))
    for who in ("actor", "critic"):
        a_step = sums.get(f"{who}_optimizer_steps_per_step")
        if a_step is not None:
            sums[f"{who}_optimizer_steps"] = _multiply(a_step, steps)
    calls = _count_reward_calls(config, steps)
    if pretraining_steps := pretrain_steps(config):
        sums["pretraining_steps_at_most"] = pretraining_steps
        sums["reward_calls_pretraining"] = pretraining_steps * batch * n
    # Dynamic sampling may sample several batches for one step.
    groups = config.algorithm.filter_groups
    if groups.enable:
        max_batches = groups.max_num_gen_batches or (rows and most_gen_batches(config, rows))
        sums["gen_batches_per_step_at_most"] = max_batches
        sums["reward_calls_per_step_at_most"] = _multiply(
            max_batches, calls["reward_calls_per_step"]
        )
        sums["reward_calls_at_most"] = _multiply(sums["reward_calls_per_step_at_most"], steps)
    return sums | calls


def _count_updates(who: str, config: Config, part: Trained, mini: int) -> dict[str, int]:
    """Return mini-batches, epochs and optimizer steps of one model for a step."""
    # Mini-batches are given in prompts, and a model reads responses.
    sequences = mini * config.rollout.n
    epochs: int = value_of(config, f"{who}.ppo_epochs")
    minis = config.data.train_batch_size // mini
    return {
        f"{who}_mini_batches_per_epoch": minis,
        f"{who}_mini_batch_responses": sequences,
        f"{who}_micro_batches_at_most": _count_micro_batches(config, part, sequences),
        f"{who}_epochs": epochs,
        f"{who}_optimizer_steps_per_step": minis * epochs,
    }


def _count_micro_batches(config: Config, part: Trained, sequences: int) -> int:
    """Return the micro-batches of one rank if every response has the maximum length."""
    # Per rank: its share of the responses, in micro-batches of a fixed size or of a token budget.
    rank_sequences = math.ceil(sequences / data_ranks(config))
    longest = config.data.max_prompt_length + config.data.max_response_length
    fits = max(1, micro_batch_tokens(config, part.ppo_max_token_len_per_gpu) // longest)
    return math.ceil(rank_sequences / (part.ppo_micro_batch_size_per_gpu or fits))


def _count_steps(config: Config, rows: int | None) -> int | None:
    """Return the number of training steps; None while the rows are unknown."""
    # As set, else the whole batches of all epochs.
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if rows is None:
        return None
    return config.trainer.total_epochs * (rows // gen_batch(config))


def _count_reward_calls(config: Config, steps: int | None) -> dict[str, int | None]:
    """Return the reward calls of a step, of validation, and of the run."""
    n = config.rollout.n
    a_step = gen_batch(config) * n
    # remax also scores a greedy response to each prompt.
    if ESTIMATORS[config.algorithm.adv_estimator].baseline:
        a_step += config.data.train_batch_size
    # Validation calls.
    rounds = _count_validations(config, steps) if config.data.val_files else 0
    rows = val_rows(config)
    a_round = _multiply(config.rollout.val_kwargs.n, rows)
    validation = _multiply(a_round, rounds) if rounds != 0 else 0
    training = _multiply(a_step, steps)
    total = None
    if training is not None and validation is not None:
        total = training + validation + pretrain_steps(config) * config.data.train_batch_size * n
    return {
        "reward_calls_per_step": a_step,
        "validation_rows": rows,
        "validation_rounds": rounds,
        "reward_calls_validation": validation,
        "reward_calls": total,
    }


def _count_validations(config: Config, steps: int | None) -> int | None:
    """Return how often the run validates: at the start, every test_freq steps, at the end."""
    if steps is None:
        return None
    # A last step that test_freq does not divide is validated too.
    start = int(config.trainer.val_before_train)
    freq = config.trainer.test_freq
    if freq < 1:
        return start + 1
    return start + math.ceil(steps / freq)


def _multiply(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def _to_plain(value: Any) -> Any:
    """Return a value as JSON, with secrets masked."""
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in mask_secrets(value).items()}
    return mask_secrets(value) if isinstance(value, str) else value


def _describe_arithmetic(sums: dict[str, int | None]) -> list[str]:
    """Return the counts as sentences, from prompts to optimizer steps."""
    lines = [
        "a step: {prompts_per_step} prompts x {responses_per_prompt} = "
        "{responses_per_step} responses = {reward_calls_per_step} reward calls",
    ]
    if "gen_batches_per_step_at_most" in sums:
        lines.append(
            "dynamic sampling: a step samples 1 to {gen_batches_per_step_at_most} batches of "
            "prompts, so up to {reward_calls_per_step_at_most} reward calls; the run up to "
            "{reward_calls_at_most}"
        )
    for who in ("actor", "critic"):
        if f"{who}_epochs" in sums:
            lines.append(
                f"{who}: {{{who}_mini_batches_per_epoch}} mini-batches of "
                f"{{{who}_mini_batch_responses}} responses x {{{who}_epochs}} epochs = "
                f"{{{who}_optimizer_steps_per_step}} optimizer steps a step, each in at most "
                f"{{{who}_micro_batches_at_most}} micro-batches"
            )
    if "pretraining_steps_at_most" in sums:
        lines.append(
            "critic pretraining: up to {pretraining_steps_at_most} steps before the first one, "
            "{reward_calls_pretraining} reward calls"
        )
    lines.append(
        "the run: {train_rows} training rows, {total_steps} steps, "
        "{actor_optimizer_steps} actor optimizer steps"
    )
    # Reward calls, with those of validation.
    validations = (
        "{reward_calls_validation} of them for {validation_rounds} validations of "
        "{validation_rows} rows"
    )
    none = "none of them for validation (--val_files)"
    lines.append(
        "reward: {reward_calls} calls in all, "
        + (none if sums["validation_rounds"] == 0 else validations)
    )
    # Counts that are unknown before the run say so.
    texts = {k: "unknown" if v is None else f"{v:,}" for k, v in sums.items()}
    return [_singular(line.format(**texts)) for line in lines]


def _singular(line: str) -> str:
    """Write `1 epoch` for `1 epochs`."""
    things = "prompt|response|mini-batch|micro-batch|epoch|step|validation|row|optimizer step"
    return re.sub(rf"(?<![\d,])1 ((?:actor |training )?(?:{things}))(?:es|s)\b", r"1 \1", line)


YAML_HEADER = (
    "# Resolved settings, each with where it came from. Use again: ppo train --config FILE\n"
)


def config_yaml(resolved: Resolved) -> str:
    """Return every setting as YAML with its origin as a comment, without secrets."""
    return YAML_HEADER + "\n".join(_yaml_lines(resolved)) + "\n"


def _yaml_lines(resolved: Resolved) -> Iterator[str]:
    """Yield config.yaml line by line: groups, values and their origins."""
    opened: set[str] = set()
    for key, origin in resolved.origins.items():
        *groups, leaf = key.split(".")
        # Open each group once, in the order of the schema.
        for depth, group in enumerate(groups):
            if (name := ".".join(groups[: depth + 1])) not in opened:
                opened.add(name)
                yield f"{'  ' * depth}{group}:"
        value = _as_yaml(mask_secrets(value_of(resolved.config, key)))
        yield f"{'  ' * len(groups)}{leaf}: {value}  # {redact(origin)}"


class _OnOneLine(yaml.SafeDumper):
    """Writes texts in quotes, so that YAML reads none as another type."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"')


_OnOneLine.add_representer(str, _OnOneLine.represent_str)


def _as_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    # Flow style on one line: a comment with the origin follows it.
    text: str = yaml.dump(
        value, Dumper=_OnOneLine, default_flow_style=True, width=10**9, allow_unicode=True,
        line_break="\n", sort_keys=False,
    )  # fmt: skip
    return text.removesuffix("...\n").strip()
