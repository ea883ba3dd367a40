"""`ppo plan`: each setting with its origin, batch arithmetic, devices, reward, a judge's cost."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import typer

from ppo_cli.cli.flags import Given, add_command, switch
from ppo_cli.config.bundled import model_folder, prompt_files
from ppo_cli.config.derived import too_few_rows, train_rows
from ppo_cli.config.judge_checks import missing_keys
from ppo_cli.config.mixture import judges_of, rules_of
from ppo_cli.config.model_checks import check_folder
from ppo_cli.config.placement import PlanPart
from ppo_cli.config.plan import Plan, make_plan
from ppo_cli.config.requirements import (
    missing_gpus,
    missing_inputs,
    missing_parts,
    refused_settings,
)
from ppo_cli.config.resolve import Resolved
from ppo_cli.config.reward_schema import Composite, ModelReward
from ppo_cli.config.schema import Config
from ppo_cli.data_sets.files import check_readable, count_rows, is_hub_name
from ppo_cli.errors import ConfigError, UserError, ppo
from ppo_cli.records import Prompt
from ppo_cli.redact import redact

NO_FORECAST = "no forecast: "
MOST_ROWS = 10_000  # a plan takes a second or two, however many rows there are
EPILOG = "Example: ppo plan --preset gsm8k --batch_size 128   or, for programs: ppo plan --json"


def plan(given: Given) -> None:
    """Show every setting with its origin, and the batch arithmetic."""
    resolved = given.resolve_node()
    problems = list(dict.fromkeys([*refusals(resolved), *refused_rows(resolved.config)]))
    if refused_settings(resolved):  # there is nothing to lay out
        raise ConfigError(problems)
    if given.extras["json"]:
        made, judge = _lay_out(resolved)
        facts = made.as_dict() | judge.facts | {"problems": problems}
        print(json.dumps(facts, indent=2))
    else:
        print_plan(resolved, every=bool(given.extras["all"]), problems=problems)
    if problems:
        raise ConfigError(problems)


def refusals(resolved: Resolved) -> list[str]:
    """Return why a run would end before it begins, as far as no model has to be loaded for it.

    GPUs and keys may be absent where a run is only planned: they are remarks of a plan.
    """
    config = resolved.config
    if config.trainer.node_rank:  # node 0 has the files, and compares the rest
        return []
    allowed = [*missing_keys(config, os.environ), *missing_gpus(config)]
    found = [*missing_parts(resolved), *missing_inputs(config)]
    problems = [line for line in found if line not in allowed]
    problems += _failing(_file_checks(config))
    return [redact(line) for line in dict.fromkeys(problems)]


def refused_rows(config: Config) -> list[str]:
    """Return why a run would end once it has read its rows: bad ones, too few, or without truths.

    The first MOST_ROWS of each split are read, and nothing that is not on this disk.
    """
    if config.trainer.node_rank:
        return []
    from ppo_cli.data_sets.rows import load_sets, prompt_of
    from ppo_cli.trust.sources import row_checks

    problems: list[str] = []
    prompts: list[Prompt] = []
    far = False
    for files, most in _splits(config):
        near = [name for name in files if not is_hub_name(name)]
        far = far or len(near) < len(files)
        try:
            sets = load_sets(
                near,
                prompt_key=config.data.prompt_key,
                source_key=config.data.reward_fn_key,
                max_samples=most,
                at_most=MOST_ROWS,
            ) if near else []  # fmt: skip
        except UserError as error:
            problems.append(str(error))
        else:
            prompts += [prompt_of(rows.label, row) for rows in sets for row in rows.rows]
    rows, batch = train_rows(config), config.data.train_batch_size
    if rows and rows < batch:
        problems.append(too_few_rows(rows, batch, config.actor.ppo_mini_batch_size))
    if not problems and prompts:
        problems += _failing(row_checks(config.reward, prompts, all_known=not far))
    return [redact(line) for line in dict.fromkeys(problems)]


def _splits(config: Config) -> Iterator[tuple[tuple[str, ...], int]]:
    """Give the files of each split with the most rows that are used of them."""
    data = config.data
    for files, most in (
        (prompt_files(data.train_files, "train"), data.train_max_samples),
        (prompt_files(data.val_files, "val"), data.val_max_samples),
    ):
        if files:
            yield files, most


def _failing(checks: Iterable[Callable[[], object]]) -> list[str]:
    problems = []
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    return problems


def unread_rows(config: Config) -> list[str]:
    """Say of which files a plan has read the first rows only."""
    said = []
    for files, _ in _splits(config):
        counts = [count_rows(name) or 0 for name in files]
        if sum(counts) > MOST_ROWS:
            line = ppo(shlex.join(["data", "check", *files]))
            said.append(
                f"Only the first {MOST_ROWS:,} of {sum(counts):,} rows were read for this plan; "
                f"`{line}` checks them all."
            )
    return said


def _file_checks(config: Config) -> Iterator[Callable[[], object]]:
    """Yield what a run does first with each file and package that is named."""
    from ppo_cli.report.tracker import check_loggers

    for name in chain.from_iterable(files for files, _ in _splits(config)):
        if not is_hub_name(name):
            yield partial(check_readable, Path(name).expanduser())
    models = {"--model": config.model.path, "--critic_model": config.critic.model.path}
    for flag, path in (models | {"ref.path": config.ref.path}).items():
        if path is not None:
            yield partial(check_folder, model_folder(path), flag)
    rules = rules_of(config.reward)
    if judges_of(config.reward) or any(rule.function or rule.rule for rule in rules):
        from ppo_cli.trust.sources import file_checks

        yield from file_checks(config.reward)
    yield partial(check_loggers, config.trainer.logger)


def print_plan(resolved: Resolved, *, every: bool = False, problems: Sequence[str] = ()) -> None:
    """Print the plan for people: what was set first, then what it comes to.

    Without `every`, settings at their default are counted only. Problems are printed later and
    are left out of the notes.
    """
    made, judge = _lay_out(resolved)
    rows = [(k, _shown(v), o) for k, (v, o) in made.values.items() if every or o != "default"]
    rows.sort(key=lambda row: row[2] == "default")
    lines = ["Settings", *_columns(rows)]
    if hidden := len(made.values) - len(rows):
        lines.append(f"  and {hidden} at their default (--all shows them)")
    parts = {
        "Arithmetic": made.sentences,
        "Devices": made.placement.sentences,
        "Reward": made.reward.sentences,
        "Judge": judge.sentences,
        "Notes": made.notes,
    }
    for title, sentences in parts.items():
        said = [f"  {s}" for s in sentences if s.removeprefix(NO_FORECAST) not in problems]
        lines += ["", title, *said] if said else []
    print("\n".join(lines), flush=True)


def _lay_out(resolved: Resolved) -> tuple[Plan, PlanPart]:
    """Return the plan of a run and what its judges will take."""
    made = make_plan(resolved)
    notes = (*made.notes, *unread_rows(resolved.config))
    return replace(made, notes=notes), _judge_plan(resolved.config)


def _judge_plan(config: Config) -> PlanPart:
    """Forecast what judges take, or say why not; empty without any."""
    judges = judges_of(config.reward)
    if not judges:
        return PlanPart((), {})
    from ppo_cli.trust.forecast import forecast

    forecasts: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for judge in judges:
        only = {
            "api": judge.settings, "parts": (), "composite": Composite(), "model": ModelReward(),
        }  # fmt: skip
        alone = config.model_copy(update={"reward": config.reward.model_copy(update=only)})
        try:
            found = forecast(alone)
            said, facts = found.lines(), found.as_dict()
        except UserError as error:
            facts = {"problem": redact(str(error))}
            said = [f"{NO_FORECAST}{facts['problem']}"]
        if judge.only_if:
            said.append(f"it is asked only if {judge.only_if}: so much at most")
            facts["only_if"] = judge.only_if
        several = judge.part not in (None, "judge")
        lines += [f"{judge.part}: {line}" for line in said] if several else said
        forecasts[judge.part or "judge"] = facts
    first = next(iter(forecasts.values()))
    whole = first if len(judges) == 1 else first | {"judges": forecasts}
    return PlanPart(tuple(lines), {"judge": whole})


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
add_command(
    app,
    plan,
    EPILOG,
    [
        switch("all", "Also the settings at their default."),
        switch("json", "Machine-readable, to stdout."),
    ],
)
