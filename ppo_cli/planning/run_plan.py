"""The plan of a run: every setting with its value and reason, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ppo_cli.config.layers import DEFAULT
from ppo_cli.config.mixture import judges_of, mixture_line, mixture_of, models_of, other_judges
from ppo_cli.config.models.known_models import choose_adapter
from ppo_cli.config.schema.finding import Finding
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, UserError, plural
from ppo_cli.planning.batches import (
    batch_arithmetic,
    count_micro_batches,
    describe_arithmetic,
    multiply,
)
from ppo_cli.planning.findings.rules import find_findings, list_texts
from ppo_cli.planning.memory.disk import find_disk_shortage, plan_disk
from ppo_cli.planning.memory.plan import fit_memory, memory_plan
from ppo_cli.planning.placement import Placement, PlanPart, placement_of, plan_devices
from ppo_cli.planning.resolved import Resolved
from ppo_cli.secrets.redact import mask_secrets, redact, redact_url

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
            votes = sum(api.max_votes for api in judges_asked)
            count = calls[judge.part] = multiply(responses, votes)
            number = "unknown calls" if count is None else plural(count, "call")
            fewer = " at most" if judge.settings.asks_on else ""
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
class RunPlan:
    """What a run does, decided once: `ppo plan` prints it, `ppo train` runs it.

    In `settings` nothing is undecided; `why` has the reasons of what nobody has set. `plan.json`
    keeps it with the run.
    """

    resolved: Resolved
    settings: Config
    why: Mapping[str, str]
    placement: Placement
    values: dict[str, tuple[Any, str]]  # as JSON values, with their origins
    arithmetic: dict[str, int | None]
    sentences: tuple[str, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]  # remarks of the layers, and the sentences of the findings
    reward: PlanPart
    devices: PlanPart
    memory: PlanPart
    disk: PlanPart

    def amend(self, values: Mapping[str, Any], origin: str) -> RunPlan:
        """Return the plan with these values, and with what follows from them."""
        return make_plan(self.resolved.amend(values, origin))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        values: dict[str, dict[str, Any]] = {
            key: {"value": value, "origin": origin} for key, (value, origin) in self.values.items()
        }
        for key, fact in values.items():
            if fact["value"] is None and table()[key].absent:
                fact["means"] = table()[key].absent
        # Decisions for parts of a mixture and further judges are below settings of free form.
        for key, why in self.why.items():
            decided = {"value": _to_plain(value_of(self.settings, key)), "origin": DEFAULT}
            values[key] = values.get(key, decided) | {"why": why}
        return {
            "values": values,
            "arithmetic": self.arithmetic,
            "placement": self.devices.facts,
            "memory": self.memory.facts,
            "disk": self.disk.facts,
            "reward": self.reward.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }


def make_plan(resolved: Resolved, findings: tuple[Finding, ...] | None = None) -> RunPlan:
    """Return the plan of a resolved configuration, and of what was found about it.

    ConfigError has the settings that would keep a run from starting on any machine.
    """
    if findings is None:
        findings = find_findings(resolved)
    if wrong := list_texts(findings, "refuse"):
        raise ConfigError(wrong)
    fitted, machine = fit_memory(resolved), resolved.machine
    config = fitted.config
    sums = batch_arithmetic(config) | count_micro_batches(config)
    disk = plan_disk(config, sums["total_steps"])
    shortages = find_disk_shortage(disk, config.trainer.output_dir)
    findings += tuple(Finding(("trainer.output_dir",), text, "remark") for text in shortages)
    notes = [*resolved.notes, *(finding.text for finding in findings)]
    reason = fitted.why.get("algorithm.adv_estimator", "as set")
    advantages = f"advantages: {config.algorithm.adv_estimator} ({reason})"
    return RunPlan(
        resolved,
        config,
        fitted.why,
        placement_of(config),
        {k: (_to_plain(value_of(config, k)), origin) for k, origin in resolved.origins.items()},
        sums,
        (*describe_arithmetic(sums), advantages),
        findings,
        tuple(dict.fromkeys(redact(note) for note in notes)),
        reward_plan(config.reward, sums["reward_calls"]),
        plan_devices(config, machine, fitted.why),
        memory_plan(resolved.requested, fitted, machine),
        disk,
    )


def _to_plain(value: Any) -> Any:
    """Return a value as JSON, with secrets masked."""
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {k: _to_plain(v) for k, v in mask_secrets(value).items()}
    return mask_secrets(value) if isinstance(value, str) else value
