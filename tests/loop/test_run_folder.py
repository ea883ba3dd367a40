"""The run folder and what may go on in it."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from ppo_cli.cli.show import is_running
from ppo_cli.errors import UserError
from ppo_cli.run_folder import LOCK, RunFolder


def test_a_file_in_the_way_and_a_folder_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UserError, match=r"--output_dir .*out: a file is in the way"):
        RunFolder(tmp_path / "out").prepare()
    with pytest.raises(UserError, match="a file is in the way"):
        RunFolder(tmp_path / "out" / "deeper").prepare()
    with pytest.raises(UserError, match=r"--output_dir /proc/ppo cannot be written"):
        RunFolder(Path("/proc/ppo")).prepare()


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
            assert is_running(tmp_path)
    assert not is_running(tmp_path)


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
        "ppo_cli.run_folder.fcntl", SimpleNamespace(**vars(fcntl) | {"flock": claim_late})
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
    names = {"checkpoints", "config.yaml", "tensorboard", "report.html", "rollouts"}
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
    RunFolder(tmp_path).set_aside(all_of_it=False)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "judge_calls.jsonl", "judge_calls_safety.jsonl",
    ]  # fmt: skip
    RunFolder(tmp_path).set_aside()
    assert not list(tmp_path.glob("*.jsonl"))
