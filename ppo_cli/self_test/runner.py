"""Runs the checks one after the other, each in a process that may crash, hang or break a GPU.

The processes are forked from a server that has imported torch and transformers and has done nothing
else: no CUDA context, no threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ppo_cli.machine.device_record import CheckRecord, DeviceKey, DeviceRecord
from ppo_cli.processes.reaper import kill_below
from ppo_cli.secrets.redact import redact
from ppo_cli.self_test.declarations import CHECKS, ROOM, Check, list_proven
from ppo_cli.self_test.results import Outcome, Results, Setup, describe_error

LOG_CHARACTERS = 300  # of the end of a crashed check's log
PRIOR_S = 30.0  # weight of the declared pace, until checks have shown this machine's pace
END_S = 5.0  # for a process to remove shared resources such as semaphores
GRACE_S = 10.0  # after its limit a process ends itself if nobody killed it
LONGEST_FOLDER = 64  # bytes of a path, to which a socket's own name is added


@dataclass(frozen=True)
class Progress:
    """Progress of a self-test: the check that starts, the number of checks, the time left."""

    number: int
    count: int
    check: str
    seconds_left: float


def run_checks(
    setup: Setup,
    checks: Sequence[Check] = CHECKS,
    tell: Callable[[Progress], None] = lambda p: None,
) -> Iterator[Outcome]:
    """Yield the outcome of each check as soon as it ends."""
    # Only the checks that run count in the estimate of the time left.
    applicable = [check for check in checks if not why_not_applicable(check, setup)]
    declared_s, done_s, measured_s = sum(check.seconds for check in applicable), 0.0, 0.0
    for number, check in enumerate(checks, 1):
        if reason := why_not_applicable(check, setup):
            yield Outcome(check.name, "skipped", reason)
            continue
        # Time left: the declared seconds, scaled by the pace of this machine so far.
        pace = (measured_s + PRIOR_S) / (done_s + PRIOR_S)
        tell(Progress(number, len(checks), check.name, pace * (declared_s - done_s)))
        outcome = run_check(check, setup)
        measured_s, done_s = measured_s + outcome.seconds, done_s + check.seconds
        yield outcome


def why_not_applicable(check: Check, setup: Setup) -> str:
    """Return why a check does not apply to this machine; empty if it does."""
    if setup.device not in check.devices:
        return "needs a GPU"
    if check.needs and find_spec(check.needs) is None:
        return f"needs {check.needs}, which is not installed"
    return ""


def run_check(check: Check, setup: Setup) -> Outcome:
    """Run a check in a process; one that crashes or takes too long has failed."""
    # The server imports the modules of all checks once.
    context: Any = get_context("forkserver")
    modules = sorted({f"{ROOM}.{c.function.partition(':')[0]}" for c in CHECKS})
    context.set_forkserver_preload(modules)
    _start_server()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ppo-self-test-", ignore_cleanup_errors=True) as folder:
        # A private folder and pipe; the child is killed with all that it has started.
        receiver, sender = context.Pipe(duplex=False)
        setup = replace(setup, folder=Path(folder))
        process = context.Process(target=_run_in_process, args=(check, setup, sender))
        process.start()
        sender.close()
        try:
            outcome = _await_outcome(check, process, receiver, Path(folder))
        finally:
            _kill_session(process)
    return replace(outcome, seconds=time.monotonic() - started)


def _start_server() -> None:
    """Start the fork server with SIGINT blocked: Ctrl-C during its imports would be a traceback."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
    # Its socket lies in the folder for temporary files, and a socket's path has at most 107 bytes.
    named = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = named
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _await_outcome(check: Check, process: Any, pipe: Connection, folder: Path) -> Outcome:
    """Return the outcome that a check's process sends, or how the process failed."""
    # Wait for a result or for the end of the process, whichever comes first.
    if not wait([pipe, process.sentinel], check.limit_s):
        return Outcome(check.name, "failed", f"no result within {check.limit_s:g} s")
    with contextlib.suppress(EOFError):
        if pipe.poll():
            outcome: Outcome = pipe.recv()
            process.join(END_S)
            return outcome
    # The process ended without a result: report its exit code and the end of its log.
    process.join(GRACE_S)
    code = process.exitcode
    ended = f"exit code {code}"
    if code is not None and code < 0:
        ended = f"signal {signal.Signals(-code).name}"
    lines = (folder / "log").read_text(errors="replace").split("\n") if code else []
    log_end = " / ".join(line.strip() for line in lines if line.strip())[-LOG_CHARACTERS:]
    return Outcome(check.name, "failed", redact(f"its process ended with {ended}: {log_end}"))


def _kill_session(process: Any) -> None:
    """Kill a process and all processes of its session."""
    process.kill()
    process.join(GRACE_S)
    kill_below(process.pid)


def _run_in_process(check: Check, setup: Setup, pipe: Connection) -> None:
    """Run a check in this (forked) process and send its outcome."""
    import torch

    # A new session, so that everything that the check starts can be killed with it.
    os.setsid()
    torch.set_num_threads(1)  # the models are tiny: threads would wait for each other
    # In case nobody is left to kill it.
    signal.alarm(int(check.limit_s + GRACE_S))
    try:
        log = os.open(setup.folder / "log", os.O_WRONLY | os.O_CREAT, 0o600)
    except FileNotFoundError:  # Ctrl-C came while the server started
        return
    for stream in (1, 2):  # libraries write to both
        os.dup2(log, stream)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    pipe.send(compute_outcome(check, setup))


def compute_outcome(check: Check, setup: Setup) -> Outcome:
    """Run a check in this process; an error is an outcome too."""
    module, _, name = check.function.partition(":")
    results = Results()
    try:
        getattr(importlib.import_module(f"{ROOM}.{module}"), name)(setup, results)
    except Exception as error:
        # Keep the figures so far; an error proves nothing.
        failed = results.outcome(check.name, setup.device)
        return replace(failed, state="failed", detail=describe_error(error), proven=())
    return results.outcome(check.name, setup.device)


def make_record(outcomes: Sequence[Outcome]) -> DeviceRecord:
    """Build the record of a self-test on this machine."""
    rows = [
        CheckRecord(o.check, o.state, o.detail, round(o.seconds, 1), o.figures) for o in outcomes
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return DeviceRecord(DeviceKey.of_this_machine(), now, rows, list_proven([*outcomes]))
