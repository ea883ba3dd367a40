"""A terminal that goes away: the run it belongs to saves first, unless it was told not to mind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ppo_cli.errors import EXIT_STOPPED
from tests.loop.runs import ROOT

OF_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# It writes on after it was asked to stop, and tells a file how it ended.
RUN = """
import sys, time
from pathlib import Path
from ppo_cli.cli.screen import PlainScreen
from ppo_cli.signals import StopOnSignal

until = time.monotonic() + 240
with StopOnSignal(PlainScreen(sys.stdout).note) as stop:
    Path(sys.argv[1], "begun").touch()
    while time.monotonic() < until and not Path(sys.argv[1], "enough").exists():
        time.sleep(0.02)
        if stop.reason() is not None:
            print("saving", flush=True)
            Path(sys.argv[1], "asked").touch()
Path(sys.argv[1], "ended").write_text(str(stop.reason()))
"""

# What takes a Ctrl-C away from a command -> how often it is pressed until the command ends.
TAKES_IT = {
    """
class Finaliser:
    def __del__(self):
        touch()
        time.sleep(0.5)

Finaliser()
""": 1,
    """
while True:
    try:
        touch()
        time.sleep(600)
    except KeyboardInterrupt:
        pass
""": 2,
}
COMMAND = """
import sys, time
from pathlib import Path
from ppo_cli import signals

def touch():
    Path(sys.argv[1], "begun").touch()

signals.AT_ONCE_S = 0.1
signals.watch_interrupts()
try:
    exec(sys.argv[2])
    time.sleep(600)
except KeyboardInterrupt:
    signals.leave_at_once()
"""


def await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.02)


def mind_the_terminal() -> None:
    """Under `nohup`, or in the background, the tests themselves hand on what is ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def running(
    folder: Path, *before: str, ends: bool = True, **streams: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The program has begun; after the block it ends by itself, unless the test has ended it."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", RUN, str(folder)],
        preexec_fn=mind_the_terminal,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, **{"stderr": subprocess.DEVNULL} | streams,
    )  # fmt: skip
    try:
        await_file(folder / "begun", process)
        yield process
        if ends:
            time.sleep(0.2)
            (folder / "enough").touch()
            assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def test_a_run_saves_after_its_terminal_has_closed(tmp_path: Path) -> None:
    terminal, end = pty.openpty()
    with running(
        tmp_path, sys.executable, "-c", OF_A_TERMINAL, stdin=end, stdout=end, stderr=end
    ) as process:
        os.close(end)
        os.close(terminal)
        await_file(tmp_path / "asked", process)
        process.send_signal(signal.SIGHUP)  # the shell tells it, too
    assert (tmp_path / "ended").read_text() == "SIGHUP"


def test_under_nohup_it_does_not_mind(tmp_path: Path) -> None:
    with running(tmp_path, "nohup", stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGHUP)
    assert (tmp_path / "ended").read_text() == "None"


def test_it_saves_although_the_reader_of_its_output_has_ended(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with running(tmp_path, stdout=writing) as process:
        os.close(writing)
        os.close(reading)  # as `| tee` does on Ctrl-C, which it hears as well
        process.send_signal(signal.SIGINT)
        await_file(tmp_path / "asked", process)
    assert (tmp_path / "ended").read_text() == "SIGINT"


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with running(tmp_path, ends=False, stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGINT)
        await_file(tmp_path / "asked", process)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(120) != 0
        assert not (tmp_path / "ended").exists()


@pytest.mark.parametrize(("program", "presses"), TAKES_IT.items(), ids=["finaliser", "library"])
def test_a_ctrl_c_that_is_taken_away_ends_a_command(
    program: str, presses: int, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), program], stderr=subprocess.PIPE,
        preexec_fn=mind_the_terminal, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        for _ in range(presses):
            await_file(tmp_path / "begun", process)
            (tmp_path / "begun").unlink()
            process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED and b"Traceback" not in printed
