"""What a sandbox lets through: runs inside one, tries what must not work, and says what did.

It prints `started`, then a line for each thing that it could do. Each try is harmless where it
works: other processes are set to what they are set to already.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import time
from functools import partial

from ppo_cli.rewards.code.limits import confine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "PPO_CLI_PROBE"
SECONDS_TO_BE_SEEN = 1.0
_LOWEST_NUMBERS = 9
_PIECE = 1 << 20
_SEIZE = 0x4206
_SOCKETS = {
    "TCP sockets": (2, 1, 0),
    "TCP sockets over IPv6": (10, 1, 0),
    "MPTCP sockets": (2, 1, 262),
    "UDP sockets": (2, 2, 0),
    "raw sockets": (2, 3, 1),
    "ping sockets": (2, 2, 1),
    "unix sockets": (1, 1, 0),
    "netlink sockets": (16, 3, 0),
    "packet sockets": (17, 3, 0),
    "kernel crypto sockets": (38, 5, 0),
    "vsock sockets": (40, 1, 0),
}


def main(arguments: list[str]) -> None:
    """Try one thing: `doors`, or to hold more files than allowed: `named` or `unlinked`."""
    what, *rest = arguments
    limits, told = rest[:4], rest[4:]
    confine(*map(int, limits))
    print("started")
    if what == "doors":
        try_doors(*told)
    else:
        hold_files(int(told[0]), int(limits[2]), unlinked=what == "unlinked")
    print("ended")


def try_doors(file: str, folder: str, port: str, process: str) -> None:
    """Try everything; what is given is of the outside."""
    tries: dict[str, Callable[[], object]] = {
        "reads /etc/shadow": lambda: open("/etc/shadow").close(),
        "reads files of others": lambda: open(file).close(),
        "writes outside": lambda: open(os.path.join(folder, "written"), "w").close(),
        "sees the environment": lambda: os.environ[SECRET],
        "starts processes": _start_process,
        "reaches the network": lambda: _connect(int(port)),
        "listens on a port": _listen,
        "opens pairs of sockets that send anywhere": lambda: socket.socketpair(1, 2),
    }
    for name, kind in _SOCKETS.items():
        tries[f"opens {name}"] = partial(socket.socket, *kind)
    for whose, pid in (("other processes", int(process)), ("its parent", os.getppid())):
        # In a process namespace the lowest numbers are of that.
        if pid > _LOWEST_NUMBERS:
            tries |= {
                f"reads the environment of {whose}": partial(_read_environment, pid),
                f"signals {whose}": partial(os.kill, pid, 0),
                f"limits {whose}": partial(_set_limits, pid),
                f"holds on to {whose}": partial(os.pidfd_open, pid),
                f"schedules {whose}": partial(_schedule, pid),
                f"ranks {whose}": partial(_rank, pid),
                f"traces {whose}": partial(_trace, pid),
            }
    for words, act in tries.items():
        try:
            act()
        except Exception:
            continue
        print(words)


def hold_files(most_mb: int, largest_mb: int, *, unlinked: bool) -> None:
    """Hold more files than allowed, and see whether anybody minds."""
    held = []
    try:
        for number in range(most_mb // largest_mb + 1):
            held.append(open(f"probe-{number}", "wb"))  # noqa: SIM115
            if unlinked:
                os.unlink(f"probe-{number}")
            for _ in range(largest_mb * (1 << 20) // _PIECE):
                held[-1].write(bytes(_PIECE))
            held[-1].flush()
    except OSError:
        return
    time.sleep(SECONDS_TO_BE_SEEN)
    print(f"holds more than {most_mb} MB of {'unlinked ' if unlinked else ''}files")


def _connect(port: int) -> None:
    with socket.socket() as plug:
        plug.settimeout(2)
        plug.connect(("127.0.0.1", port))


def _listen() -> None:
    with socket.socket() as plug:
        plug.listen()


def _start_process() -> None:
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def _read_environment(pid: int) -> None:
    open(f"/proc/{pid}/environ").close()


def _set_limits(pid: int) -> None:
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def _schedule(pid: int) -> None:
    os.sched_setaffinity(pid, os.sched_getaffinity(pid))


def _rank(pid: int) -> None:
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))


def _trace(pid: int) -> None:
    if ctypes.CDLL(None).ptrace(_SEIZE, pid, 0, 0) != 0:
        raise OSError
