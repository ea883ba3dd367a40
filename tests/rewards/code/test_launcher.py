"""The launcher of sandlock: what it says of its forks, and that nothing outlives anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppo_cli.records import Score
from ppo_cli.rewards.code.check import Check
from ppo_cli.rewards.code.sandboxes import ENVIRONMENT, ForkedProcess, Sandbox, interpreter
from tests.rewards.code.attacks import find_marked
from tests.rewards.tables import read_blocks

ROOT = Path(__file__).resolve().parents[3]
SLEEP = "import time; time.sleep(60)"
TRAINER = read_blocks("code/programs")["trainer"]

Start = Callable[[str], ForkedProcess]


@pytest.fixture
def sandlock(make_sandbox: Callable[[str], Sandbox]) -> Sandbox:
    return make_sandbox("sandlock")


@pytest.fixture
def start(sandlock: Sandbox, tmp_path: Path) -> Iterator[Start]:
    """Start Python with a text in the sandbox."""
    started: list[ForkedProcess] = []

    def run(text: str) -> ForkedProcess:
        folder = tempfile.mkdtemp(dir=tmp_path)
        with open(os.devnull, "r+b") as nothing:
            command, streams = [str(interpreter()), "-S", "-c", text], (nothing.fileno(),) * 3
            process = sandlock.start(command, streams=streams, folder=folder)
        assert isinstance(process, ForkedProcess)
        started.append(process)
        return process

    yield run
    for process in started:
        process.end()


def stat_of(pid: int) -> list[str]:
    """State, parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def launcher_of(process: ForkedProcess) -> int:
    return int(stat_of(process.pid)[1])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def await_that(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def streams_of(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]


def is_dead(pid: int) -> bool:
    try:
        return stat_of(pid)[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("text", "code"),
    [("", 0), ("import sys; sys.exit(3)", 3),
     ("import os; os.kill(os.getpid(), 11)", 128 + signal.SIGSEGV),
     ("import os; os.kill(os.getpid(), 9)", 128 + signal.SIGKILL)],
)  # fmt: skip
def test_how_a_command_ends(text: str, code: int, start: Start) -> None:
    process = start(text)
    assert process.wait(120) == code
    assert not process.launcher_died()


def test_one_launcher_forks_all_and_hands_them_nothing(start: Start) -> None:
    first, other = start(SLEEP), start(SLEEP)
    assert launcher_of(first) == launcher_of(other)
    assert await_that(lambda: os.getsid(first.pid) == first.pid)
    assert await_that(lambda: len(children_of(first.pid)) == 1)
    (command,) = children_of(first.pid)
    for pid in (first.pid, command):
        assert await_that(lambda pid=pid: streams_of(pid) == [os.devnull] * 3)
    assert await_that(lambda: os.listdir(f"/proc/{command}/fd") == ["0", "1", "2"])
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.05)


def test_the_pid_is_kept_until_the_end(start: Start) -> None:
    process = start("")
    process.wait(120)
    assert Path(f"/proc/{process.pid}").exists()
    process.end()
    assert await_that(lambda: not Path(f"/proc/{process.pid}").exists())


def test_memory_has_a_limit_beside_that_of_the_process(start: Start) -> None:
    """A process that caps itself is held by its own limit; here it does not."""
    assert start("kept = bytearray(256 << 20)").wait(120) == 0
    assert start("kept = bytearray(2048 << 20)").wait(120) != 0


@pytest.mark.usefixtures("no_trace")
def test_ending_kills_what_lives(start: Start) -> None:
    process = start(SLEEP)
    assert await_that(lambda: bool(children_of(process.pid)))
    family = [process.pid, *children_of(process.pid)]
    process.end()
    assert await_that(lambda: all(map(is_dead, family)))


@pytest.mark.usefixtures("no_trace")
def test_a_launcher_that_dies_takes_its_own_along_and_is_replaced(start: Start) -> None:
    process = start(SLEEP)
    assert await_that(lambda: bool(children_of(process.pid)))
    family = [process.pid, *children_of(process.pid)]
    os.kill(launcher_of(process), signal.SIGKILL)
    assert (process.wait(120), process.launcher_died()) == (-signal.SIGKILL, True)
    assert await_that(lambda: all(map(is_dead, family)))
    assert start("").wait(120) == 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [("exit 1", "exits at once"), ("printf 'OSError: denied' >&0", "OSError: denied")],
)
def test_a_launcher_that_cannot_start_is_told(
    program: str, reason: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "launcher"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))
    with pytest.raises(OSError, match=reason):
        start("")
    monkeypatch.undo()
    assert start("").wait(120) == 0


@pytest.mark.parametrize(
    ("deaths", "score", "reason"),
    [(1, 1.0, ""), (2, 0.0, "broke its sandbox: the sandbox's launcher died twice")],
)
@pytest.mark.usefixtures("no_trace")
def test_who_loses_the_launcher_is_run_again_with_its_own(
    deaths: int, score: float, reason: str, run_code: Callable[..., Score], sandlock: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    robbed: list[object] = []

    def kill_launcher(self: Check, launched: object, until: float) -> bool:
        # Once each: afterwards the candidate has another parent, which is not a launcher.
        if self._ready and len(robbed) < deaths and launched not in robbed:
            robbed.append(launched)
            os.kill(launcher_of(launched.candidate), signal.SIGKILL)  # type: ignore
        return read(self, launched, until)  # type: ignore

    read = Check._read_sources
    monkeypatch.setattr(Check, "_read_sources", kill_launcher)
    code = "import time\ndef f(n):\n    time.sleep(3)\n    return n"
    result = run_code(code, ["assert f(1)"], sandlock)
    assert (result.value, result.failure, result.reason) == (score, "", reason)
    assert len(robbed) == deaths
    assert run_code("def f(n): return n", ["assert f(1)"], sandlock).value == 1.0


@pytest.mark.slow
def test_nothing_is_left_of_a_trainer_that_is_killed(sandlock: Sandbox, tmp_path: Path) -> None:
    token, folder = tmp_path.name + str(os.getpid()), tmp_path / "temporary"
    folder.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PATH": ENVIRONMENT["PATH"]}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, token], env=environment)

    def marked() -> int:
        return len(find_marked(f"PPO_TEST_TOKEN={token}"))

    try:
        # A launcher and its reaper, and for each of two checks two processes with their watchers.
        assert await_that(lambda: marked() == 10, 60)
        assert len(list(folder.glob("*/*"))) == 4
    finally:
        trainer.kill()
        trainer.wait()
    assert await_that(lambda: marked() == 0)
    assert await_that(lambda: not list(folder.iterdir()))
