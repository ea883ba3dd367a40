"""What belongs to a sandboxed process: processes, threads and files; counted, and cleared away.

A response may do to its files what it likes while they are counted, and leave trees of any depth.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

SECONDS_TO_DIE = 10.0
MOST_ROUNDS = 50
MOST_FILES_MB = 64
MOST_ENTRIES = 10_000
LARGEST_FILE_MB = 32
_BLOCK = 512
# What bubblewrap's first process and the interpreter take, which the limit does not mean.
OWN_THREADS = {"bwrap": 2, "sandlock": 1, "none": 1}


class Process(ABC):
    """A process that leads a session: a child of ours, or one that a launcher has forked."""

    pid: int

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while it runs."""

    @abstractmethod
    def wait(self, timeout: float) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired when it takes longer."""

    def is_lost(self) -> bool:
        """Say whether it was killed because its launcher died, which is no fault of its own."""
        return False

    def release(self) -> None:
        """Let go of it, when it is dead and its number is no longer needed."""
        return


def find_family(pid: int) -> list[int]:
    """Return a process with all that descend from it."""
    found = [pid]
    for one in found:
        # Any of them may end while it is looked at.
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError):
                    children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                    found += [int(child) for child in children.split()]
    return found


def count_threads(pids: list[int]) -> int:
    """Return how many threads these processes have together."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += len(os.listdir(f"/proc/{pid}/task"))
    return total


def end_process(process: Process, *, alone: bool) -> int:
    """Kill a process with all that it has started; returns its exit code.

    `alone` says that it is the only one that can be alive (a process namespace, or no right to
    start others), so that nobody needs to be looked for.
    """
    try:
        if process.poll() is None:
            kin = [] if alone else find_family(process.pid)[1:]
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            _kill(kin)
        code = process.wait(SECONDS_TO_DIE)
        if not alone:
            kill_session(process.pid)
        return code
    finally:
        process.release()


def kill_session(leader: int) -> None:
    """Kill the processes of the session that a process leads, or has led and is not reaped yet."""
    for _ in range(MOST_ROUNDS):
        left = _find_session(leader)
        if not left:
            break
        _kill(left)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _find_session(leader: int) -> list[int]:
    """Return the living processes of the session that a process has led."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            facts = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            if int(facts[3]) == leader and facts[0] not in "ZX":
                found.append(int(entry.name))
    return found


def count_files(folder: str, pids: list[int]) -> tuple[int, int]:
    """Return bytes and number of a folder's files, with those that processes hold unlinked.

    Ends early above either limit. OSError: something in there cannot be measured.
    """
    taken, found = _count_unlinked(folder, pids)
    pending = [folder]
    while pending and found <= MOST_ENTRIES and taken <= MOST_FILES_MB << 20:
        # Whatever is listed may be gone when it is looked at.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(pending.pop()):
                found += 1
                if found > MOST_ENTRIES:
                    break
                with contextlib.suppress(FileNotFoundError):
                    taken += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return taken, found


def _count_unlinked(folder: str, pids: list[int]) -> tuple[int, int]:
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {folder}/" in line and line.endswith(" (deleted)"):
                    # How large it is cannot be seen.
                    sizes[int(line.split()[4])] = LARGEST_FILE_MB << 20
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        sizes[facts.st_ino] = facts.st_blocks * _BLOCK
    return sum(sizes.values()), len(sizes)


def remove_folder(folder: str) -> None:
    """Remove a folder with all that is in it; what its process still writes as it dies goes too.

    A tree may be deeper than Python can go, and lock its owner out.
    """
    for _ in range(MOST_ROUNDS):
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        if not os.path.lexists(folder):
            return
        for program in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*program, "--", folder], stderr=subprocess.DEVNULL)
        time.sleep(0.02)


def find_excess(sandbox: str, pid: int, folder: str, most_threads: int) -> str:
    """Say which limit a process in this kind of sandbox breaks; it may write to `folder`."""
    launcher, *others = find_family(pid)
    own = 1 if sandbox == "none" else 0
    threads = count_threads([launcher] * own + others) - OWN_THREADS[sandbox]
    if threads > most_threads:
        return f"killed: more than {most_threads} processes and threads"
    try:
        taken, found = count_files(folder, [launcher, *others]) if folder else (0, 0)
    except OSError as error:
        return f"broke its sandbox: its files cannot be measured ({error.strerror})"
    if not folder and others:
        # bubblewrap limits the size of what lies in memory, and not the number.
        with contextlib.suppress(OSError):
            memory = os.statvfs(f"/proc/{others[-1]}/root/tmp")
            # While it starts, this is the folder outside.
            if memory.f_blocks * memory.f_frsize == MOST_FILES_MB << 20:
                found = memory.f_files - memory.f_ffree
    if taken > MOST_FILES_MB << 20:
        return f"killed: wrote more than {MOST_FILES_MB} MB of files"
    return f"killed: made more than {MOST_ENTRIES} files" if found > MOST_ENTRIES else ""
