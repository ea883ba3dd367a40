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
from ppo_cli.processes.program import ShortProgram
from ppo_cli.rewards.code import limits, sandboxes
from ppo_cli.rewards.code.limits import build_filter
from ppo_cli.rewards.code.sandboxes import Bubblewrap, Sandbox, Sandlock, Unsandboxed
from tests.rewards.tables import read_blocks, table


class Running(Unsandboxed):
    """Starts another program than the probe, or calls `run` with the streams."""

    def __init__(self, run: str | Callable[..., ShortProgram]) -> None:
        self._run = run

    def start(
        self, command: Sequence[str], *, streams: tuple[int, int, int], folder: str
    ) -> ShortProgram:
        """Start the other program."""
        if callable(self._run):
            return self._run(command, streams)
        return super().start([sys.executable, "-c", self._run], streams=streams, folder=folder)


def with_our_environment(command: Sequence[str], streams: tuple[int, int, int]) -> ShortProgram:
    return ShortProgram(command, environ=os.environ, cwd=os.getcwd(), streams=streams)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "_FAULTS", {})


def test_each_thing_that_gets_through_is_named() -> None:
    begin, _, successes = sandboxes.find_fault(Unsandboxed()).partition("code inside ")
    assert begin == "its trial failed: "
    missing = {
        "reads files of others", "writes outside", "reaches the network", "listens on a port",
        "starts processes", "opens TCP sockets", "opens UDP sockets", "opens unix sockets",
        "opens netlink sockets", "opens pairs of sockets that send anywhere",
        "reads the environment of other processes", "signals other processes",
        "limits other processes", "holds on to other processes", "schedules other processes",
        "signals its parent", "limits its parent", "holds on to its parent",
    } - set(successes.split(", "))  # fmt: skip
    assert missing == set()
    assert "sees the environment" not in successes
    assert "PPO_CLI_PROBE" not in os.environ


def test_an_environment_that_is_handed_on_is_named() -> None:
    assert "sees the environment" in sandboxes.find_fault(Running(with_our_environment))


@pytest.mark.parametrize("what", ["unlinked", "named"])
def test_files_that_nobody_limits_are_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandboxes._find_leak(Unsandboxed(), what, [64]) == ""
    monkeypatch.setattr(sandboxes, "describe_broken_limit", lambda *args, **named: "")
    kind = "unlinked " if what == "unlinked" else ""
    fault = f"its trial failed: code inside holds more than 64 MB of {kind}files"
    assert sandboxes._find_leak(Unsandboxed(), what, [64]) == fault


def test_a_sandbox_that_does_not_start_tells_why() -> None:
    fault = sandboxes.find_fault(Running("import sys; sys.exit('no user namespaces')"))
    assert fault == "its trial ended with exit code 1: no user namespaces"


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
    monkeypatch.setattr(sandboxes, "find_fault", lambda box: "gone" * (box.name == "bwrap"))
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


def test_a_trial_that_hangs_or_cannot_start_is_a_fault_found_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[object] = []

    def fail(*start: object) -> ShortProgram:
        attempts.append(start)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sandboxes, "PROBE_TIMEOUT_S", 0.2)
    stuck = sandboxes.find_fault(Running("import time; time.sleep(60)"))
    assert stuck == "its trial took more than 0.2 s"
    monkeypatch.setattr(sandboxes, "_FAULTS", {})
    for _ in range(2):
        assert sandboxes.find_fault(Running(fail)) == "it does not start (Permission denied)"
    assert len(attempts) == 1
    assert "PPO_CLI_PROBE" not in os.environ


def test_all_faults_are_told_and_no_sandbox_only_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Sandbox] = []

    def fault(sandbox: Sandbox) -> str:
        looked.append(sandbox)
        return f"no {sandbox.name}"

    monkeypatch.setattr(sandboxes, "find_fault", fault)
    lines: list[str] = []
    chosen = sandboxes.choose_sandbox(Code(allow_unsandboxed=True, memory_mb=99), lines.append)
    assert chosen.name == "none" and [sandbox.name for sandbox in looked] == ["bwrap", "sandlock"]
    assert lines[0].endswith("No sandbox works here (bwrap: no bwrap; sandlock: no sandlock).")
    assert isinstance(looked[1], Sandlock) and looked[1]._memory_mb == 99
    assert looked[1].separate()._memory_mb == 99
    with pytest.raises(RewardError, match="bwrap: no bwrap; sandlock: no sandlock"):
        sandboxes.choose_sandbox(Code())
    only = sandboxes.choose_sandbox(Code(allow_unsandboxed=True, sandbox="sandlock"), lines.append)
    assert only.name == "none" and "bwrap" not in lines[1]
    monkeypatch.setattr(sandboxes, "find_fault", lambda sandbox: "")
    assert sandboxes.choose_sandbox(Code(allow_unsandboxed=True), lines.append).name == "bwrap"
    assert len(lines) == 2


# Each with arguments that the kernel itself answers otherwise; without any harm done.
REFUSED = ", ".join(table(__file__, "refused"))
FILTERED = read_blocks("code/programs")["filtered"]


def test_the_filter_refuses_by_name_and_argument_and_lets_the_rest_pass() -> None:
    """The C library has the numbers of system calls from elsewhere."""
    program = [sys.executable, "-c", FILTERED, REFUSED]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "thread\n", "")


# The C library has no function for these, or calls them by another number.
BY_NUMBER = table(__file__, "by number")


@pytest.mark.parametrize("column", [0, 1])
def test_the_numbers_of_the_filter_are_those_of_the_kernels_headers(column: int) -> None:
    assert set(BY_NUMBER) <= limits._DENIED.keys()
    header = Path(
        "/usr/include", ("x86_64-linux-gnu/asm/unistd_64.h", "asm-generic/unistd.h")[column]
    )
    if not header.is_file():
        pytest.skip(f"there is no {header}")
    headers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    table = {**limits._DENIED, **limits._ABSENT, "open": limits._OPEN, "openat": limits._OPENAT}
    wrong = {
        name: numbers[column]
        for name, numbers in table.items()
        if name in headers and numbers[column] != int(headers[name])
    }
    assert wrong == {}


def test_a_process_confines_itself_in_the_units_of_the_kernel() -> None:
    program = read_blocks("code/programs")["limits"]
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    memory, file_size = 900 << 20, 3 << 20
    expected = f"({memory}, {memory}) (7, 8) (64, 64) (0, 0)\n({file_size}, {file_size})\n"
    assert (ended.stdout, ended.stderr) == (expected, "")
