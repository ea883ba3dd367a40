"""A sandbox is believed only when its trial has kept everything in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from ppo_cli.config.reward_schema import Code
from ppo_cli.errors import RewardError
from ppo_cli.rewards.code import sandboxes
from ppo_cli.rewards.code.limits import build_filter
from ppo_cli.rewards.code.sandboxes import (
    Bubblewrap,
    Child,
    Sandbox,
    Sandlock,
    Unsandboxed,
)


class Broken(Unsandboxed):
    """Starts something else."""

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a program that only complains."""
        other = [sys.executable, "-c", "import sys; sys.exit('no user namespaces')"]
        return super().start(other, streams=streams, folder=folder)


class Inheriting(Unsandboxed):
    """Hands its environment on."""

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a command with the environment of this process."""
        return Child(list(command), stdin=streams[0], stdout=streams[1], stderr=streams[2])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_PROBED", sandboxes.Probed())


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
    monkeypatch.setattr(sandboxes, "find_excess", lambda *args, **named: "")
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

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Start a program that sleeps."""
        other = [sys.executable, "-c", "import time; time.sleep(60)"]
        return super().start(other, streams=streams, folder=folder)


class NotThere(Unsandboxed):
    """Cannot be started; counts how often somebody tried."""

    tries = 0

    def start(self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str) -> Child:
        """Fail as a program that may not be run."""
        NotThere.tries += 1
        raise PermissionError(13, "Permission denied")


def test_a_trial_that_hangs_or_cannot_start_is_a_fault_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandboxes, "SECONDS_TO_PROBE", 0.2)
    assert sandboxes.find_fault(Stuck()) == "its trial took more than 0.2 s"
    monkeypatch.setattr(sandboxes, "_PROBED", sandboxes.Probed())
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
    with pytest.raises(RewardError, match="bwrap: no bwrap; sandlock: no sandlock"):
        sandboxes.choose_sandbox(Code())
    only = sandboxes.choose_sandbox(Code(allow_unsandboxed=True, sandbox="sandlock"), told.append)
    assert only.name == "none" and "bwrap" not in told[1]
    monkeypatch.setattr(sandboxes, "find_fault", lambda sandbox: "")
    assert sandboxes.choose_sandbox(Code(allow_unsandboxed=True), told.append).name == "bwrap"
    assert len(told) == 2


def test_the_filter_refuses_what_the_c_library_calls_by_these_names() -> None:
    """The C library has the numbers of system calls from elsewhere."""
    program = """
import ctypes, errno, os
from ppo_cli.rewards.code.limits import put_on
libc, me = ctypes.CDLL(None, use_errno=True), os.getpid()
calls = {
    "ptrace": (0, 0, 0, 0), "socket": (2, 1, 0), "setsid": (), "setpgid": (0, 0),
    "setpriority": (0, 0, 5), "process_vm_readv": (me, 0, 0, 0, 0, 0),
    "process_vm_writev": (me, 0, 0, 0, 0, 0), "sched_setaffinity": (0, 0, 0),
}
put_on()
for name, given in calls.items():
    ctypes.set_errno(0)
    refused = getattr(libc, name)(*given) == -1 and ctypes.get_errno() == errno.EPERM
    print("" if refused else name, end=" ")
print("getppid" if os.getppid() <= 0 else "")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, [], "")
