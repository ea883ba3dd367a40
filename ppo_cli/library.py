"""The Python interface, `from ppo_cli import …`: train, session, plan, load_run; data frames.

Settings, checks and errors are those of the commands: a mistake raises a UserError that says what
to do, a run that stopped early and can be resumed raises Interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ppo_cli.algo.estimators import ESTIMATOR_INPUTS, LOSS_INPUTS
from ppo_cli.atomic import atomic_replace
from ppo_cli.config.checks.devices import missing_gpus
from ppo_cli.config.checks.models import damaged_models
from ppo_cli.config.checks.rewards import missing_keys
from ppo_cli.config.checks.run import refused_in_session
from ppo_cli.config.checks.runner import missing_inputs, missing_parts
from ppo_cli.config.layers import Resolved
from ppo_cli.config.plan import Plan, add_second_judge, make_plan
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.keys import table, with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError
from ppo_cli.plugins import choose_inputs
from ppo_cli.run_folder import (
    RunFolder,
    check_run_folder,
    read_lines,
    read_metrics,
    rollout_file,
    rollout_steps,
    run_settings,
)
from ppo_cli.store import localise

if TYPE_CHECKING:
    import pandas

    from ppo_cli.callables import InputFile
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.session import Session

# Arguments that are not flags -> settings.
ARGUMENTS = {
    "loss": "actor.policy_loss.loss_mode", "estimator": "algorithm.adv_estimator",
    "rows": "data.train_files", "val_rows": "data.val_files",
}  # fmt: skip
# Settings that take a function, and the inputs by name of losses and estimators.
FUNCTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reward.function": ("reward", ()), "environment.path": ("environment", ()),
    "actor.policy_loss.loss_mode": ("losses", LOSS_INPUTS),
    "algorithm.adv_estimator": ("estimators", ESTIMATOR_INPUTS),
}  # fmt: skip
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
    config: Sequence[str | os.PathLike[str]] = (),
    overrides: Mapping[str, Any] | None = None,
    stepwise: bool = False,
    **settings: Any,
) -> Plan:
    """Plan a run with these settings, as `ppo plan` does; nothing is loaded.

    See `train` for the arguments; `stepwise` plans a `session`. Raises ConfigError with all
    problems of the settings, functions and `rows`; problems of files and of the rows in them are
    only found by `train`.
    """
    with _resolving(preset, config, overrides or {}, settings) as draft:
        if stepwise and (refusals := list(refused_in_session(draft.resolved.config))):
            raise ConfigError(refusals)
        planned: Plan = draft.rename(make_plan(draft.resolved))
        return planned


def train(
    *,
    preset: str | None = None,
    config: Sequence[str | os.PathLike[str]] = (),
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
    resolved = _resolve(preset, config, overrides or {}, settings)
    # Imported here, because this loads torch.
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.assemble import train as train_now

    train_now(resolved, screen or Screen())
    return load_run(resolved.config.trainer.output_dir)


def session(
    *,
    preset: str | None = None,
    config: Sequence[str | os.PathLike[str]] = (),
    overrides: Mapping[str, Any] | None = None,
    screen: Screen | None = None,
    **settings: Any,
) -> Session:
    """Open a run to train it step by step with your own scores; use it in a `with` block.

    See `train` for the arguments, `Session` for the methods. The configured reward, by default the
    rules by data_source, scores the validations and `Session.reward`; a session may have none.
    Raises UserError as `train` does, also for settings that need the scores while sampling.
    """
    resolved = _resolve(preset, config, overrides or {}, settings, function="session")
    # Imported here, because this loads torch.
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.session import Session

    return Session(resolved, screen or Screen())


@dataclass(frozen=True)
class _Draft:
    """Resolved settings whose functions and rows are files of the temporary folder `scratch`."""

    resolved: Resolved
    scratch: Path
    files: Mapping[str, InputFile]

    @property
    def folder(self) -> Path:
        """The folder for these files in the run folder."""
        return Path(self.resolved.config.trainer.output_dir).expanduser().absolute() / INPUTS

    def rename(self, value: Any) -> Any:
        """Return a value that names the files in the run folder instead."""
        return _replace_text(value, str(self.scratch), str(self.folder)) if self.files else value


def _resolve(
    preset: str | None,
    config: Sequence[str | os.PathLike[str]],
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    function: str = "train",
) -> Resolved:
    """Resolve the arguments of `train` or `session`, which `function` names.

    Functions and rows are written to the run folder. Raises ConfigError with all problems, those
    that `ppo train` finds before it starts too.
    """
    with _resolving(preset, config, overrides, settings) as draft:
        resolved = replace(draft.resolved, function=function)
        # The checks of `ppo train`, before anything heavy is imported.
        problems = [
            *(refused_in_session(resolved.config) if function == "session" else ()),
            *missing_gpus(resolved.config),
            *missing_keys(resolved.config, os.environ),
            *missing_parts(resolved),
            *missing_inputs(resolved.config),
            *damaged_models(resolved.config),
        ]
        if problems:
            raise ConfigError(draft.rename(list(dict.fromkeys(problems))))
        if not draft.files:
            return resolved
        RunFolder(draft.folder.parent).prepare()
        # A file that is there already has the same content, but for where it was written.
        for file in draft.files.values():
            path = draft.folder / file.name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_replace(path) as fresh:
                    fresh.write_text(file.text, encoding="utf-8")
        places = {key: _place(key, file, draft.folder) for key, file in draft.files.items()}
        notes = draft.rename(resolved.notes)
        return replace(resolved, config=with_settings(resolved.config, places), notes=notes)


@contextmanager
def _resolving(
    preset: str | None,
    config: Sequence[str | os.PathLike[str]],
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Iterator[_Draft]:
    """Resolve the arguments of `plan` and `train`; ConfigError with all problems."""
    # Flags by name: the library's arguments are the flags without dashes.
    flags = {key.flag.removeprefix("--"): key.name for key in table().values() if key.flag}
    flags |= ARGUMENTS
    if callable(settings.get("reward")):  # otherwise it names parts of a mixture
        flags["reward"] = "reward.function"
    problems = [
        f"There is no setting {name}; give those without a flag as overrides={{…}}."
        for name in settings
        if name not in flags
    ]
    # The origin of each value, for messages and the plan.
    values: dict[str, tuple[Any, str]] = {}
    files: dict[str, InputFile] = {}
    arguments = [(flags[name], name, f"argument {name}") for name in settings if name in flags]
    for key, name, origin in [*arguments, *((key, key, f"override {key}") for key in overrides)]:
        value = overrides[key] if origin.startswith("override") else settings[name]
        if key in values and origin.startswith("argument"):
            problems.append(f"{values[key][1]} and {origin} both set {key}; keep one.")
        values[key] = value, origin
        files.pop(key, None)
        try:
            if file := _make_file(key, name, value):
                files[key] = file
        except ConfigError as error:
            problems += error.problems
            del values[key]
    # Imported here: it loads the pool of the functions' processes.
    if "reward.function" in files:
        from ppo_cli.rewards.function import check_function
    with TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        for key, file in files.items():
            (scratch / file.name).parent.mkdir(exist_ok=True)
            (scratch / file.name).write_text(file.text, encoding="utf-8")
            values[key] = _place(key, file, scratch), values[key][1]
        try:
            resolved = resolve(
                flags={key: (_as_typed(value), origin) for key, (value, origin) in values.items()},
                preset=preset,
                config_files=[Path(file) for file in config],
                overrides=[],
                environ=os.environ,
            )
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if "reward.function" in files:
            function, kwargs = settings.get("reward"), resolved.config.reward.function_kwargs
            function = function or settings.get("reward_function") or overrides["reward.function"]
            problems += check_function(function, kwargs)
        if "environment.path" in files and resolved.config.environment.python:
            problems.append(
                "environment is a function, which only this Python can read, but "
                "environment.python names another: write it into a file, and name FILE.py:NAME."
            )
        if problems:
            raise ConfigError(problems)
        yield _Draft(add_second_judge(resolved, os.environ), scratch, files)


def _make_file(key: str, name: str, value: Any) -> InputFile | None:
    """Return the file for an argument that is a function or has rows; None for plain values."""
    # Imported here: plain settings do without it.
    from ppo_cli.callables import make_function_file, make_rows_file

    if name in ("rows", "val_rows"):
        return make_rows_file(name, value)
    if not callable(value):
        return None
    if key not in FUNCTIONS:
        raise ConfigError(f"{name} is a function, and takes none: give its value.")
    kind, inputs = FUNCTIONS[key]
    if not inputs:
        return make_function_file(name, value)
    label = f"{name}={getattr(value, '__name__', name)}"
    return make_function_file(name, value, choose_inputs(kind, label, signature(value), inputs))


def _place(key: str, file: InputFile, folder: Path) -> Any:
    """Return the value of a setting that names a file in a folder."""
    return (file.spec(folder),) if table()[key].is_list else file.spec(folder)


def _replace_text(value: Any, old: str, new: str) -> Any:
    """Return a value with a text replaced, also inside of lists, dicts and data classes."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key: _replace_text(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replace_text(item, old, new) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{n: _replace_text(getattr(value, n), old, new) for n in names})
    return value


def _as_typed(value: Any) -> Any:
    """Convert a value to what the config layers read: text, or a list of text."""
    if isinstance(value, list | tuple):
        return [_as_typed(item) for item in value]
    # str(True) is "True", and YAML's word is "true".
    if isinstance(value, bool):
        return str(value).lower()
    return value if value is None or isinstance(value, str | dict) else str(value)
