"""A sandbox is believed only when its trial has kept everything in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import pytest

from ppo_cli.config.rewarding import Code
from ppo_cli.errors import RewardError
from ppo_cli.rewards.code import choosing
from ppo_cli.rewards.code.sandboxes import (
    Bubblewrap,
    Child,
    Sandbox,
    Sandlock,
    Unsandboxed,
)
from ppo_cli.rewards.code.seccomp import build_filter


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
    monkeypatch.setattr(choosing, "_PROBED", choosing.Probed())


def test_each_thing_that_gets_through_is_named() -> None:
    begin, _, told = choosing.find_fault(Unsandboxed()).partition("code inside ")
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
    assert "sees the environment" in choosing.find_fault(Inheriting())


@pytest.mark.parametrize("what", ["unlinked", "named"])
def test_files_that_nobody_limits_are_named(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choosing._find_leak(Unsandboxed(), what, [64]) == ""
    monkeypatch.setattr(choosing, "find_excess", lambda *args, **named: "")
    kind = "unlinked " if what == "unlinked" else ""
    told = f"its trial failed: code inside holds more than 64 MB of {kind}files"
    assert choosing._find_leak(Unsandboxed(), what, [64]) == told


def test_a_sandbox_that_does_not_start_tells_why() -> None:
    assert choosing.find_fault(Broken()) == ("its trial ended with exit code 1: no user namespaces")


@pytest.mark.parametrize("name", ["bwrap", "sandlock"])
def test_a_wanted_sandbox_is_taken_or_refused(
    name: str, make_sandbox: Callable[[str], Sandbox]
) -> None:
    make_sandbox(name)
    settings = Code.model_validate({"sandbox": name})
    assert choosing.choose_sandbox(settings).name == name


def test_the_other_sandbox_is_no_substitute_for_a_wanted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        choosing, "find_fault", lambda sandbox: "gone" if sandbox.name == "bwrap" else ""
    )
    assert choosing.choose_sandbox(Code()).name == "sandlock"
    with pytest.raises(RewardError, match=r"none works here \(bwrap: gone\)"):
        choosing.choose_sandbox(Code(sandbox="bwrap"))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has sandboxes")
def test_a_sandbox_works_on_linux() -> None:
    faults = {kind.name: choosing.find_fault(kind()) for kind in (Bubblewrap, Sandlock)}
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
