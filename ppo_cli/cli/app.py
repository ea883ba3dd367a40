"""The `ppo` command: finds the sub-command, and turns every outcome into an exit code.

Sub-commands are imported when they are called, so that `ppo --help` stays quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ppo_cli import __version__
from ppo_cli.cli.crash import exit_code_of
from ppo_cli.cli.foreign_flags import translate
from ppo_cli.errors import EXIT_STOPPED, did_you_mean

# Rounds that an OpenMP thread spins before it sleeps: about half a millisecond. libgomp's own
# 300,000 burn the CPU time that the other threads need to arrive when other work wants the CPUs.
SPINS = "10000"
ABOUT = "Train language models with PPO from one command."
EPILOG = "Example: ppo train --model Qwen/Qwen2.5-0.5B --train_files train.parquet"
COMMANDS = {
    "train": ("ppo_cli.cli.train:app", "Train a model with PPO."),
    "plan": (
        "ppo_cli.cli.plan:app",
        "Show every setting with its origin, and the batch arithmetic.",
    ),
    "doctor": (
        "ppo_cli.cli.doctor:app",
        "Look for what this machine lacks, and say what mends it.",
    ),
    "presets": ("ppo_cli.cli.presets:app", "List the presets, show one, or copy one."),
    "explain": ("ppo_cli.cli.explain:app", "Say what a setting or a metric is."),
    "prompts": (
        "ppo_cli.cli.prompts:app",
        "List and show judge prompts, or render the request for a data row.",
    ),
    "runs": ("ppo_cli.cli.runs:app", "List the runs in a folder: state, steps, reward, cost."),
    "show": ("ppo_cli.cli.show:app", "Read a run folder: its steps, or the responses of one."),
    "view": ("ppo_cli.cli.page:view_app", "Serve a page about runs: curves, responses, settings."),
    "report": ("ppo_cli.cli.page:report_app", "Write that page as one HTML file."),
    "eval": (
        "ppo_cli.cli.evaluate:eval_app",
        "Score the responses of models to prompts, and compare models.",
    ),
    "generate": (
        "ppo_cli.cli.evaluate:generate_app",
        "Let a model answer a prompt, a file of prompts, or you in a chat.",
    ),
    "export": (
        "ppo_cli.cli.export:app",
        "Write a trained model as one Hugging Face folder, adapters merged.",
    ),
    "bridge": (
        "ppo_cli.cli.bridge:app",
        "Train on verl with the same settings and rewards, and read its results back.",
    ),
    "data": ("ppo_cli.cli.data:data_app", "Check or prepare prompt files."),
    "reward": (
        "ppo_cli.cli.reward:reward_app",
        "Score files with a reward, hold it against labels, or attack it.",
    ),
}


class LazyGroup(TyperGroup):
    """Lists its commands by name and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder that is enough for the list in the help."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that was called; an unknown one fails with the nearest name."""
        name = args[0]
        if name not in COMMANDS:
            ctx.fail(f"There is no command '{name}'.{did_you_mean(name, COMMANDS)}")
        module, _, attribute = COMMANDS[name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        command: Any = typer.main.get_command(found)
        command.name = name
        for note in repeats(command, args[1:]):
            typer.echo(note, err=True)
        return name, command, args[1:]


def repeats(command: Any, args: Sequence[str]) -> list[str]:
    """A note for each flag that is given with different values; flags that take a list repeat.

    The last value counts, as scripts that end in `"$@"` expect.
    """
    while isinstance(command, TyperGroup):
        names = [word for word in args if word in command.commands]
        if not names:
            return []
        command, args = command.commands[names[0]], args[args.index(names[0]) + 1 :]
    flags = {
        same_spelling(word): p for p in command.params for word in [*p.opts, *p.secondary_opts]
    }
    given: dict[str, list[str]] = {}
    words = iter(translate(args))
    for word in words:
        if word == "--":
            break
        flag, equals, value = word.partition("=")
        flag = same_spelling(flag) if word.startswith("-") else ""
        found = flags.get(flag)
        if found is None or found.multiple or found.count:
            continue
        if found.is_flag:
            value = word
        elif not equals:
            value = next(words, "")
        given.setdefault(found.opts[0], []).append(value)
    return [
        f"note: {flag} is given as {', then as '.join(map(repr, values))}; the last one counts."
        for flag, values in given.items()
        if len(set(values)) > 1
    ]


def same_spelling(word: str) -> str:
    """Read `--batch-size` as `--batch_size`: both spellings of every flag are one."""
    return word.replace("-", "_")


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,  # plain help needs a tenth of a second, rich help three
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": same_spelling,
        "help_option_names": ["-h", "--help"],
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ppo-cli {__version__}")
        raise typer.Exit()


@app.callback(help=ABOUT, epilog=EPILOG)
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks."),
) -> None:
    """Hold the options that stand before the command; main reads --debug itself."""


def _open_closed_streams() -> None:
    """Replace closed streams with the null device: files opened later would take their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(nowhere, nowhere <= 2)
            setattr(sys, name, os.fdopen(nowhere, mode, closefd=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ppo` and return its exit code: 0 done, 1 bug, 2 user's mistake, 3 resumable."""
    args = list(sys.argv[1:] if argv is None else argv)
    # It may stand anywhere before a `--`, and no command has to know it.
    own = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in own
    args = [word for word in own if word != "--debug"] + args[len(own) :]
    _open_closed_streams()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch loads libgomp
    try:
        code = typer.main.get_command(app).main(
            args=args or ["--help"], prog_name="ppo", standalone_mode=False
        )
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        return exit_code_of(error, debug=debug)
    if code == EXIT_STOPPED:
        print("Stopped.", file=sys.stderr)
    return code if isinstance(code, int) else 0
