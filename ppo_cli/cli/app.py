"""The `ppo` command: finds the sub-command, and turns each result or error into an exit code.

Sub-commands are imported when they are called, so that `ppo --help` stays fast.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from ppo_cli.cli.help import HELP_ALL_WORDS, App, HelpGroup, normalize_flag
from ppo_cli.errors import (
    DISK_ERRNOS,
    EXIT_BUG,
    EXIT_DONE,
    EXIT_RESUMABLE,
    EXIT_STOPPED,
    EXIT_USER,
    FULL_DISK_ERRNOS,
    ConfigError,
    Interrupted,
    PpoError,
    UserError,
    WorkerLost,
    address_space,
    describe_address_space,
    describe_device_fault,
    did_you_mean,
    first_line,
    is_out_of_memory,
    ppo,
)
from ppo_cli.plugins import Command
from ppo_cli.secrets.redact import redact
from ppo_cli.signals import leave_at_once

# Tracebacks of bugs outside of a run go to its logs/, as --output_dir has the same default.
DEFAULT_FOLDER = Path("outputs")
_DOCTOR_ADVICE = "The cause may be this machine: run `{}`."
# Words in the message of a bug that point to drivers or system libraries.
_MACHINE_ERROR = re.compile(r"\b(CUDA|NCCL|cuBLAS|driver|GLIBC|shared (object|memory))\b", re.I)


class Crash(Exception):
    """A bug inside a run: `__cause__` is the original error, `folder` the run folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def print_error(error: BaseException, *, debug: bool = False) -> int:
    """Print an error on stderr, with advice that fits its type, and return the exit code.

    Unexpected errors are bugs: their traceback goes to a file. `debug` prints it as well.
    """
    bug = error.__cause__ if isinstance(error, Crash) and error.__cause__ else error
    if debug:
        _print_stderr("".join(traceback.format_exception(bug)).rstrip())
    if isinstance(bug, UserError):
        _print_stderr(_list_problems(bug))
        if "out of memory" in str(bug).lower() and (limit := describe_address_space()):
            _print_stderr(limit)
        return bug.exit_code
    # Out of memory: any library may have raised this, so the advice is general.
    if is_out_of_memory(bug):
        limit = describe_address_space()
        _print_stderr(
            f"error: out of memory: {first_line(bug)}. {f'{limit} Or use' if limit else 'Use'} a "
            "smaller model, or lower --max_response_length and the number of tokens of a "
            "micro-batch (actor.ppo_max_token_len_per_gpu)."
        )
        return EXIT_USER
    if (usage := _describe_usage_error(bug)) is not None:
        _print_stderr(usage)
        return EXIT_USER
    # The run stopped but can be resumed, or it lost one of its machines.
    if isinstance(bug, Interrupted | WorkerLost):
        _print_stderr(str(bug))
        if isinstance(bug, WorkerLost):
            _print_stderr(_DOCTOR_ADVICE.format(ppo("doctor")))
        return bug.exit_code
    folder = error.folder if isinstance(error, Crash) else DEFAULT_FOLDER
    if fault := describe_device_fault(bug):
        _print_stderr(f"error: this process cannot go on: {fault}")
        _print_stderr(save_traceback(bug, folder))
        _print_stderr(_DOCTOR_ADVICE.format(ppo("doctor")))
        return EXIT_RESUMABLE
    # A file that cannot be written.
    if isinstance(bug, OSError) and bug.errno in DISK_ERRNOS and not isinstance(bug, PpoError):
        full = bug.errno in FULL_DISK_ERRNOS
        advice = "Free some space, or write elsewhere" if full else "Choose a writable place"
        why = os.strerror(bug.errno or 0).lower()
        _print_stderr(f"error: {bug.filename or 'writing'}: {why}. {advice} (--output_dir).")
        return EXIT_USER
    # Everything else is a bug: save the traceback, which a report needs.
    _print_stderr(f"This is a bug in ppo-cli: {type(bug).__name__}: {bug}")
    _print_stderr(save_traceback(bug, folder))
    if isinstance(bug, ImportError | OSError) or _MACHINE_ERROR.search(str(bug)):
        _print_stderr(_DOCTOR_ADVICE.format(ppo("doctor")))
    return EXIT_BUG


def _list_problems(error: UserError) -> str:
    """Return an error's text; several problems with settings become a counted list."""
    lines = error.problems if isinstance(error, ConfigError) else ()
    if len(lines) < 2:
        return f"error: {error}"
    return "\n".join([f"{len(lines)} things are wrong:", *(f"  {line}" for line in lines)])


def _describe_usage_error(error: BaseException) -> str | None:
    """Return the message for a command line that the parser refused; None for other errors."""
    # typer 0.29 bundles click but does not export its error classes: only their attributes
    # identify them.
    if not hasattr(error, "format_message"):
        return None
    message = str(error.format_message())
    # pydantic's words for a value that is not a number, and its prefix for other values.
    message = re.sub(
        r"Input should be a valid (\w+), unable to parse.*", r"this is not a valid \1", message
    ).replace("Value error, ", "")
    if "Usage:" in message:  # a group that is called without a command: this is its help
        return message
    flag = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        message = f"there is no flag {flag}.{did_you_mean(str(flag), error.possibilities or ())}"
    context = getattr(error, "ctx", None)
    command = context.command_path.partition(" ")[2] if context else "COMMAND"
    stop = "" if message.endswith((".", "?")) else "."
    return f"error: {message}{stop} See `{ppo(f'{command} --help'.lstrip())}`."


def save_traceback(bug: BaseException, folder: Path) -> str:
    """Write the traceback to the run's logs and return a sentence with its path.

    Returns the traceback itself if the file cannot be written.
    """
    text = redact("".join(traceback.format_exception(bug)))
    path = folder / "logs" / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return text.rstrip()
    return f"The traceback is in {path}; --debug shows it here."


def _print_stderr(text: str) -> None:
    """Print text on stderr without secrets; a closed stream is ignored."""
    with suppress(BrokenPipeError):  # the reader has closed the stream
        print(redact(text), file=sys.stderr)


# Rounds that an OpenMP thread spins before it sleeps: about half a millisecond. libgomp's default
# of 300,000 wastes CPU time that the other threads need when the CPUs are shared.
OPENMP_SPINS = "10000"
# With one of these flags a command computes nothing, so jemalloc and memory checks are not needed.
NO_WORK_FLAGS = {"-h", "--help", "--dry_run", "--dry-run", *HELP_ALL_WORDS}
# Measured: `ppo reward score --rule` takes 190 MiB of addresses.
MIN_ADDRESS_SPACE = 192 * 2**20
EPILOG = (
    "ppo train             # trains the bundled model on sums\n"
    "ppo train --help      # the common flags; --help-all: all of them\n"
    "ppo explain kl_coef   # a setting, a metric or a word"
)
# Section of the help -> command -> (module:app, its line in the help).
SECTIONS = {
    "Train": {
        "train": ("train:train_app", "Train a model with PPO."),
        "plan": ("train:plan_app", "Show what a run would do, and what would stop it."),
        "presets": ("explain:presets_app", "List the presets, show one, or copy one."),
        "explain": ("explain:explain_app", "Explain a setting, a metric or a word."),
        "data": ("data:data_app", "Check prompt files, or prepare well-known sets."),
        "doctor": ("doctor:doctor_app", "Check this machine and suggest fixes."),
    },
    "Look": {
        "runs": ("show:runs_app", "List the runs in a folder: state, steps, reward, cost."),
        "show": ("show:show_app", "Print the steps of a run, or the responses of one step."),
        "view": ("page:view_app", "Serve a page about runs: curves, responses, settings."),
        "generate": ("evaluate:generate_app", "Let a model answer a prompt, a file, or a chat."),
    },
    "Judge": {
        "eval": ("evaluate:eval_app", "Score the responses of models, and compare models."),
        "reward": ("reward:reward_app", "Score files with a reward, and test the reward itself."),
    },
    "Share": {
        "report": ("page:report_app", "Write the page about runs as one HTML file."),
        "export": ("evaluate:export_app", "Write a trained model as one Hugging Face folder."),
    },
}
# The built-in commands in the order of the help; plug-ins follow in their sections.
COMMANDS = {
    name: Command(f"ppo_cli.cli.{app}", line, section, order=0)
    for section, commands in SECTIONS.items()
    for name, (app, line) in commands.items()
}


class RootGroup(HelpGroup):
    """The group of all commands."""

    built_in = COMMANDS

    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C ends the process here."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            leave_at_once()
            raise

    def group_commands(self, ctx: Any) -> dict[str, Sequence[str]]:
        """Return the command names by section."""
        sections: dict[str, list[str]] = {}
        for name, command in self.declared_commands(ctx).items():
            sections.setdefault(command.section, []).append(name)
        return dict(sections)


app = App(
    cls=RootGroup,
    add_completion=True,
    context_settings={
        "token_normalize_func": normalize_flag,
        "help_option_names": ["-h", "--help"],
    },
)


def _print_version(requested: bool) -> None:
    """Print the version and exit, if `--version` is on the line."""
    if requested:
        from ppo_cli.version import read_version

        typer.echo(f"ppo-cli {read_version()}")
        raise typer.Exit()


@app.callback(help="Train language models with PPO from one command.", epilog=EPILOG)
def _declare_global_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks and machine details."),
) -> None:
    """Declare the options before the command for the help; `main` itself reads --debug."""


def _check_address_space(args: Sequence[str]) -> None:
    """Raise UserError for an address space so small that numpy's OpenBLAS would hang at import."""
    limit = address_space()
    if (
        limit is not None
        and limit < MIN_ADDRESS_SPACE
        and not {"--version", *NO_WORK_FLAGS} & set(args)
    ):
        raise UserError("out of memory.")  # print_error adds the limit


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is the cause of an error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _open_closed_streams() -> None:
    """Replace closed standard streams with the null device.

    Otherwise the next opened file would get number 0, 1 or 2, and output would end up in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the closed stream.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, nowhere <= 2)
            setattr(sys, name, os.fdopen(nowhere, mode, closefd=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ppo` and return its exit code: 0 done, 1 bug, 2 user's mistake, 3 resumable."""
    args = list(sys.argv[1:] if argv is None else argv)
    # --debug may be anywhere before a `--`, and commands need not declare it.
    own_args = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in own_args
    args = [word for word in own_args if word != "--debug"] + args[len(own_args) :]
    # Words that people try: `ppo help train` and `ppo version`.
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    elif args == ["version"]:
        args = ["--version"]
    _open_closed_streams()
    # Training runs again under jemalloc, which needs an environment variable at process start.
    if argv is None and args[:1] in (["train"], ["eval"]) and not NO_WORK_FLAGS & set(args):
        from ppo_cli.allocator import start_with_jemalloc

        start_with_jemalloc()
    # Prompts are counted without torch: transformers takes a sixth of the time to import then. An
    # entry of None makes the import of a module fail.
    if argv is None and args[:2] == ["data", "check"]:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # it would say that torch is missing
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch loads libgomp
    try:
        _check_address_space(args)
        code = typer.main.get_command(app).main(
            args=args or ["--help"], prog_name="ppo", standalone_mode=False, obj=debug
        )
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # `| head` has read enough
            return EXIT_DONE
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:  # before the command has begun
        code = EXIT_STOPPED
    except Exception as error:
        # Python and libraries wrap an interrupt in errors of their own.
        if not is_interrupt(error):
            return print_error(error, debug=debug)
        code = EXIT_STOPPED
    if code == EXIT_STOPPED:
        print("Stopped.", file=sys.stderr)
    return code if isinstance(code, int) else 0
