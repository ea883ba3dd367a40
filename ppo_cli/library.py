"""The Python interface, `from ppo_cli import …`: train, session, plan, load_run; data frames.

Settings, checks and errors are those of the commands: a mistake raises a UserError that says what
to do, a run that stopped early and can be resumed raises Interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ppo_cli.atomic import atomic_replace
from ppo_cli.callables import name_of, write_function, write_rows
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, collect_problems
from ppo_cli.paths import user_path
from ppo_cli.planning.findings.rules import find_findings, list_texts
from ppo_cli.planning.findings.run import refused_in_session
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import RunPlan, make_plan
from ppo_cli.planning.second_judge import add_second_judge
from ppo_cli.run_folder.folder import RunFolder, check_run_folder, run_settings
from ppo_cli.run_folder.lines import read_lines, read_metrics, rollout_file, rollout_steps
from ppo_cli.run_folder.store import localise

if TYPE_CHECKING:
    import pandas

    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.session import Session

# Arguments that are not flags -> settings.
ARGUMENTS = {
    "loss": "actor.policy_loss.loss_mode", "estimator": "algorithm.adv_estimator",
    "rows": "data.train_files", "val_rows": "data.val_files",
}  # fmt: skip
# Settings that take a function.
FUNCTIONS = ("reward.function", "environment.path", ARGUMENTS["loss"], ARGUMENTS["estimator"])
ConfigFiles = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
INPUTS = "inputs"  # the folder for functions and rows in a run folder


@dataclass(frozen=True)
class Run:
    """A run folder: its settings, metrics and responses."""

    path: Path

    @cached_property
    def config(self) -> Config:
        """The settings of the run."""
        return run_settings(self.path)

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row per step, a column per metric; indexed by step, 0 for the first validation."""
        # Only this property and the next one need pandas.
        import pandas

        return pandas.DataFrame(read_metrics(self.path)).set_index("step")

    @property
    def rollouts(self) -> pandas.DataFrame:
        """A row per response of all steps: step, split (train or val), prompt, response, score …"""
        import pandas

        # Training steps first, then validations; each row says which one it is from.
        rows = [
            {"step": step, "split": split} | line
            for split in ("train", "val")
            for step in rollout_steps(self.path, split)
            for line in read_lines(rollout_file(self.path, step, split))
        ]
        return pandas.DataFrame(rows)


def load_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder (an `output_dir`); raises DataError if it is not one.

    The run at an address (s3://…) is copied to this machine, without its checkpoints.
    """
    folder = localise(path, small=True)
    check_run_folder(folder)
    return Run(folder)


def plan(
    *,
    preset: str | None = None,
    config: ConfigFiles = (),
    overrides: Mapping[str, Any] | None = None,
    stepwise: bool = False,
    **settings: Any,
) -> RunPlan:
    """Plan a run with these settings, as `ppo plan` does; no model is loaded.

    See `train` for the arguments; `stepwise` plans a `session`. Raises ConfigError with all that
    would stop the run, but for keys and GPUs that this machine lacks: the plan names these.
    """
    function = "session" if stepwise else "train"
    with TemporaryDirectory() as folder:
        resolved = _resolve(Path(folder), function, preset, config, overrides, settings, plan=True)
        forecast = make_plan(resolved)
    values = {key: _rename(value, folder, INPUTS) for key, value in forecast.values.items()}
    return replace(forecast, values=values)


def train(
    *,
    preset: str | None = None,
    config: ConfigFiles = (),
    overrides: Mapping[str, Any] | None = None,
    screen: Screen | None = None,
    **settings: Any,
) -> Run:
    """Train on this machine, as `ppo train`; returns the run when it is done.

    `settings` are flags without dashes (`model="embedded"`, `max_steps=10`), `overrides` other
    settings by their key (`{"actor.clip_ratio_high": 0.28}`), `config` YAML files, of which later
    ones win. `reward`, `loss`, `estimator` and `environment` may be functions, `rows` and
    `val_rows` lists of dicts; they are written to the run folder (docs/library.md). `screen` shows
    the progress; without one nothing is printed.
    """
    resolved = _resolve_run("train", preset, config, overrides, settings)
    # Imported here, because this loads torch.
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.assemble import train as train_now

    train_now(make_plan(resolved), screen or Screen())
    return load_run(resolved.config.trainer.output_dir)


def session(
    *,
    preset: str | None = None,
    config: ConfigFiles = (),
    overrides: Mapping[str, Any] | None = None,
    screen: Screen | None = None,
    **settings: Any,
) -> Session:
    """Open a run to train it step by step with your own scores; use it in a `with` block.

    See `train` for the arguments, `Session` for the methods. The configured reward, by default the
    rules by data_source, scores the validations and `Session.reward`; a session may have none.
    Raises UserError as `train` does, also for settings that need the scores while sampling.
    """
    resolved = _resolve_run("session", preset, config, overrides, settings)
    # Imported here, because this loads torch.
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.session import Session

    return Session(make_plan(resolved), screen or Screen())


def _resolve_run(function: str, *arguments: Any) -> Resolved:
    """Resolve the arguments of `train` or `session`; functions and rows are in the run folder."""
    with TemporaryDirectory() as scratch:
        resolved = _resolve(Path(scratch), function, *arguments)
        folder = user_path(resolved.config.trainer.output_dir).absolute()
        for path in [*Path(scratch).rglob("*.py"), *Path(scratch).rglob("*.jsonl")]:
            RunFolder(folder).prepare()
            place = folder / INPUTS / path.relative_to(scratch)
            # A file that exists does the same, but may have other line numbers.
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                with atomic_replace(place) as fresh:
                    fresh.write_bytes(path.read_bytes())
    # The settings name the files in the run folder.
    values = {
        key: _rename(value_of(resolved.requested, key), scratch, f"{folder / INPUTS}")
        for key in (*FUNCTIONS, *ARGUMENTS.values())
    }
    return resolved.amend(values)


def _rename(value: Any, old: str, new: str) -> Any:
    """Return a text, or a list of texts, with a part replaced."""
    if isinstance(value, list | tuple):
        return type(value)(_rename(item, old, new) for item in value)
    return value.replace(old, new) if isinstance(value, str) else value


def _resolve(
    folder: Path,
    function: str,
    preset: str | None,
    config: ConfigFiles,
    overrides: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    *,
    plan: bool = False,
) -> Resolved:
    """Resolve the arguments of `train` or `session`, which `function` names.

    Functions and rows are written to `folder`. Raises ConfigError with all problems; for a `plan`
    this machine may lack keys and GPUs.
    """
    # Flags by name: the library's arguments are the flags without their dashes.
    flags = {key.flag.removeprefix("--"): key.name for key in table().values() if key.flag}
    flags |= ARGUMENTS
    if callable(settings.get("reward")):  # otherwise it names parts of a mixture
        flags["reward"] = "reward.function"
    problems: list[str] = []
    values: dict[str, tuple[Any, str]] = {}  # with their origins, for messages and the plan
    checks: list[Callable[[Mapping[str, Any]], object]] = []
    labels: dict[str, str] = {}  # what messages say in place of files that are written here
    if not isinstance(overrides or {}, Mapping):
        raise ConfigError("overrides is not a dict such as {'actor.clip_ratio_high': 0.28}.")
    for kind, name, key, value in [
        *(("argument", name, flags.get(name, ""), value) for name, value in settings.items()),
        *(("override", key, key, value) for key, value in (overrides or {}).items()),
    ]:
        if not key:
            text = f"There is no setting {name}; give those without a flag as overrides={{…}}."
            problems.append(text)
            continue
        if kind == "argument" and key in values:
            problems.append(f"{values[key][1]} and argument {name} both set {key}; keep one.")
        try:
            if name in ("rows", "val_rows"):
                if value is None:  # as if it were left out
                    continue
                # An empty list turns validation off, as val_files=[] does.
                if name == "rows" or not isinstance(value, list) or value:
                    value = [write_rows(folder, name, value)]
                    labels[value[0]] = name
            elif key in FUNCTIONS and not isinstance(value, str | os.PathLike | None):
                if key == "reward.function":
                    from ppo_cli.rewards.function import check_callable

                    checks.append(partial(check_callable, value))
                label, value = f"{name}={name_of(value)}", write_function(folder, name, value)
                labels = {f"--environment {Path(value).name}": label, value: label} | labels
            elif callable(value):
                raise ConfigError(f"{name} takes no function, but a value.")
            values[key] = _as_typed(value), f"{kind} {name}"
        except ConfigError as error:
            problems += error.problems
    files = [config] if isinstance(config, str | os.PathLike) else config
    try:
        resolved = resolve(
            flags=values, preset=preset, config_files=[Path(file) for file in files],
            overrides=[], environ=os.environ,
        )  # fmt: skip
        settings_of_reward = resolved.config.reward.function_kwargs
        problems += collect_problems(partial(check, settings_of_reward) for check in checks)
        if not problems:
            resolved = add_second_judge(replace(resolved, function=function), os.environ)
            problems += _find_refusals(resolved, plan=plan)
    except ConfigError as error:
        problems += error.problems
    if problems:
        for file, label in (labels | {f"{folder}/": ""}).items():
            problems = [problem.replace(file, label) for problem in problems]
        raise ConfigError(dict.fromkeys(problems))
    return resolved


def _find_refusals(resolved: Resolved, *, plan: bool) -> Iterator[str]:
    """Yield why a run would be refused, before anything heavy is imported."""
    from ppo_cli.run.refusals import FirstRows, find_all_refusals

    config, scored = resolved.config, resolved.function == "train"
    yield from () if scored else refused_in_session(config.trainer, config.algorithm)
    findings = find_findings(resolved)
    yield from () if plan else list_texts(findings, "elsewhere")
    yield from find_all_refusals(resolved, findings, FirstRows(config), scored=scored)


def _as_typed(value: Any) -> Any:
    """Convert a value to what the config layers read: text, or a list of text."""
    if isinstance(value, list | tuple):
        return [_as_typed(item) for item in value]
    # str(True) is "True", and YAML's word is "true".
    if isinstance(value, bool):
        return str(value).lower()
    return value if value is None or isinstance(value, str | dict) else str(value)
