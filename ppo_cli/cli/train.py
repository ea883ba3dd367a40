"""`ppo train`: resolve the settings, then hand them to the assembly."""

from __future__ import annotations

from pathlib import Path

import typer

from ppo_cli.cli.crash import Crash
from ppo_cli.cli.flags import Given, SettingsCommand, switch, takes_settings
from ppo_cli.cli.plan import print_plan
from ppo_cli.config.parts import missing_inputs, missing_parts, remarks
from ppo_cli.config.resolve import Resolved
from ppo_cli.errors import ConfigError, MissingPart, PpoError

EPILOG = (
    "Example: ppo train --preset gsm8k --lr 1e-6 actor.clip_ratio_high=0.28   "
    "Every key is a setting, with or without a flag: ppo plan --all lists them."
)


def train(given: Given) -> None:
    """Train a model with PPO."""
    resolved = given.resolve()
    if given.extras["dry_run"]:
        print_plan(resolved)
        return
    _refuse(resolved)
    _run(resolved)


def _refuse(resolved: Resolved) -> None:
    """Stop before anything heavy is imported when the run cannot be as asked."""
    absent = missing_parts(resolved)
    if absent:
        raise MissingPart("\n".join(absent))
    lacking = missing_inputs(resolved.config)
    if lacking:
        raise ConfigError(lacking)


def _run(resolved: Resolved) -> None:
    from ppo_cli.assemble import train as train_now
    from ppo_cli.cli.screen import make_screen

    screen = make_screen()
    for note in (*resolved.notes, *remarks(resolved)):
        screen.note(note)
    try:
        train_now(resolved, screen)
    except (PpoError, OSError):
        raise
    except Exception as bug:
        raise Crash(Path(resolved.config.trainer.output_dir)) from bug


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=SettingsCommand, epilog=EPILOG)(
    takes_settings(train, [switch("dry_run", "Print the plan and stop.")])
)
