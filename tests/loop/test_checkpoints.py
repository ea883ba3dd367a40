"""Whole checkpoints or none; the newest and the best kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.checkpoints import CheckpointStore, find_resume
from ppo_cli.errors import ModelError, UserError


def write(store: CheckpointStore, step: int) -> None:
    with store.writing(step) as folder:
        (folder / "state").mkdir()
        (folder / "state" / "x").write_text(str(step))


def test_written_checkpoints_are_found_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    assert store.newest() is None
    for step in (5, 10, 200):
        write(store, step)
    assert store.steps() == [5, 10, 200]
    assert (tmp_path / "latest" / "state" / "x").read_text() == "200"


def test_a_failure_while_writing_leaves_the_old_ones_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 5)
    with pytest.raises(KeyError), store.writing(10) as folder:
        (folder / "half").write_text("x")
        raise KeyError("bug")
    assert store.steps() == [5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_000005"]


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    told = r"step 7 could not be written.*No space left.*--output_dir"
    with pytest.raises(UserError, match=told), store.writing(7):
        raise OSError(28, "No space left on device")
    assert store.steps() == []


def test_what_a_killed_run_left_is_swept_by_the_next_write(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    (tmp_path / ".unfinished-step_000003" / "deep").mkdir(parents=True)
    assert store.steps() == []
    write(store, 4)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        write(store, step)
        if step == 2:
            store.mark_best(step)
        store.prune()
    assert store.steps() == [2, 4, 5]
    assert (tmp_path / "best" / "state" / "x").read_text() == "2"


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    with store.writing(1) as folder:
        (folder / "new").write_text("x")
    assert [p.name for p in (tmp_path / "step_000001").iterdir()] == ["new"]


def test_resume_modes(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert find_resume(store, "auto") is None
    write(store, 6)
    assert find_resume(store, "auto") == tmp_path / "checkpoints" / "step_000006"
    assert find_resume(store, "never") is None
    chosen = str(tmp_path / "checkpoints" / "latest")
    assert find_resume(store, chosen) == (tmp_path / "checkpoints" / "step_000006").resolve()
    with pytest.raises(ModelError, match=r"--resume .*nowhere is no checkpoint"):
        find_resume(store, str(tmp_path / "nowhere"))


def test_going_on_from_an_older_step_drops_the_later_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=5)
    for step in (2, 4, 6):
        write(store, step)
    store.mark_best(6)
    store.drop_past(4)
    assert store.steps() == [2, 4]
    assert (tmp_path / "latest" / "state" / "x").read_text() == "4"
    assert not (tmp_path / "best").is_symlink()
