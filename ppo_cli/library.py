"""The Python interface, `from ppo_cli import …`: train, plan and load_run, runs as data frames.

Settings, checks and errors are those of the commands: a mistake raises a UserError that says what
to do, a run that stopped early and can be resumed raises Interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_cli.config.checks.devices import missing_gpus
from ppo_cli.config.checks.models import damaged_models
from ppo_cli.config.checks.rewards import missing_keys
from ppo_cli.config.checks.runner import missing_inputs, missing_parts
from ppo_cli.config.layers import Resolved
from ppo_cli.config.plan import Plan, add_second_judge, make_plan
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError
from ppo_cli.run_folder import (
    check_run_folder,
    read_lines,
    read_metrics,
    rollout_file,
    rollout_steps,
    run_settings,
)

if TYPE_CHECKING:
    import pandas

    from ppo_cli.report.tracker import Screen


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
    """Open a run folder (an `output_dir`); raises DataError if it is not one."""
    folder = Path(path).expanduser()
    check_run_folder(folder)
    return Run(folder)


def plan(
    *,
    preset: str | None = None,
    config: Sequence[str | os.PathLike[str]] = (),
    overrides: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """Plan a run with these settings, as `ppo plan` does; nothing is loaded.

    See `train` for the arguments. Raises ConfigError with all problems of the settings; problems of
    files and rows are only found by `train`.
    """
    return make_plan(_resolve(preset, config, overrides or {}, settings))


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
    ones win. `screen` shows the progress; without one nothing is printed.
    """
    resolved = _resolve(preset, config, overrides or {}, settings)
    # The checks of `ppo train`, before anything heavy is imported.
    problems = [
        *missing_gpus(resolved.config),
        *missing_keys(resolved.config, os.environ),
        *missing_parts(resolved),
        *missing_inputs(resolved.config),
        *damaged_models(resolved.config),
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    # Imported here, because this loads torch.
    from ppo_cli.report.tracker import Screen
    from ppo_cli.run.assemble import train as train_now

    train_now(resolved, screen or Screen())
    return load_run(resolved.config.trainer.output_dir)


def _resolve(
    preset: str | None,
    config: Sequence[str | os.PathLike[str]],
    overrides: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Resolved:
    """Resolve the arguments of `plan` and `train`; ConfigError with all problems."""
    # Flags by name: the library's arguments are the flags without dashes.
    flags = {key.flag.removeprefix("--"): key.name for key in table().values() if key.flag}
    if unknown := [name for name in settings if name not in flags]:
        raise ConfigError(
            [f"There is no setting {name}; give those without a flag as overrides={{…}}."
             for name in unknown]
        )  # fmt: skip
    # Settings are written to config.yaml, which cannot hold a function.
    values = {**settings, **overrides}
    if functions := [name for name, value in values.items() if callable(value)]:
        raise ConfigError(
            [f"{name} is a function; write it into a file, and name that: {name}='FILE.py:NAME'."
             for name in functions]
        )  # fmt: skip
    # The origin of each value, for messages and the plan.
    named = {flags[name]: (value, f"argument {name}") for name, value in settings.items()}
    named |= {key: (value, f"override {key}") for key, value in overrides.items()}
    resolved = resolve(
        flags={key: (_as_typed(value), origin) for key, (value, origin) in named.items()},
        preset=preset,
        config_files=[Path(file) for file in config],
        overrides=[],
        environ=os.environ,
    )
    return add_second_judge(resolved, os.environ)


def _as_typed(value: Any) -> Any:
    """Convert a value to what the config layers read: text, or a list of text."""
    if isinstance(value, list | tuple):
        return [_as_typed(item) for item in value]
    # str(True) is "True", and YAML's word is "true".
    if isinstance(value, bool):
        return str(value).lower()
    return value if value is None or isinstance(value, str | dict) else str(value)
