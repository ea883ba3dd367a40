"""Whole checkpoints or none; the newest and the best kept; written while others work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from ppo_cli.errors import ModelError, UserError
from ppo_cli.run_folder import CheckpointStore, find_resume

Fill = Callable[[Path], Future[None]]


def done(error: Exception | None = None) -> Future[None]:
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


def fill_with(step: int, filled: Future[None]) -> Fill:
    def fill(folder: Path) -> Future[None]:
        (folder / "state").mkdir()
        (folder / "state" / "x").write_text(str(step))
        return filled

    return fill


def write(store: CheckpointStore, *steps: int, best: int = 0) -> None:
    for step in steps:
        store.begin_save(step, fill_with(step, done()), best=step == best)
        store.wait_for_save()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=3)


def saved(checkpoint: Path) -> int:
    return int((checkpoint / "state" / "x").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_written_checkpoints_are_found_and_latest_points_to_the_newest(tmp_path: Path) -> None:
    for keep, steps in ((3, [5, 10, 200]), (None, [5, 10, 200, 300, 400])):  # None: all of them
        store = CheckpointStore(tmp_path / str(keep), keep=keep)
        assert store.newest() is None
        write(store, *steps)
        assert store.steps() == steps
        assert saved(tmp_path / str(keep) / "latest") == steps[-1]


def test_a_name_appears_only_when_the_background_is_done(
    store: CheckpointStore, tmp_path: Path
) -> None:
    filled: Future[None] = Future()
    store.begin_save(5, fill_with(5, filled), best=True)
    assert store.busy and store.steps() == [] and not (tmp_path / "latest").exists()
    store.raise_save_error()
    filled.set_result(None)
    assert not store.busy
    assert names(tmp_path) == ["best", "latest", "step_000005"]
    assert saved(tmp_path / "best") == 5


def test_the_next_one_waits_for_the_one_before(store: CheckpointStore) -> None:
    filled: Future[None] = Future()
    store.begin_save(5, fill_with(5, filled))
    threading.Timer(0.2, filled.set_result, [None]).start()

    def fill(folder: Path) -> Future[None]:
        assert store.steps() == [5]
        return done()

    store.begin_save(6, fill)
    store.wait_for_save()
    assert store.steps() == [5, 6]


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_while_writing_leaves_the_old_ones_alone(
    store: CheckpointStore, tmp_path: Path, late: bool
) -> None:
    write(store, 5)

    def fill(folder: Path) -> Future[None]:
        (folder / "half").write_text("x")
        if late:
            return done(KeyError("bug"))
        raise KeyError("bug")

    with pytest.raises(KeyError):
        store.begin_save(10, fill)
        store.wait_for_save()
    assert store.steps() == [5]
    assert names(tmp_path) == ["latest", "step_000005"]
    write(store, 11)  # told once, and over
    assert store.steps() == [5, 11]


def test_a_full_disk_is_told_in_one_sentence(store: CheckpointStore, tmp_path: Path) -> None:
    output = r"step 7 could not be written.*No space left.*--output_dir"
    full = OSError(28, "No space left on device")
    store.begin_save(7, fill_with(7, done(full)))
    with pytest.raises(UserError, match=output):
        store.raise_save_error()
    rust = RuntimeError("I/O error: No space left on device (os error 28)")
    store.begin_save(7, fill_with(7, done(rust)))
    with pytest.raises(UserError, match=output):
        store.begin_save(8, fill_with(8, done()))
    assert store.steps() == [] and names(tmp_path) == []


def test_leaving_waits_for_the_last_one_and_tells_its_failure(store: CheckpointStore) -> None:
    filled: Future[None] = Future()
    threading.Timer(0.2, filled.set_exception, [OSError(28, "No space left on device")]).start()
    with pytest.raises(UserError, match="No space left"), store.open():
        store.begin_save(7, fill_with(7, filled))
    filled = Future()
    threading.Timer(0.2, filled.set_result, [None]).start()
    with pytest.raises(ZeroDivisionError), store.open():
        store.begin_save(8, fill_with(8, filled))
        raise ZeroDivisionError
    assert store.steps() == [8]


def test_a_second_interrupt_ends_the_waiting_not_the_writing(store: CheckpointStore) -> None:
    filled: Future[None] = Future()
    with pytest.raises(KeyboardInterrupt), store.open():
        store.begin_save(8, fill_with(8, filled))
        raise KeyboardInterrupt
    filled.set_result(None)
    assert store.steps() == [8]


def test_what_a_killed_run_left_is_swept_by_the_next_start_or_write(
    store: CheckpointStore, tmp_path: Path
) -> None:
    rest = tmp_path / ".unfinished-step_000003" / "deep"
    rest.mkdir(parents=True)
    assert store.steps() == []
    write(store, 4)
    assert names(tmp_path) == ["latest", "step_000004"]
    rest.mkdir(parents=True)
    with store.open():
        assert names(tmp_path) == ["latest", "step_000004"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1, 2, 3, 4, 5, best=2)
    assert store.steps() == [2, 4, 5]
    assert saved(tmp_path / "best") == 2


def test_the_same_step_again_replaces_it(store: CheckpointStore, tmp_path: Path) -> None:
    write(store, 1)

    def fill(folder: Path) -> Future[None]:
        (folder / "new").write_text("x")
        return done()

    store.begin_save(1, fill)
    store.wait_for_save()
    assert names(tmp_path / "step_000001") == ["digests.json", "new"]


def test_resume_modes(store: CheckpointStore, tmp_path: Path) -> None:
    assert find_resume(store, "auto") is None
    write(store, 6)
    assert find_resume(store, "auto") == tmp_path / "step_000006"
    assert find_resume(store, "never") is None
    assert find_resume(store, str(tmp_path / "latest")) == (tmp_path / "step_000006").resolve()
    with pytest.raises(ModelError, match=r"--resume .*nowhere is not a checkpoint"):
        find_resume(store, str(tmp_path / "nowhere"))


def test_going_on_from_an_older_step_drops_the_later_ones(
    store: CheckpointStore, tmp_path: Path
) -> None:
    write(store, 2, 4, 6, best=6)
    store.delete_after(4)
    assert store.steps() == [2, 4]
    assert saved(tmp_path / "latest") == 4
    assert not (tmp_path / "best").is_symlink()
