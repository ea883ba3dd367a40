"""Sandboxed processes: what they use, and the launcher of sandlock that forks them.

Processes, threads and files of a response are counted and removed. A response may change its
files while they are counted, and leave folders of any depth.

The launcher is a separate program, which imports the package sandlock once, then forks.
`sandboxes.Launcher` starts it under a reaper, with a socket as standard input. Each message there
has the descriptors of a channel and of three streams. The fork, a watcher, reads from the channel
what to run, and writes its pid and the exit code of the command there. When the channel closes, it
kills what the command has left, and only then ends, so that its pid is not reused meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ppo_cli.processes.reaper import kill_below

KILL_TIMEOUT_S = 10.0
MAX_ATTEMPTS = 50  # to remove a folder: dying processes still write
MAX_FILES_MB = 64
MAX_FILE_COUNT = 10_000
MAX_FILE_MB = 32
_BLOCK = 512  # the unit of st_blocks, on every file system
# Threads of the sandbox itself, which do not count against the limit of the response.
SANDBOX_THREADS = {"bwrap": 2, "sandlock": 1, "none": 1}


def list_process_tree(pid: int) -> list[int]:
    """Return the pids of a process and of its descendants, quickly; one may be missed."""
    pids = [pid]
    for member in pids:
        # Any process or thread may end while its entries are read.
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{member}/task"):
                with suppress(OSError):
                    children = Path(f"/proc/{member}/task/{thread}/children").read_text()
                    pids += [int(child) for child in children.split()]
    return pids


def count_threads(pids: list[int]) -> int:
    """Return the number of threads of these processes."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += len(os.listdir(f"/proc/{pid}/task"))
    return total


def count_files(folder: str, pids: list[int]) -> tuple[int, int]:
    """Return size in bytes and number of a folder's files, and of unlinked files held by `pids`.

    Stops early above either limit. Raises OSError when something in there cannot be measured.
    """
    used_bytes, count = _count_unlinked(folder, pids)
    pending = [folder]
    while pending and count <= MAX_FILE_COUNT and used_bytes <= MAX_FILES_MB << 20:
        # A listed file may be removed before it is measured.
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(pending.pop()):
                count += 1
                if count > MAX_FILE_COUNT:
                    break
                with suppress(FileNotFoundError):
                    used_bytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return used_bytes, count


def _count_unlinked(folder: str, pids: list[int]) -> tuple[int, int]:
    """Return size in bytes and number of the deleted files that these processes hold open."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {folder}/" in line and line.endswith(" (deleted)"):
                    # A mapping does not show the size of its file: assume the largest.
                    sizes[int(line.split()[4])] = MAX_FILE_MB << 20
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    facts = os.stat(f"/proc/{pid}/fd/{fd}")
                    if stat.S_ISREG(facts.st_mode) and not facts.st_nlink:
                        sizes[facts.st_ino] = facts.st_blocks * _BLOCK
    return sum(sizes.values()), len(sizes)


def remove_folder(folder: str) -> None:
    """Remove a folder and its contents, including files that a dying process still writes.

    Uses chmod and rm: a response's folders may be deeper than Python can recurse, and unreadable.
    """
    for _ in range(MAX_ATTEMPTS):
        with suppress(OSError):
            os.rmdir(folder)
        if not os.path.lexists(folder):
            return
        for program in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*program, "--", folder], stderr=subprocess.DEVNULL)
        time.sleep(0.02)


def describe_broken_limit(sandbox: str, pid: int, folder: str, most_threads: int) -> str:
    """Name the limit that a process in this kind of sandbox has broken, or return ''."""
    launcher, *others = list_process_tree(pid)
    # Without a sandbox the first process is the response itself, otherwise the sandbox's own.
    counted = [launcher, *others] if sandbox == "none" else others
    threads = count_threads(counted) - SANDBOX_THREADS[sandbox]
    if threads > most_threads:
        return f"killed: more than {most_threads} processes and threads"
    try:
        used_bytes, count = count_files(folder, [launcher, *others]) if folder else (0, 0)
    except OSError as error:
        return f"broke its sandbox: its files cannot be measured ({error.strerror})"
    if not folder and others:
        # bubblewrap's tmpfs limits the size of the files, but not their number.
        with suppress(OSError):
            memory = os.statvfs(f"/proc/{others[-1]}/root/tmp")
            # While the sandbox starts, this is still the /tmp outside.
            if memory.f_blocks * memory.f_frsize == MAX_FILES_MB << 20:
                count = memory.f_files - memory.f_ffree
    if used_bytes > MAX_FILES_MB << 20:
        return f"killed: wrote more than {MAX_FILES_MB} MB of files"
    return f"killed: made more than {MAX_FILE_COUNT} files" if count > MAX_FILE_COUNT else ""


READY = b"ready"
INT64 = struct.Struct("<q")
# System calls that Landlock does not restrict: they change mode, owner or times of any file.
DENIED = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat",
    "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr",
    "utime", "utimes", "utimensat", "futimesat",
)  # fmt: skip
# Numbers of prctl, capset, unshare and mount, from the kernel's headers.
_DIE_WITH_PARENT, _DROP_BOUNDING, _AMBIENT, _CLEAR_AMBIENT = 1, 24, 47, 4
_CAPABILITIES_3 = 0x20080522
_MAX_CAPABILITIES = 64
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_PRIVATE_TREE, _NO_SUID_NO_DEVICES = 0x00044000, 0x6


def serve(control: socket.socket) -> None:
    """Fork a watcher for each request, until the trainer closes the socket."""
    limits_files = can_mount_limited_tmpfs()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
    control.send(READY)
    launcher = os.getpid()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 4, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            return
        channel, *streams = fds
        try:
            if os.fork() == 0:
                watch_command(launcher, channel, streams, limits_files)
        except OSError as error:
            with suppress(OSError):
                os.write(channel, INT64.pack(-(error.errno or errno.EAGAIN)))
        for fd in fds:
            os.close(fd)


def watch_command(launcher: int, channel: int, streams: list[int], limits_files: bool) -> NoReturn:
    """Run one command as its watcher, until the trainer releases it; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            os._exit(1)
        os.write(channel, INT64.pack(os.getpid()))
        # The request: a length, then that many bytes of JSON.
        with open(channel, "rb", closefd=False) as file:
            plan, command = json.loads(file.read(*INT64.unpack(file.read(INT64.size))))
        if limits_files:
            mount_limited_tmpfs(plan["cwd"])
        drop_privileges()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        # Close the launcher's descriptors: an open copy would keep their channels alive.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != channel:
                with suppress(OSError):
                    os.close(int(name))
        code = run(plan, command, channel)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            os.write(channel, INT64.pack(code))
        _end_at_release(channel)


def _end_at_release(channel: int) -> NoReturn:
    """Wait until the trainer closes the channel, then kill what is left, and exit."""
    with suppress(OSError):
        os.read(channel, 1)
    kill_below(os.getpid())
    os._exit(0)


def run(plan: dict[str, Any], command: list[str], channel: int) -> int:
    """Run the command in a sandbox, on the streams of this process; returns a shell's exit code."""
    import threading

    from sandlock import Sandbox

    sandbox = Sandbox(
        **plan, clean_env=True, max_processes=1, no_coredump=True, extra_deny_syscalls=DENIED
    )
    process = sandbox.popen(command)
    threading.Thread(target=_end_at_release, args=(channel,), daemon=True).start()
    result = process.wait()
    if result.signal > 0:
        return 128 + int(result.signal)
    # The package reports -1 without a signal number when it was SIGKILL.
    return int(result.exit_code) if result.exit_code >= 0 else 128 + signal.SIGKILL


def mount_limited_tmpfs(folder: str) -> None:
    """Mount a tmpfs of limited size over the folder, visible to this process only.

    It ends with the process. Raises OSError when the kernel refuses.
    """
    library = ctypes.CDLL(None)
    if library.unshare(_NEW_MOUNTS) != 0:
        # Without root, a user namespace gives the right to mount.
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
    options = f"size={MAX_FILES_MB}m,nr_inodes={MAX_FILE_COUNT},mode=0700".encode()
    place = os.fsencode(folder)
    if library.mount(b"ppo-code", place, b"tmpfs", _NO_SUID_NO_DEVICES, options) != 0:
        raise OSError("no mounts")


def can_mount_limited_tmpfs() -> bool:
    """Try `mount_limited_tmpfs` in a fork; where it fails, the trainer counts the files."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(OSError):
            mount_limited_tmpfs("/tmp")
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def drop_privileges() -> None:
    """Drop all capabilities of this process and its forks: root could raise its limits."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    for number in range(_MAX_CAPABILITIES):
        library.prctl(_DROP_BOUNDING, number, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITIES_3, 0))
    if library.capset(header, ctypes.create_string_buffer(24)) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def main(arguments: list[str]) -> None:
    """Serve the trainer."""
    control = socket.socket(fileno=0)
    try:
        # Import once for all forks. A fork copies no threads, so the import must not start any.
        import sandlock  # noqa: F401

        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("the package sandlock starts threads when it is imported")
        gc.freeze()
    except Exception as error:
        control.send(f"{type(error).__name__}: {error}".encode())
        return
    serve(control)
