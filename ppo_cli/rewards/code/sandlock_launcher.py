"""The program that starts commands under sandlock: it imports the package once, then forks.

Started by `sandboxes.Launcher` with a socket as standard input. Each message there is a folder,
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
import struct
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from ppo_cli.rewards.code.ending import (
    MOST_ENTRIES,
    MOST_FILES_MB,
    kill_session,
    remove_folder,
)

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
            elif fd in self._channels:
                self._release(self._channels.pop(fd))
        return True

    def _release(self, launch: Launch) -> None:
        """The trainer wants no more of it."""
        self._poll.unregister(launch.channel)
        lives = self._exits.pop(launch.exit, None) is not None
        if lives:
            self._poll.unregister(launch.exit)
        launch.end(has_ended=not lives)

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
            plan, command = read_order(channel)
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


def read_order(channel: int) -> tuple[dict[str, Any], list[str]]:
    """Read what to run: a length, then that many bytes."""
    with open(channel, "rb", closefd=False) as file:
        plan, command = json.loads(file.read(*NUMBER.unpack(file.read(NUMBER.size))))
    return plan, command


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


def prepare() -> None:
    """Load once what every fork needs. Threads would not come along in a fork."""
    import sandlock  # noqa: F401

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("the package sandlock starts threads when it is imported")
    gc.freeze()


def main(arguments: list[str]) -> None:
    """Serve the process that is named by the argument, which must be the parent."""
    control = socket.socket(fileno=0)
    trainer = os.pidfd_open(int(arguments[0]))
    if os.getppid() != int(arguments[0]):
        return
    try:
        prepare()
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}".encode())
        return
    server = Server(control, trainer)
    control.send(READY)
    server.serve()
