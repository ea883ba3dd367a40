"""Atomic writes: whole under the name or as before; leftovers of a killed process go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ppo_cli.atomic import atomic_replace, delete_atomically

GONE = 2**22 + 1  # above the largest process number of Linux
WRITE_SLOWLY = """
import sys
from pathlib import Path
from ppo_cli.atomic import atomic_replace
with atomic_replace(Path("a.json")) as fresh:
    fresh.write_text("half")
    print(flush=True)
    sys.stdin.read()
    fresh.write_text("of the other process")
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    for name in (f".unfinished-{GONE}-a.json", f".unfinished-{GONE}.7-a.json"):
        (tmp_path / name).write_text("of a killed process")
    with atomic_replace(file) as fresh:
        assert not fresh.exists()
        fresh.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert names(tmp_path) == ["a.json"]


def test_two_processes_may_write_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    command = [sys.executable, "-c", WRITE_SLOWLY]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe) as other:
        assert other.stdin and other.stdout
        other.stdout.readline()
        with atomic_replace(file) as fresh:
            fresh.write_text("of this process")
        assert file.read_text() == "of this process"
        other.stdin.close()
    assert other.returncode == 0
    assert file.read_text() == "of the other process"
    assert names(tmp_path) == ["a.json"]


def test_two_threads_of_a_process_may_write_the_same_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with atomic_replace(file) as first:
        first.write_text("of the first")
        with atomic_replace(file) as second:
            second.write_text("of the second")
    assert file.read_text() == "of the first"
    assert names(tmp_path) == ["a.json"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "gone").write_text("x")
    (tmp_path / f".unfinished-{GONE}-old-model" / "deep").mkdir(parents=True)
    with atomic_replace(folder) as fresh:
        (fresh / "sub").mkdir(parents=True)
        (fresh / "sub" / "kept").write_text("x")
    assert names(tmp_path) == ["model"]
    assert names(folder) == ["sub"]


def test_a_link_to_a_folder_is_replaced_and_the_folder_stays(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "me").write_text(name)
        with atomic_replace(tmp_path / "latest") as fresh:
            fresh.symlink_to(name)
    assert (tmp_path / "latest" / "me").read_text() == "two"
    assert names(tmp_path) == ["latest", "one", "two"]


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there(tmp_path: Path, stop: type[BaseException]) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with pytest.raises(stop), atomic_replace(file) as fresh:
        fresh.write_text("half")
        raise stop
    assert file.read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_folder_is_deleted_with_what_a_killed_deletion_left(tmp_path: Path) -> None:
    for name in ("model", f".unfinished-{GONE}-old-model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    delete_atomically(tmp_path / "model")
    assert names(tmp_path) == []
