"""Folders of processes that are no more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_cli.engine import leftovers

MAKE = """
import sys
from pathlib import Path
from ppo_cli.engine import leftovers
leftovers.SHARED_MEMORY = Path(sys.argv[1])
folder = leftovers.own_folder("sampler")
(folder / "vllm_dist_12").touch()
(leftovers.SHARED_MEMORY / "vllm_dist_12-3").touch()
print(folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def neighbour(shared: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKE, str(shared)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[2],
    ) as other:  # fmt: skip
        assert other.stdout is not None
        yield other, Path(other.stdout.readline().strip())
        other.kill()


def test_a_folder_names_its_owner_and_is_private(shared: Path) -> None:
    folder = leftovers.own_folder("sampler")
    assert folder.parent == shared
    assert f"-{os.getpid()}-" in folder.name
    assert folder.stat().st_mode & 0o077 == 0


def test_what_a_killed_process_left_goes_and_nothing_else(
    shared: Path, neighbour: tuple[subprocess.Popen[str], Path]
) -> None:
    other, theirs = neighbour
    ours = leftovers.own_folder("sampler")
    kept = [shared / "ppo-sampler-mine", shared / "ppo-sampler-1-999999999-abc"]
    for folder in kept:
        folder.mkdir()
    leftovers.sweep()
    assert theirs.exists()  # its owner lives

    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has looked yet
    leftovers.sweep()
    assert sorted(shared.iterdir()) == sorted([ours, *kept])


def test_a_new_folder_sweeps_first(
    shared: Path, neighbour: tuple[subprocess.Popen[str], Path]
) -> None:
    other, theirs = neighbour
    other.kill()
    other.wait(10)
    fresh = leftovers.own_folder("ranks")
    assert not theirs.exists()
    leftovers.remove(fresh, [])
    assert list(shared.iterdir()) == []


def test_a_claimed_folder_goes_when_its_process_is_gone(
    tmp_path: Path, neighbour: tuple[subprocess.Popen[str], Path]
) -> None:
    other, _ = neighbour
    ours, theirs, empty, elsewhere, far = (tmp_path / f"ppo-{name}" for name in "abcde")
    for folder in (ours, theirs, empty, elsewhere, far):
        folder.mkdir()
        leftovers.claim(folder)
    note = (ours / leftovers.OWNER).read_text()
    (theirs / leftovers.OWNER).write_text(note.replace(str(os.getpid()), str(other.pid)))
    (theirs / "session").mkdir()
    (empty / leftovers.OWNER).unlink()
    boot, namespace, _ = note.split()
    (elsewhere / leftovers.OWNER).write_text(f"{boot} 1 {2**30}")  # a container counts for itself
    (far / leftovers.OWNER).write_text(f"another {namespace} {2**30}")  # and so does a machine
    leftovers.sweep_claimed(tmp_path)
    assert theirs.exists()  # its owner lives

    other.kill()
    other.wait(10)
    leftovers.sweep_claimed(tmp_path)
    assert not theirs.exists()
    assert all(folder.exists() for folder in (ours, empty, elsewhere, far))
