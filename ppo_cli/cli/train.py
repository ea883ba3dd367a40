"""`ppo train`: what the plan refuses is refused, then the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ppo_cli.cli.crash import Crash
from ppo_cli.cli.flags import Given, add_command, switch
from ppo_cli.cli.plan import FORK, forked, print_plan, reader, refusals, refused_rows
from ppo_cli.config.derived import engine_name
from ppo_cli.config.requirements import missing_gpus, refused_settings, remarks
from ppo_cli.config.resolve import Resolved
from ppo_cli.config.reward_checks import missing_keys
from ppo_cli.config.second_judge import with_second_judge
from ppo_cli.errors import ConfigError, Interrupted, PpoError

if TYPE_CHECKING:
    from ppo_cli.report.tracker import Screen

EPILOG = (
    "Example: ppo train --preset gsm8k --lr 1e-6 actor.clip_ratio_high=0.28   "
    "Every key is a setting, with or without a flag: ppo plan --all lists them."
)


def train(given: Given) -> None:
    """Train a model with PPO."""
    if given.on_verl:
        from ppo_cli.cli.bridge import plan_there, train_there

        (plan_there if given.extras["dry_run"] else train_there)(given)
        return
    resolved = with_second_judge(forked(given), os.environ)
    problems = refusals(resolved)
    if given.extras["dry_run"]:
        read = reader(resolved.config)
        problems = list(dict.fromkeys([*problems, *refused_rows(resolved.config, read)]))
        if not refused_settings(resolved):
            print_plan(resolved, read, problems=problems)
    elif not resolved.config.trainer.node_rank:
        problems = [*missing_gpus(resolved.config), *missing_keys(resolved.config, os.environ),
                    *problems]  # fmt: skip
    if problems:
        raise ConfigError(problems)
    if not given.extras["dry_run"]:
        _run(resolved, quiet=bool(given.extras["quiet"]))


def _run(resolved: Resolved, *, quiet: bool) -> None:
    from ppo_cli.cli.screen import Unread, make_screen

    screen = make_screen(quiet=quiet)
    if resolved.config.trainer.node_rank:
        from ppo_cli.launch.nodes import join_cluster

        raise typer.Exit(join_cluster(resolved.config, os.environ, screen.note))
    for note in (*resolved.notes, *remarks(resolved)):
        screen.note(note)
    try:
        _drive(resolved, screen)
    except Unread as error:
        raise Interrupted(f"{error} What was saved goes on with --resume auto.") from error
    except Exception as error:
        # The parser would end without a word for any pipe that broke.
        expected = isinstance(error, (PpoError, OSError)) and not isinstance(error, BrokenPipeError)
        if expected:
            raise
        raise Crash(Path(resolved.config.trainer.output_dir)) from error


def _drive(resolved: Resolved, screen: Screen) -> None:
    """Train from here, with the other nodes where there are any."""
    screen.note("Importing torch and transformers")  # takes seconds, in which nothing else is shown
    several = resolved.config.trainer.nnodes > 1 or os.environ.get("RAY_ADDRESS", "").strip()
    if not several or engine_name(resolved.config) == "local":
        from ppo_cli.run.assemble import train as train_now

        train_now(resolved, screen)
        return
    from ppo_cli.launch.nodes import open_cluster

    with open_cluster(resolved.config, os.environ, screen.note) as nodes:
        os.environ.update(nodes.variables)  # read when Ray is imported
        from ppo_cli.run.assemble import train as train_now

        train_now(resolved, screen, nodes)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
add_command(
    app,
    train,
    EPILOG,
    [
        switch("dry_run", "Print the plan and stop."),
        switch("quiet", "Print warnings and the summary only."),
        FORK,
    ],
)
