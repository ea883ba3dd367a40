"""A sandbox is believed only when its trial has kept everything in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ppo_cli.config.schema.reward import Code
from ppo_cli.errors import RewardError
from ppo_cli.rewards.code import limits, sandboxes
from ppo_cli.rewards.code.limits import build_filter
from ppo_cli.rewards.code.sandboxes import Bubblewrap, ChildProcess, Sandbox, Sandlock, Unsandboxed


class Broken(Unsandboxed):
    """Starts something else."""

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ChildProcess:
        """Start a program that only complains."""
        other = [sys.executable, "-c", "import sys; sys.exit('no user namespaces')"]
        return super().start(other, streams=streams, folder=folder)


class Inheriting(Unsandboxed):
    """Hands its environment on."""

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ChildProcess:
        """Start a command with the environment of this process."""
        return ChildProcess(list(command), stdin=streams[0], stdout=streams[1], stderr=streams[2])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_FAULTS", {})


def test_each_thing_that_gets_through_is_named() -> None:
    begin, _, told = sandboxes.find_fault(Unsandboxed()).partition("code inside ")
    assert begin == "its trial failed: "
    missing = {
        "reads files of others", "writes outside", "reaches the network", "listens on a port",
        "starts processes", "opens TCP sockets", "opens UDP sockets", "opens unix sockets",
        "opens netlink sockets", "opens pairs of sockets that send anywhere",
        "reads the environment of other processes", "signals other processes",
        "limits other processes", "holds on to other processes", "schedules other processes",
        "signals its parent", "limits its parent", "holds on to its parent",
    } - set(told.split(", "))  # fmt: skip
    assert missing == set()
    assert "sees the environment" not in told
    assert "PPO_CLI_PROBE" not in os.environ


def test_an_environment_that_is_handed_on_is_named() -> None:
    assert "sees the environment" in sandboxes.find_fault(Inheriting())


@pytest.mark.parametrize("what", ["unlinked", "named"])
def test_files_that_nobody_limits_are_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandboxes._find_leak(Unsandboxed(), what, [64]) == ""
    monkeypatch.setattr(sandboxes, "describe_broken_limit", lambda *args, **named: "")
    kind = "unlinked " if what == "unlinked" else ""
    told = f"its trial failed: code inside holds more than 64 MB of {kind}files"
    assert sandboxes._find_leak(Unsandboxed(), what, [64]) == told


def test_a_sandbox_that_does_not_start_tells_why() -> None:
    told = sandboxes.find_fault(Broken())
    assert told == "its trial ended with exit code 1: no user namespaces"


@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
def test_a_wanted_sandbox_is_taken_or_refused(
    name: str, make_sandbox: Callable[[str], Sandbox]
) -> None:
    make_sandbox(name)
    settings = Code.model_validate({"sandbox": name})
    assert sandboxes.choose_sandbox(settings).name == name


def test_the_other_sandbox_is_no_substitute_for_a_wanted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sandboxes, "find_fault", lambda sandbox: "gone" if sandbox.name == "bwrap" else ""
    )
    assert sandboxes.choose_sandbox(Code()).name == "sandlock"
    with pytest.raises(RewardError, match=r"none works here \(bwrap: gone\)"):
        sandboxes.choose_sandbox(Code(sandbox="bwrap"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has sandboxes")
def test_a_sandbox_works_on_linux() -> None:
    faults = {kind.name: sandboxes.find_fault(kind()) for kind in (Bubblewrap, Sandlock)}
    assert "" in faults.values(), faults


@pytest.mark.skipif(
    (sys.platform, os.uname().machine) not in {("linux", "x86_64"), ("linux", "aarch64")},
    reason="Linux on x86_64 and aarch64 has a filter",
)
def test_the_filter_is_whole_instructions() -> None:
    program = build_filter()
    assert program is not None
    assert len(program) % 8 == 0
    assert len(program) > 400


class Stuck(Unsandboxed):
    """Starts something that does not end."""

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ChildProcess:
        """Start a program that sleeps."""
        other = [sys.executable, "-c", "import time; time.sleep(60)"]
        return super().start(other, streams=streams, folder=folder)


class NotThere(Unsandboxed):
    """Cannot be started; counts how often somebody tried."""

    tries = 0

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ChildProcess:
        """Fail as a program that may not be run."""
        NotThere.tries += 1
        raise PermissionError(13, "Permission denied")


def test_a_trial_that_hangs_or_cannot_start_is_a_fault_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandboxes, "PROBE_TIMEOUT_S", 0.2)
    assert sandboxes.find_fault(Stuck()) == "its trial took more than 0.2 s"
    monkeypatch.setattr(sandboxes, "_FAULTS", {})
    for _ in range(2):
        assert sandboxes.find_fault(NotThere()) == "it does not start (Permission denied)"
    assert NotThere.tries == 1
    assert "PPO_CLI_PROBE" not in os.environ


def test_all_faults_are_told_and_no_sandbox_only_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Sandbox] = []

    def fault(sandbox: Sandbox) -> str:
        looked.append(sandbox)
        return f"no {sandbox.name}"

    monkeypatch.setattr(sandboxes, "find_fault", fault)
    told: list[str] = []
    chosen = sandboxes.choose_sandbox(Code(allow_unsandboxed=True, memory_mb=99), told.append)
    assert chosen.name == "none" and [one.name for one in looked] == ["bwrap", "sandlock"]
    assert told[0].endswith("No sandbox works here (bwrap: no bwrap; sandlock: no sandlock).")
    assert isinstance(looked[1], Sandlock) and looked[1]._memory_mb == 99
    assert looked[1].separate()._memory_mb == 99
    with pytest.raises(RewardError, match="bwrap: no bwrap; sandlock: no sandlock"):
        sandboxes.choose_sandbox(Code())
    only = sandboxes.choose_sandbox(Code(allow_unsandboxed=True, sandbox="sandlock"), told.append)
    assert only.name == "none" and "bwrap" not in told[1]
    monkeypatch.setattr(sandboxes, "find_fault", lambda sandbox: "")
    assert sandboxes.choose_sandbox(Code(allow_unsandboxed=True), told.append).name == "bwrap"
    assert len(told) == 2


# Each with arguments that the kernel itself answers otherwise; without any harm done.
REFUSED = """
ptrace 0 0 0 0, socket 2 1 0, setsid, setpgid 0 0, setpriority 0 0 5, sched_setaffinity 0 0 0,
sched_setparam -1 0, sched_setscheduler -1 0 0, process_vm_readv 0 0 0 0 0 0,
process_vm_writev 0 0 0 0 0 0, process_madvise -1 0 0 0 -1, process_mrelease -1 -1, pidfd_open -1 0,
pidfd_getfd -1 0 -1, pidfd_send_signal -1 0 0 -1, sigqueue -1 0 0, connect -1 0 0, bind -1 0 0,
listen -1 0, accept -1 0 0, accept4 -1 0 0 0, sendmsg -1 0 0, sendmmsg -1 0 0 0, inotify_init1 -1,
fanotify_init -1 0, memfd_create 0 -1, shmget 0 0 0, shmat -1 0 0, shmctl -1 0 0, semget 0 -1 0,
semop -1 0 0, semtimedop -1 0 0 0, semctl -1 0 0 0, msgget 0 0, msgsnd -1 0 0 0, msgrcv -1 0 0 0 0,
msgctl -1 0 0, unshare 0, setns -1 0, mount 0 0 0 0 0, umount2 0 -1, pivot_root 0 0, chroot 0,
open_tree -1 0 0, move_mount -1 0 -1 0 -1, fsopen 0 -1, fsconfig -1 -1 0 0 0, fsmount -1 -1 0,
fspick -1 0 -1, mount_setattr -1 0 -1 0 0, name_to_handle_at -1 0 0 0 -1, open_by_handle_at -1 0 0,
syncfs -1, quotactl -1 0 0 0, klogctl -1 0 0, personality -1, acct 1, swapon 0 -1, swapoff 0,
init_module 0 0 0, delete_module 0 0, reboot -1, prctl 1 0 0 0 0, prctl 4 0 0 0 0, prctl 22 0 0 0 0,
prctl 36 0 0 0 0, fcntl 0 8 0, fcntl 0 10 0, fcntl 0 15 0, fcntl 0 1024 0, fcntl 0 1026 0,
ioctl 0 21522 0, ioctl 0 35073 0, ioctl 0 35074 0, socketpair 1 2 0 0, socketpair 1 5 0 0,
socketpair 2 1 0 0, kill 1 0, tgkill 1 1 0, prlimit 1 0 0 0
"""
FILTERED = """
import ctypes, errno, fcntl, os, resource, socket, sys, threading
from ppo_cli.rewards.code.limits import install_filter
libc, me = ctypes.CDLL(None, use_errno=True), os.getpid()
install_filter()
def errno_of(name, *given):
    ctypes.set_errno(0)
    return getattr(libc, name)(*given) == -1 and ctypes.get_errno()
for call in sys.argv[1].split(","):
    name, *given = call.split()
    # A C library may be older than a system call.
    if hasattr(libc, name) and errno_of(name, *map(int, given)) != errno.EPERM:
        print("not refused:", call)
for name, given, wanted in (
    ("fallocate", (0, 0, 0, 0), errno.EOPNOTSUPP),
    ("open", (b".", os.O_TMPFILE | os.O_RDWR, 0), errno.EOPNOTSUPP),
    ("openat", (-100, b".", os.O_TMPFILE | os.O_RDWR, 0), errno.EOPNOTSUPP),
    ("syscall", (435, 0, 0), errno.ENOSYS),
    ("syscall", (437, 0, 0, 0, 0), errno.ENOSYS),
):
    if errno_of(name, *given) != wanted:
        print("not absent:", name, given)
try:
    os.fork()
    print("forked")
except PermissionError:
    pass
for kind in (socket.SOCK_STREAM, socket.SOCK_STREAM | socket.SOCK_CLOEXEC):
    socket.socketpair(socket.AF_UNIX, kind)
os.kill(me, 0)
for pid in (0, me):
    resource.prlimit(pid, resource.RLIMIT_NOFILE)
fcntl.fcntl(0, fcntl.F_GETFL)
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
"""


def test_the_filter_refuses_by_name_and_argument_and_lets_the_rest_pass() -> None:
    """The C library has the numbers of system calls from elsewhere."""
    program = [sys.executable, "-c", FILTERED, REFUSED]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "thread\n", "")


# The C library has no function for these, or calls them by another number.
BY_NUMBER = """
fork vfork kcmp get_robust_list tkill rt_tgsigqueueinfo ioprio_set sched_setattr migrate_pages
move_pages inotify_init memfd_secret semop mq_open mq_unlink sync keyctl add_key request_key bpf
seccomp perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register kexec_load
kexec_file_load finit_module quotactl_fd
"""


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_of_the_filter_are_those_of_the_kernels_headers(column: int) -> None:
    assert set(BY_NUMBER.split()) <= limits._DENIED.keys()
    header = Path(
        "/usr/include", ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")[column]
    )
    if not header.is_file():
        pytest.skip(f"there is no {header}")
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    table = {**limits._DENIED, **limits._ABSENT, "open": limits._OPEN, "openat": limits._OPENAT}
    wrong = {
        name: numbers[column]
        for name, numbers in table.items()
        if name in known and numbers[column] != int(known[name])
    }
    assert wrong == {}


def test_a_process_confines_itself_in_the_units_of_the_kernel() -> None:
    program = """
import resource as r
from ppo_cli.rewards.code.limits import apply_limits
r.setrlimit(r.RLIMIT_FSIZE, (2 << 20, 3 << 20))
apply_limits(900, 7, 5, 0)
print(*(r.getrlimit(each) for each in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_CORE)))
print(r.getrlimit(r.RLIMIT_FSIZE))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    memory, own = 900 << 20, 3 << 20
    expected = f"({memory}, {memory}) (7, 8) (64, 64) (0, 0)\n({own}, {own})\n"
    assert (ended.stdout, ended.stderr) == (expected, "")
