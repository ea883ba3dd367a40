"""A small process that keeps Ray: it starts Ray, and lets nothing of it outlive the run.

Run as a file of its own, with the standard library only: PARENT FOLDER COMMAND… . It ends, and
ends all that came of COMMAND, when the command ends, on SIGTERM, or when PARENT is gone, however
that died (then it removes FOLDER as well). As a subreaper it inherits the orphans of its
children, so that nothing below it can slip away.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

TICK_S = 0.1
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(pid: int) -> list[int]:
    """Return every process below this one, from the table in /proc (none where it is absent)."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in brackets may hold anything, a bracket too: read behind the last one.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            below.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        children = below.get(queue.pop(), [])
        found += children
        queue += children
    return found


def keep(parent: int, folder: Path, command: list[str]) -> int:
    """Run a command until it ends, is told to end, or loses its parent; returns its exit code."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: asked.append(n))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_keeper)
    while child.poll() is None and not asked and os.getppid() == parent:
        _reap(child.pid)
        time.sleep(TICK_S)
    code = child.poll()
    end_all(child)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if code is None else code & 0xFF


def end_all(child: subprocess.Popen[bytes]) -> None:
    """End the command politely, then whatever is left below us, whatever it does."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        time.sleep(TICK_S / 2)


def _reap(but: int) -> None:
    """Bury orphans that came to us; the command itself is waited for where its code is read."""
    for pid in descendants(os.getpid()):
        if pid != but:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def _die_with_keeper() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
