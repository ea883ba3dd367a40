"""A small parent process for a child of the run: it ends all the child's processes with the run.

Run as a script, with the standard library only: PARENT FOLDER COMMAND… . It ends, and ends all
descendants of COMMAND, when the command ends, on SIGTERM, or when the process PARENT is gone for
any reason (then it removes FOLDER as well, if it is not empty). As a subreaper it inherits orphaned
descendants, so that none can escape.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TICK_S = 0.1  # between two looks at the child and the parent
GRACE_S = 3.0  # from SIGTERM to SIGKILL
STOP_S = 2 * GRACE_S + 2  # until a reaper that was told to end has ended
MAX_ATTEMPTS = 50  # to kill all that a process has started
# Options of prctl(2), which Python's library does not have.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def supervised(command: Sequence[str], folder: Path | None = None) -> list[str]:
    """Return the command line that runs a command under a reaper, as a child of this process."""
    # Without site packages: it must start even if the environment is broken.
    reaper = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder or "")]
    return [*reaper, *command]


# State, parent and session by the ids of processes.
Processes = dict[int, tuple[str, int, int]]


def read_processes() -> Processes:
    """Return all processes, from /proc (empty without /proc)."""
    processes: Processes = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        # Any process may end while it is read.
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in brackets may contain any character: read after the last bracket.
            state, parent, _, session = file.read().rpartition(b")")[2].split(None, 4)[:4]
            processes[int(name)] = state.decode(), int(parent), int(session)
    return processes


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    return _below(pid, read_processes())


def _below(pid: int, processes: Processes) -> list[int]:
    below: dict[int, list[int]] = {}
    for child, (_, parent, _) in processes.items():
        below.setdefault(parent, []).append(child)
    descendants_of_pid, queue = [], [pid]
    while queue:
        children = below.get(queue.pop(), [])
        descendants_of_pid += children
        queue += children
    return descendants_of_pid


def list_children(pid: int) -> list[int]:
    """Return the ids of a process's children, without a look at all processes."""
    children = list[int]()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # each thread has its own
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children += map(int, file.read().split())
    return children


def kill_below(leader: int) -> None:
    """Send SIGKILL once to each descendant of a process and to the others in its session.

    Returns without waiting for their end. Its id must not be in use again.
    """
    # Its own children first: many of them may leave little of the processor for a look at all.
    killed, queue = set[int](), list_children(leader)
    for pid in queue:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)  # it forks no more
            queue += list_children(pid)
            os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    for _ in range(MAX_ATTEMPTS):  # they fork until their signal comes
        processes = read_processes()
        of_session = [pid for pid, (_, _, session) in processes.items() if session == leader]
        kin = {*_below(leader, processes), *of_session} - {leader, os.getpid()}
        living = {pid for pid in kin - killed if processes[pid][0] not in "ZX"}
        if not living:
            return
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= living


def run_until_parent_exits(parent: int, folder: str, command: list[str]) -> int:
    """Run a command until it ends, a signal comes or the parent is gone; return its exit code."""
    signals: list[int] = []
    # Signals are only noted; the loop below reacts.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: signals.append(n))
    adopt_orphans()
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_parent)
    while child.poll() is None and not signals and os.getppid() == parent:
        _reap_orphans(child.pid)
        time.sleep(TICK_S)
    code = child.poll()
    terminate_all(child)
    if folder and os.getppid() != parent:
        import shutil  # its libraries would be in each fork of a process that has this module

        shutil.rmtree(folder, ignore_errors=True)
    return 0 if code is None else code & 0xFF


def terminate_all(child: subprocess.Popen[bytes]) -> None:
    """End the command with SIGTERM, then kill all remaining descendants."""
    if child.poll() is None:
        child.terminate()
        child.send_signal(signal.SIGCONT)  # one that was stopped ends as well
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    # Descendants may start further processes: repeat until none is left.
    deadline = time.monotonic() + GRACE_S
    while (remaining := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in remaining:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap_orphans(0)
        time.sleep(TICK_S / 2)


def _reap_orphans(but: int) -> None:
    """Reap orphaned descendants, except the command, whose exit code is read elsewhere."""
    # Where the system lacks this call, there are no orphans either: see `descendants`.
    while hasattr(os, "waitid"):
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid == but:
            return
        with contextlib.suppress(OSError):
            os.waitpid(dead.si_pid, os.WNOHANG)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(run_until_parent_exits(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
