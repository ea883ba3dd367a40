"""All processes end with the reaper's command, with its parent and with the reaper itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppo_cli.atomic import is_running
from ppo_cli.processes import reaper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")

# A child that ignores SIGTERM and an orphan in a separate session, as hard to end as it gets.
TREE = (
    "import os,signal,sys,time\n"
    "signal.signal(signal.SIGTERM, getattr(signal, sys.argv[2]))\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork():\n"
    "        os._exit(0)\n"
    "open(sys.argv[1] + '/' + str(os.getpid()), 'w').close()\n"
    "time.sleep(60)\n"
)


def wait_until_gone(pids: list[int], timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)


def start(folder: Path, parent: int, removed: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", TREE, str(folder), "SIG_IGN"]
    line = [sys.executable, "-I", "-S", reaper.__file__, str(parent), str(removed), *command]
    return subprocess.Popen(line, start_new_session=True)


def pids_in(folder: Path) -> list[int]:
    deadline = time.monotonic() + 300
    while len(pids := [int(p.name) for p in folder.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


@pytest.mark.slow
def test_told_to_end_it_ends_the_stubborn_and_the_orphans(tmp_path: Path) -> None:
    process = start(tmp_path, os.getpid(), tmp_path / "none")
    below = pids_in(tmp_path)
    process.terminate()
    process.wait(15)
    wait_until_gone(below)


def test_the_commands_exit_code_is_followed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(7)"]
    line = [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(tmp_path), *command]
    assert subprocess.run(line, timeout=300).returncode == 7
    assert tmp_path.exists()


def test_a_parent_killed_hard_takes_everything_along(tmp_path: Path) -> None:
    tree, removed = tmp_path / "tree", tmp_path / "kept"
    tree.mkdir()
    removed.mkdir()
    command = [sys.executable, "-I", "-S", reaper.__file__]
    rest = [str(removed), sys.executable, "-c", TREE, str(tree), "SIG_DFL"]
    middle = (
        "import os,subprocess,time\n"
        f"command = {command!r} + [str(os.getpid())] + {rest!r}\n"
        "p = subprocess.Popen(command, start_new_session=True)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    below = [int(parent.stdout.readline()), *pids_in(tree)]
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    wait_until_gone(below)
    assert not removed.exists()


def test_a_keeper_killed_hard_takes_its_command_along(tmp_path: Path) -> None:
    process = start(tmp_path, os.getpid(), tmp_path / "none")
    below = pids_in(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 30  # less than they sleep
    while all(is_running(pid) for pid in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in filter(is_running, below):
        os.kill(pid, signal.SIGKILL)


def test_descendants_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert child.pid in reaper.descendants(os.getpid())
        child.kill()
    assert child.pid not in reaper.descendants(os.getpid())
