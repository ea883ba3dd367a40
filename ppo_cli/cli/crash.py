"""Messages for failed commands, and their exit codes."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ppo_cli.errors import (
    DISK_ERRNOS,
    EXIT_BUG,
    EXIT_USER,
    FULL_DISK_ERRNOS,
    ConfigError,
    Interrupted,
    PpoError,
    UserError,
    WorkerLost,
    did_you_mean,
    ppo,
)
from ppo_cli.redact import redact

DEFAULT_FOLDER = Path("outputs")
_DOCTOR = "It may be this machine: `{}` looks for what it lacks."
_OF_THE_MACHINE = re.compile(r"\b(CUDA|NCCL|cuBLAS|driver|GLIBC|shared (object|memory))\b", re.I)


class Crash(Exception):
    """A bug inside a run; its cause is the bug, `folder` is the run's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def exit_code_of(error: BaseException, *, debug: bool = False) -> int:
    """Print the error on stderr as its kind requires and return the exit code."""
    bug = error.__cause__ if isinstance(error, Crash) and error.__cause__ else error
    if debug:
        _say("".join(traceback.format_exception(bug)).rstrip())
    if isinstance(bug, UserError):
        _say(_listed(bug))
        return bug.exit_code
    if (usage := _usage(bug)) is not None:
        _say(usage)
        return EXIT_USER
    if isinstance(bug, Interrupted | WorkerLost):
        _say(str(bug))
        if isinstance(bug, WorkerLost):
            _say(_DOCTOR.format(ppo("doctor")))
        return bug.exit_code
    if isinstance(bug, OSError) and bug.errno in DISK_ERRNOS and not isinstance(bug, PpoError):
        full = bug.errno in FULL_DISK_ERRNOS
        mend = "Free some space, or write elsewhere" if full else "Choose a place that you may use"
        why = os.strerror(bug.errno or 0).lower()
        _say(f"error: {bug.filename or 'writing'}: {why}. {mend} (--output_dir).")
        return EXIT_USER
    folder = error.folder if isinstance(error, Crash) else DEFAULT_FOLDER
    _say(f"This is a bug in ppo-cli: {type(bug).__name__}: {bug}")
    _say(_kept(bug, folder))
    if isinstance(bug, ImportError | OSError) or _OF_THE_MACHINE.search(str(bug)):
        _say(_DOCTOR.format(ppo("doctor")))
    return EXIT_BUG


def _listed(error: UserError) -> str:
    """Count the problems of the settings; any other error is one, however many its lines."""
    lines = error.problems if isinstance(error, ConfigError) else ()
    if len(lines) < 2:
        return f"error: {error}"
    return "\n".join([f"{len(lines)} things are wrong:", *(f"  {line}" for line in lines)])


def _usage(error: BaseException) -> str | None:
    """Return the message for a command line that the parser refused; None for other errors.

    Recognised by their attributes: the parser's error classes are not part of typer's interface.
    """
    if not hasattr(error, "format_message"):
        return None
    said = str(error.format_message())
    # pydantic's words for a value that is no number
    said = re.sub(r"Input should be a valid (\w+), unable to parse.*", r"this is no \1", said)
    if "Usage:" in said:  # a group without its command answers with its help
        return said
    flag = getattr(error, "option_name", None)
    if hasattr(error, "possibilities"):
        said = f"there is no flag {flag}.{did_you_mean(str(flag), error.possibilities or ())}"
    context = getattr(error, "ctx", None)
    if not said and context:  # a group without its command: its help is printed by now
        said = f"name one of its commands: {', '.join(context.command.commands)}"
    command = context.command_path.partition(" ")[2] if context else "COMMAND"
    stop = "" if said.endswith((".", "?")) else "."
    return f"error: {said}{stop} See `{ppo(f'{command} --help'.lstrip())}`."


def _kept(bug: BaseException, folder: Path) -> str:
    """Write the traceback into the run's logs and say where it is."""
    text = redact("".join(traceback.format_exception(bug)))
    path = folder / "logs" / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        return text.rstrip()
    return f"The traceback is in {path}; --debug shows it here."


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # the reader has closed the stream
        print(redact(text), file=sys.stderr)
