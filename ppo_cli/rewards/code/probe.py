"""A program that runs inside a sandbox, attempts what must not work, and prints what worked.

It prints `started`, then a line for each successful attempt, then `ended`. A successful attempt
does no harm: settings of other processes are set to the values that they already have.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import time
from functools import partial

from ppo_cli.rewards.code.limits import apply_limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "PPO_CLI_PROBE"
DETECTION_WAIT_S = 1.0
_MAX_NAMESPACE_PID = 9
_PIECE = 1 << 20
_SEIZE = 0x4206  # PTRACE_SEIZE, which does not stop the process
# Family, type and protocol, by number: Python may lack the names.
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
    """Run one trial: `doors` (all escapes), or more files than allowed, `named` or `unlinked`."""
    what, *rest = arguments
    limits, facts = rest[:5], rest[5:]
    apply_limits(*map(int, limits))
    print("started")
    if what == "doors":
        try_escapes(*facts)
    else:
        exceed_file_limit(int(facts[0]), int(limits[3]), unlinked=what == "unlinked")
    print("ended")


def try_escapes(file: str, folder: str, port: str, process: str) -> None:
    """Attempt everything; the arguments name things outside the sandbox."""
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
        # In a process namespace the lowest pids are the sandbox's own processes.
        if pid > _MAX_NAMESPACE_PID:
            tries |= {
                f"reads the environment of {whose}": partial(_read_environment, pid),
                f"signals {whose}": partial(os.kill, pid, 0),
                f"limits {whose}": partial(_set_limits, pid),
                f"holds on to {whose}": partial(os.pidfd_open, pid),
                f"schedules {whose}": partial(_schedule, pid),
                f"ranks {whose}": partial(_rank, pid),
                f"traces {whose}": partial(_trace, pid),
            }
    for description, act in tries.items():
        try:
            act()
        except Exception:
            continue
        print(description)


def exceed_file_limit(most_mb: int, largest_mb: int, *, unlinked: bool) -> None:
    """Hold more bytes of files than allowed, and print so unless this process is killed."""
    files = []
    try:
        for number in range(most_mb // largest_mb + 1):
            files.append(open(f"probe-{number}", "wb"))  # noqa: SIM115
            if unlinked:
                os.unlink(f"probe-{number}")
            for _ in range(largest_mb * (1 << 20) // _PIECE):
                files[-1].write(bytes(_PIECE))
            files[-1].flush()
    except OSError:
        return
    time.sleep(DETECTION_WAIT_S)
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
