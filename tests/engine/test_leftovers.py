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
folder = leftovers.create_folder("sampler")
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


def test_a_folder_is_private_and_goes_when_its_owner_is_gone(
    shared: Path, neighbour: tuple[subprocess.Popen[str], Path]
) -> None:
    other, reference = neighbour
    actual, unclaimed, elsewhere, far = kept_values = [
        leftovers.create_folder("sampler"),
        *(shared / f"ppo-{name}" for name in "abc"),
    ]
    assert actual.parent == shared and actual.stat().st_mode & 0o077 == 0
    boot, namespace, pid = (actual / leftovers.OWNER).read_text().split()
    assert int(pid) == os.getpid()
    for folder in (unclaimed, elsewhere, far):
        folder.mkdir()
    # Containers count their processes each for itself, and so do machines.
    (elsewhere / leftovers.OWNER).write_text(f"{boot} 1 {2**30}")
    (far / leftovers.OWNER).write_text(f"another {namespace} {2**30}")
    (reference / "session").mkdir()
    leftovers.remove_stale_folders()
    assert reference.exists()  # its owner lives

    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, but nobody has looked yet
    fresh = leftovers.create_folder("ranks")  # sweeps first
    assert sorted(shared.iterdir()) == sorted([*kept_values, fresh])
    leftovers.remove(fresh, [])
    assert not fresh.exists()
