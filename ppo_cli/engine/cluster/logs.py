"""What workers write: a file for each, and its last lines when one is lost."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import time
from pathlib import Path

from ppo_cli.redact import redact

LINES, BYTES = 6, 8000
CRASH = "Fatal Python error"
MARK = "--- process "
KILLED = "was killed (signal 9; out of memory?)"


def write_into(path: Path) -> None:
    """Send all that this process says into a file, C libraries and last words included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", line_buffering=True)
        for number in (1, 2)
    )
    faulthandler.enable(file=2)
    print(f"{_mark(os.getpid())} {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)


def ignore_signals() -> None:
    """Let the driver decide what Ctrl-C and a polite end mean for its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def last_lines(path: Path, pid: int = 0) -> list[str]:
    """The end of a log, or of what one process wrote, without empty lines and secrets.

    A crash is told from its first line on. Nothing when the log is not readable here.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in redact(text).splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith(_mark(pid))]
    lines = lines[starts[-1] + 1 :] if pid and starts else lines
    lines = [line for line in lines if not line.startswith(MARK)]
    crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH)), None)
    return lines[-LINES:] if crash is None else lines[crash : crash + LINES]


def _mark(pid: int) -> str:
    return f"{MARK}{pid},"


def read_tail(path: Path, pid: int = 0) -> str:
    """Say where a log is, and how it ends, or what one process wrote."""
    lines = last_lines(path, pid)
    if not lines:
        return f"Its log: {path}."
    return "\n  ".join([f"The last lines of its log, {path}:", *lines])
