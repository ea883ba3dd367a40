"""Sandboxed processes: how the launcher of sandlock forks them, and how any of them is ended.

What belongs to one (processes, threads, files) is counted, and cleared away. A response may do to
its files what it likes while they are counted, and leave trees of any depth.

The launcher is a program of its own, which imports the package sandlock once, then forks. It is
started by `sandboxes.Launcher` with a socket as standard input. Each message there is a folder,
with the descriptors of a channel and of three streams; a fork reads from the channel what to run.
The channel brings back the number of the process and how it ended; when it closes, the process is
killed, and only then reaped, so that its number is nobody else's meanwhile. When the trainer is
gone, all channels close, and this program removes the folders that are left, and ends.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                    found += [int(child) for child in children.split()]
    return found


def count_threads(pids: list[int]) -> int:
    """Return how many threads these processes have together."""
    total = 0
    for pid in pids:
        with suppress(OSError):
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
            with suppress(OSError):
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
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _find_session(leader: int) -> list[int]:
    """Return the living processes of the session that a process has led."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
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
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(pending.pop()):
                found += 1
                if found > MOST_ENTRIES:
                    break
                with suppress(FileNotFoundError):
                    taken += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return taken, found


def _count_unlinked(folder: str, pids: list[int]) -> tuple[int, int]:
    sizes: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {folder}/" in line and line.endswith(" (deleted)"):
                    # How large it is cannot be seen.
                    sizes[int(line.split()[4])] = LARGEST_FILE_MB << 20
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    facts = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        sizes[facts.st_ino] = facts.st_blocks * _BLOCK
    return sum(sizes.values()), len(sizes)


def remove_folder(folder: str) -> None:
    """Remove a folder with all that is in it; what its process still writes as it dies goes too.

    A tree may be deeper than Python can go, and lock its owner out.
    """
    for _ in range(MOST_ROUNDS):
        with suppress(OSError):
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
        with suppress(OSError):
            memory = os.statvfs(f"/proc/{others[-1]}/root/tmp")
            # While it starts, this is the folder outside.
            if memory.f_blocks * memory.f_frsize == MOST_FILES_MB << 20:
                found = memory.f_files - memory.f_ffree
    if taken > MOST_FILES_MB << 20:
        return f"killed: wrote more than {MOST_FILES_MB} MB of files"
    return f"killed: made more than {MOST_ENTRIES} files" if found > MOST_ENTRIES else ""


READY = b"ready"
NUMBER = struct.Struct("<q")
# What Landlock does not govern: rights, owners and times of files that cannot even be read.
DENIED = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
    "utime", "utimes", "utimensat", "futimesat",
)  # fmt: skip
_LONGEST_PATH = 4096
_DIE_WITH_PARENT, _DROP_BOUNDING, _AMBIENT, _CLEAR_AMBIENT = 1, 24, 47, 4
_CAPABILITIES_3 = 0x20080522
_MOST_CAPABILITIES = 64
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE_TREE, _NO_SUID_NO_DEVICES = 0x00044000, 0x6


@dataclass(frozen=True)
class Launch:
    """A process that was forked; `exit` becomes readable when it ends."""

    pid: int
    exit: int
    channel: int

    def tell(self, number: int) -> None:
        """Send the trainer a number, if it still listens."""
        with suppress(OSError):
            os.write(self.channel, NUMBER.pack(number))

    def exit_code(self) -> int:
        """Return how it ended, as `subprocess` counts; the process stays unreaped."""
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def end(self, *, has_ended: bool) -> None:
        """Kill it with its command if it lives, and reap it."""
        if not has_ended:
            # A command that is only half confined does not die with who watches over it.
            kill_session(self.pid)
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.exit)
        os.close(self.channel)


class Server:
    """Forks on demand until the trainer hangs up or dies."""

    def __init__(self, control: socket.socket, trainer: int) -> None:
        self._control = control
        self._trainer = trainer
        self._files_limited = can_limit_files()
        self._poll = select.poll()
        # The first to be registered is the first to be served: a number that is closed later
        # in a round is taken again only in the next.
        self._poll.register(control, select.POLLIN)
        self._poll.register(trainer, select.POLLIN)
        self._exits: dict[int, Launch] = {}
        self._channels: dict[int, Launch] = {}
        self._folders: list[str] = []

    def serve(self) -> None:
        """Serve to the end, and leave nothing behind."""
        while self._serve_round():
            pass
        for launch in self._channels.values():
            launch.end(has_ended=launch.exit not in self._exits)
        # A trainer that dies has no time for it.
        for folder in self._folders:
            remove_folder(folder)

    def _serve_round(self) -> bool:
        for fd, _ in self._poll.poll():
            if fd == self._trainer or (fd == self._control.fileno() and not self._accept()):
                return False
            if fd in self._exits:
                launch = self._exits.pop(fd)
                self._poll.unregister(fd)
                launch.tell(launch.exit_code())
            elif fd in self._channels:  # the trainer wants no more of it
                launch = self._channels.pop(fd)
                self._poll.unregister(fd)
                lives = self._exits.pop(launch.exit, None) is not None
                if lives:
                    self._poll.unregister(launch.exit)
                launch.end(has_ended=not lives)
        return True

    def _accept(self) -> bool:
        """Take one order; False when there will be no more."""
        folder, fds, _, _ = socket.recv_fds(
            self._control, _LONGEST_PATH, 4, socket.MSG_CMSG_CLOEXEC
        )
        if not folder:
            return False
        try:
            if len(fds) == 4:
                self._fork(os.fsdecode(folder), fds[0], fds[1:])
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _fork(self, folder: str, channel: int, streams: list[int]) -> None:
        launcher = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            with suppress(OSError):
                os.write(channel, NUMBER.pack(-(error.errno or errno.EAGAIN)))
            return
        if pid == 0:
            run_forked(launcher, channel, streams, self._files_limited)
        launch = Launch(pid, os.pidfd_open(pid), os.dup(channel))
        self._folders = [one for one in self._folders if os.path.lexists(one)] + [folder]
        self._exits[launch.exit] = self._channels[launch.channel] = launch
        self._poll.register(launch.exit, select.POLLIN)
        # For its end alone: what is to be read there is for the fork.
        self._poll.register(launch.channel, 0)
        launch.tell(pid)


def run_forked(launcher: int, channel: int, streams: list[int], files_limited: bool) -> NoReturn:
    """Be the process that watches over one command, and end as it ends."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == launcher:
            # What to run: a length, then that many bytes.
            with open(channel, "rb", closefd=False) as file:
                plan, command = json.loads(file.read(*NUMBER.unpack(file.read(NUMBER.size))))
            if files_limited:
                limit_files(plan["cwd"])
            drop_privileges()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            # Close what belongs to the launcher, so that nobody waits for this process by mistake.
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2:
                    with suppress(OSError):
                        os.close(int(name))
            code = run(plan, command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def run(plan: dict[str, Any], command: list[str]) -> int:
    """Run the command with the streams of this process; returns its exit code, as a shell does."""
    from sandlock import Sandbox

    sandbox = Sandbox(
        **plan, clean_env=True, max_processes=1, no_coredump=True, extra_deny_syscalls=DENIED
    )
    result = sandbox.popen(command).wait()
    if result.signal > 0:
        return 128 + int(result.signal)
    # The package tells no number when it was SIGKILL.
    return int(result.exit_code) if result.exit_code >= 0 else 128 + signal.SIGKILL


def limit_files(folder: str) -> None:
    """Lay a file system in memory over the folder, of limited size and for this process alone.

    It goes with the process. OSError: the kernel refuses.
    """
    library = ctypes.CDLL(None)
    if library.unshare(_NEW_MOUNTS) != 0:
        identities = {"uid_map": os.getuid(), "gid_map": os.getgid()}
        if library.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
            raise OSError("no namespaces")
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        for name, number in identities.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(f"{number} {number} 1")
    if library.mount(b"none", b"/", None, _PRIVATE_TREE, None) != 0:
        raise OSError("no mounts")
    options = f"size={MOST_FILES_MB}m,nr_inodes={MOST_ENTRIES},mode=0700".encode()
    place = os.fsencode(folder)
    if library.mount(b"ppo-code", place, b"tmpfs", _NO_SUID_NO_DEVICES, options) != 0:
        raise OSError("no mounts")


def can_limit_files() -> bool:
    """Try it in a process that ends at once; where it fails, the trainer counts the files."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(OSError):
            limit_files("/tmp")
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def drop_privileges() -> None:
    """Give up every privilege of root, for this process and its forks: it could lift limits."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    for number in range(_MOST_CAPABILITIES):
        library.prctl(_DROP_BOUNDING, number, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_3, 0))
    if library.capset(header, ctypes.create_string_buffer(24)) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def main(arguments: list[str]) -> None:
    """Serve the process that is named by the argument, which must be the parent."""
    control = socket.socket(fileno=0)
    trainer = os.pidfd_open(int(arguments[0]))
    if os.getppid() != int(arguments[0]):
        return
    try:
        # Load once what every fork needs. Threads would not come along in a fork.
        import sandlock  # noqa: F401

        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("the package sandlock starts threads when it is imported")
        gc.freeze()
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}".encode())
        return
    server = Server(control, trainer)
    control.send(READY)
    server.serve()
