"""Loggers: each point once, runs that go on, and a plain word when a package is missing."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.machinery import ModuleSpec
from math import nan
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from ppo_cli.config.schema.run import Trainer
from ppo_cli.errors import UserError
from ppo_cli.machine.machine import PACKAGES
from ppo_cli.report.loggers import SINKS, TABLE_CHARS, TABLE_ROWS
from ppo_cli.report.tracker import Screen, Tracker
from tests.report.test_tracker import scored
from tests.settings import complete


def make(folder: Path, *loggers: str) -> Tracker:
    return Tracker(folder, Screen(), loggers, total_steps=9, config=complete({}))


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(folder))
    accumulator.Reload()
    return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def test_tensorboard_shows_no_point_twice_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = make(tmp_path, "tensorboard")
    for step in (1, 2, 3, 4):
        first.step(step, {"reward_mean": step, "nan": float("nan")})
    first.close()
    first.close()
    second = make(tmp_path, "tensorboard")
    second.resume_at(2)
    for step in (3, 4, 5):
        second.step(step, {"reward_mean": 10 * step})
    second.close()
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert points(tmp_path / "tensorboard", "reward_mean") == expected


def test_tensorboard_shows_critic_pretraining_before_step_1(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    lines = [{"explained_variance": x / 8} for x in (1, 2, 3)]
    first = make(tmp_path, "tensorboard")
    first.validation(0, {"val/reward_mean": 0.5})
    for count in (1, 2, 3):
        first.pretraining(lines[:count])
    first.close()
    second = make(tmp_path, "tensorboard")
    second.resume_at(0, lines[:2])
    second.pretraining(lines)
    for step in (1, 2):
        second.step(step, {"explained_variance": step / 4})
    second.close()
    folder = tmp_path / "tensorboard"
    assert points(folder, "val/reward_mean") == [(0, 0.5)]
    assert points(folder, "pretrain/explained_variance") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert points(folder, "explained_variance") == [(4, 0.25), (5, 0.5)]


@pytest.mark.slow
def test_tensorboard_works_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    script = (
        "import sys; from pathlib import Path\n"
        "from ppo_cli.config.settle import settle\n"
        "from ppo_cli.planning.memory.plan import fit_memory\n"
        "from ppo_cli.config.schema.run import Config\n"
        "from ppo_cli.machine.machine import Machine\n"
        "from ppo_cli.report.tracker import Screen, Tracker\n"
        f"t = Tracker(Path({str(tmp_path)!r}), Screen(), ['tensorboard'], total_steps=1, "
        "config=fit_memory(settle(Config(), Machine())).config)\nt.step(1, {'x': 1.0}); t.close()\n"
        "assert not {'torch', 'tensorflow', 'wandb'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert points(tmp_path / "tensorboard", "x") == [(1, 1.0)]


def test_every_logger_that_a_run_can_name_has_a_sink_and_is_looked_for() -> None:
    kinds = get_args(get_args(Trainer.model_fields["logger"].annotation)[0])
    assert set(kinds) == {"console", *SINKS}
    assert set(PACKAGES) >= set(SINKS)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio_store"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def resumed_run(folder: Path, package: str) -> dict[tuple[int, str], float]:
    """Steps 1 to 3, then from a checkpoint of step 2 on to 4; the points of metrics.jsonl."""
    pytest.importorskip(package)
    for start, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        tracker = make(folder, package)
        tracker.resume_at(start)
        for step in steps:
            tracker.step(step, {"reward_mean": step / 7, "val/mean@4": float(step), "x": nan})
        tracker.close()
    return {(s, name): v for s in (1, 2, 3, 4) for name, v in (("reward_mean", s / 7),)}


# Their own warnings are not ours to mend.
@pytest.mark.filterwarnings("default")
def test_mlflow_has_each_point_once_and_one_run(tmp_path: Path, offline: None) -> None:
    expected = resumed_run(tmp_path, "mlflow")
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as store:
        rows = store.execute("select step, key, value from metrics").fetchall()
        assert store.execute("select name, status from runs").fetchall() == [("ppo", "FINISHED")]
        assert dict(store.execute("select key, value from params"))["actor.ppo_epochs"] == "1"
    assert {(s, k): v for s, k, v in rows if k == "reward_mean"} == pytest.approx(expected)
    assert sorted(s for s, k, _ in rows if k == "val/mean_4") == [1, 2, 3, 4]
    assert len(rows) == 8


@pytest.mark.filterwarnings("default")
def test_trackio_has_each_point_once_and_one_run(tmp_path: Path, offline: None) -> None:
    pytest.importorskip("trackio")
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.report.test_sinks import resumed_run\n"
        "resumed_run(Path(sys.argv[1]), 'trackio')"
    )  # the place of its store is read as the package is imported
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), root], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "trackio_store").glob("*.db")
    with closing(sqlite3.connect(file)) as store:
        rows = store.execute("select run_name, step, metrics from metrics").fetchall()
    assert {name for name, _, _ in rows} == {(tmp_path / "trackio" / "run_id").read_text()}
    logged = [(step, json.loads(text)["reward_mean"]) for _, step, text in rows]
    assert sorted(logged) == [(s, s / 7) for s in (1, 2, 3, 4)]


@pytest.mark.filterwarnings("default")
def test_swanlab_goes_on_with_the_same_run(tmp_path: Path, offline: None) -> None:
    resumed_run(tmp_path, "swanlab")
    name = (tmp_path / "swanlab" / "run_id").read_text()
    folders = sorted((tmp_path / "swanlab").glob(f"run-*-{name}"))
    assert 1 <= len(folders) <= 2 and (tmp_path / "swanlab" / "last_step").read_text() == "4"
    stored = b"".join(file.read_bytes() for f in folders for file in f.glob("*.swanlab"))
    assert b"reward_mean" in stored and b"val/mean@4" in stored


def test_wandb_offline_goes_on_with_the_same_run(tmp_path: Path, offline: None) -> None:
    resumed_run(tmp_path, "wandb")
    name = (tmp_path / "wandb" / "run_id").read_text()
    folders = (tmp_path / "wandb").glob("offline-run-*")
    assert {folder.name.rpartition("-")[2] for folder in folders} == {name}


def test_wandb_is_given_the_run_its_name_and_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something in the place of the package, which need not be installed."""
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append(("log", (step, metrics)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> Run:
        calls.append(("init", options))
        return Run()

    class Refused(Exception): ...

    class Table:
        def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
            self.rows = [dict(zip(columns, row, strict=True)) for row in data]

    stand_in = ModuleType("wandb")
    stand_in.__spec__ = ModuleSpec("wandb", None)
    vars(stand_in).update(init=init, Error=Refused, Table=Table)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    trainer = {"project_name": "sums", "experiment_name": "third"}
    reward = {"function": "f.py", "function_kwargs": {"api_key": "hush", "k": 2}}
    config = complete({"trainer": trainer, "reward": reward})

    def ran(*steps: int) -> dict[str, Any]:
        calls.clear()
        tracker = Tracker(tmp_path, Screen(), ("wandb",), total_steps=9, config=config)
        for step in steps:
            tracker.step(step, {"x": float(step), "nan": float("nan")})
        tracker.close()
        tracker.close()
        assert calls[1:] == [*(("log", (s, {"x": float(s)})) for s in steps), ("finish", None)]
        options: dict[str, Any] = calls[0][1]
        return options

    first, resumed = ran(1, 2), ran(3)
    assert first == resumed
    assert (first["project"], first["name"], first["resume"]) == ("sums", "third", "allow")
    assert first["dir"] == str(tmp_path) and len(first["id"]) >= 8
    assert first["config"]["reward"]["function_kwargs"] == {"api_key": "***", "k": 2}
    # A sample of the responses of a step, and no more of a text than a table shows.
    tracker = Tracker(tmp_path, Screen(), ("wandb",), total_steps=9, config=config)
    tracker.rollouts(4, [scored("x" * 9999), *[scored()] * 60])
    tracker.rollouts(4, [scored("a validation")], split="val")
    calls.clear()
    tracker.step(4, {"x": 4.0})
    tracker.step(5, {"x": 5.0})
    tracker.close()
    logged = [metrics for kind, (_, metrics) in (call for call in calls if call[0] == "log")]
    rows = logged[0]["rollouts"].rows
    assert len(rows) == TABLE_ROWS and rows[0]["response"] == "x" * TABLE_CHARS
    assert (rows[1]["prompt"], rows[1]["score"], rows[1]["step"]) == ("2+2?", 1.0, 4)
    assert logged[1] == {"x": 5.0}
    (tmp_path / "metrics.jsonl").unlink()  # a new run in the same folder
    assert ran(1)["id"] != first["id"]

    def refuse(**options: Any) -> None:
        raise Refused("no login")

    vars(stand_in)["init"] = refuse
    with pytest.raises(UserError, match=r"did not start \(no login\)\. Log in with `wandb login`"):
        ran(4)
