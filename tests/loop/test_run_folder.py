"""The run folder, what may go on in it, and its checkpoints: pruned, the best kept."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.errors import ModelError, UserError
from ppo_cli.run_folder.checkpoints import CheckpointStore, find_resume
from ppo_cli.run_folder.folder import LOCK, SPENT, RunFolder, is_active
from ppo_cli.run_folder.restraints import Restraint, write_restraints


def test_a_folder_in_which_a_run_goes_on_is_refused_until_that_ends(tmp_path: Path) -> None:
    with (
        RunFolder(tmp_path).alone(),
        pytest.raises(UserError, match="a run that is still active"),
        RunFolder(tmp_path).alone(),
    ):
        pass
    with RunFolder(tmp_path).alone(), RunFolder(tmp_path.parent).alone():
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_glance_at_whether_a_run_goes_on_keeps_nobody_out(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        Timer(0.15, lambda: fcntl.flock(glance, fcntl.LOCK_UN)).start()
        with RunFolder(tmp_path).alone():
            assert is_active(tmp_path)
    assert not is_active(tmp_path)


def test_a_claim_on_a_file_that_was_just_taken_away_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = []

    def claim_late(file: Any, how: int) -> None:
        if not claims:
            (tmp_path / LOCK).unlink()  # the other run ends between opening and claiming
        claims.append(file)
        fcntl.flock(file, how)

    monkeypatch.setattr(
        "ppo_cli.run_folder.folder.fcntl", SimpleNamespace(**vars(fcntl) | {"flock": claim_late})
    )
    with RunFolder(tmp_path).alone():
        assert len(claims) == 2
        monkeypatch.undo()
        with pytest.raises(UserError), RunFolder(tmp_path).alone():
            pass


def test_an_earlier_run_is_set_aside_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(name)
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "logs").mkdir(exist_ok=True)
        folder.set_aside()
    assert (tmp_path / "earlier_1" / "metrics.jsonl").read_text() == "first"
    assert (tmp_path / "earlier_2" / "metrics.jsonl").read_text() == "second"
    assert not (tmp_path / "metrics.jsonl").exists() and (tmp_path / "logs").exists()
    names = {"checkpoints", "config.yaml", "tensorboard", "report.html", "rollouts", "judges.jsonl"}
    for name in names:
        (tmp_path / name).mkdir()
    assert folder.set_aside() == tmp_path / "earlier_3"
    assert {path.name for path in (tmp_path / "earlier_3").iterdir()} == names
    assert folder.set_aside() is None


def test_partial_checkpoints_of_killed_runs_go_and_those_of_a_live_process_stay(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for place in ("checkpoints", "earlier_1/checkpoints"):
        for pid in (ended.pid, os.getpid(), os.getppid()):
            (tmp_path / place / f".unfinished-{pid}-step_000001" / "actor").mkdir(parents=True)
    being_written = tmp_path / f"checkpoints/.unfinished-{os.getppid()}.1-latest"
    being_written.touch()
    assert RunFolder(tmp_path).set_aside() == tmp_path / "earlier_2"
    partial = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".unfinished-*")]
    name = f"checkpoints/.unfinished-{os.getppid()}-step_000001"
    latest = f"earlier_2/checkpoints/{being_written.name}"
    assert sorted(partial) == [f"earlier_1/{name}", f"earlier_2/{name}", latest]


def test_folders_that_were_made_for_nothing_go_again(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for path, rest in (("a/b", ["kept"]), ("kept", ["kept"])):
        folder = RunFolder(tmp_path / path)
        folder.prepare()
        folder.logs.mkdir()
        folder.drop_if_empty()
        assert [path.name for path in tmp_path.iterdir()] == rest
    assert folder.logs.exists()
    used = RunFolder(tmp_path / "used")
    used.prepare()
    (used.path / "x").touch()
    used.drop_if_empty()
    assert (used.path / "x").exists()


def test_what_a_judge_cost_stays_with_a_run_that_begins_again(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "judge_calls.jsonl", "judge_calls_safety.jsonl"):
        (tmp_path / name).write_text(name)
    RunFolder(tmp_path).set_aside(spared=[SPENT])
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "judge_calls.jsonl", "judge_calls_safety.jsonl",
    ]  # fmt: skip
    RunFolder(tmp_path).set_aside()
    assert not list(tmp_path.glob("*.jsonl"))


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
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    write_restraints(tmp_path, [Restraint(4, 1, {}, "alarm", {}, pending=False)])
    write(store, 1, 2, 3, 4, 5, best=2)
    assert store.steps() == [1, 2, 4, 5], "and what a run went back to"
    assert saved(store.directory / "best") == 2


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
