"""`ppo plan`: each setting with its origin, batch arithmetic, devices, reward, a judge's cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer

from ppo_cli.cli.flags import Given, SettingsCommand, switch, takes_settings
from ppo_cli.config.model_folder import broken_models
from ppo_cli.config.plan import Plan, make_plan
from ppo_cli.config.resolve import Resolved
from ppo_cli.config.rewarding import Composite, ModelReward
from ppo_cli.config.schema import Config
from ppo_cli.config.scorers import Judge, judges_of
from ppo_cli.errors import ConfigError, UserError
from ppo_cli.redact import redact

EPILOG = "Example: ppo plan --preset gsm8k --batch_size 128   or, for programs: ppo plan --json"


def plan(given: Given) -> None:
    """Show every setting with its origin, and the batch arithmetic."""
    resolved = given.resolve_node()
    refuse_broken(resolved)
    if given.extras["json"]:
        print(json.dumps(plan_dict(resolved), indent=2))
    else:
        print_plan(resolved, every=bool(given.extras["all"]))


def refuse_broken(resolved: Resolved) -> None:
    """Raise a ConfigError for model folders that are here and cannot be trained."""
    if broken := broken_models(resolved.config):
        raise ConfigError(broken)


def print_plan(resolved: Resolved, *, every: bool = False) -> None:
    """Print the plan for people: what was set first, then what it comes to."""
    said, _ = _judge(resolved.config)
    print("\n".join(plan_lines(make_plan(resolved), every=every, judge=said)))


def plan_dict(resolved: Resolved) -> dict[str, Any]:
    """Return the plan for programs; with judges, their forecast under `judge`."""
    _, told = _judge(resolved.config)
    return make_plan(resolved).as_dict() | ({"judge": told} if told else {})


def _judge(config: Config) -> tuple[list[str], dict[str, Any]]:
    """Forecast what judges take, as lines and for JSON, or say why not; empty without any."""
    told: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for judge in judges_of(config.reward):
        said, found = _forecast(alone(config, judge))
        if judge.only_if:
            said.append(f"it is asked only if {judge.only_if}: so much at most")
        several = judge.part not in (None, "judge")
        lines += [f"{judge.part}: {line}" for line in said] if several else said
        told[judge.part or "judge"] = found | ({"only_if": judge.only_if} if judge.only_if else {})
    if not told:
        return [], {}
    first = next(iter(told.values()))
    return lines, first if len(told) == 1 else first | {"judges": told}


def alone(config: Config, judge: Judge) -> Config:
    """Return the settings of a run that this judge would score by itself."""
    only = {"api": judge.settings, "parts": (), "composite": Composite(), "model": ModelReward()}
    return config.model_copy(update={"reward": config.reward.model_copy(update=only)})


def _forecast(config: Config) -> tuple[list[str], dict[str, Any]]:
    from ppo_cli.trust.forecast import forecast

    try:
        found = forecast(config)
    except UserError as error:
        problem = redact(str(error))
        return [f"no forecast: {problem}"], {"problem": problem}
    return found.lines(), found.as_dict()


def plan_lines(made: Plan, *, every: bool = False, judge: Sequence[str] = ()) -> list[str]:
    """Return the lines of a plan; without `every`, settings at their default are counted."""
    rows = [(k, _shown(v), o) for k, (v, o) in made.values.items() if every or o != "default"]
    rows.sort(key=lambda row: row[2] == "default")
    hidden = len(made.values) - len(rows)
    lines = ["Settings", *_columns(rows)]
    if hidden:
        lines.append(f"  and {hidden} at their default (--all shows them)")
    lines += ["", "Arithmetic", *(f"  {line}" for line in made.sentences)]
    lines += ["", "Devices", *(f"  {line}" for line in made.placement.sentences)]
    if reward := made.reward.lines():
        lines += ["", "Reward", *(f"  {line}" for line in reward)]
    if judge:
        lines += ["", "Judge", *(f"  {line}" for line in judge)]
    if made.notes:
        lines += ["", "Notes", *(f"  {note}" for note in made.notes)]
    return lines


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    if not rows:
        return []
    first = max(len(row[0]) for row in rows)
    second = min(40, max(len(row[1]) for row in rows))
    return [f"  {key:<{first}}  {value:<{second}}  {origin}" for key, value, origin in rows]


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value) or "none"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shown(item)}' for key, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=SettingsCommand, epilog=EPILOG)(
    takes_settings(
        plan,
        [
            switch("all", "Also the settings at their default."),
            switch("json", "Machine-readable, to stdout."),
        ],
    )
)
