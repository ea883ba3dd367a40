"""TensorBoard and W&B: each point once, no torch, and a plain word when a package is missing."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ppo_cli.config.schema import Config
from ppo_cli.errors import MissingPart, UserError
from ppo_cli.report.tracker import Screen, Tracker


def make(folder: Path, *loggers: str) -> Tracker:
    return Tracker(folder, Screen(), loggers, total_steps=9, config=Config())


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
    again = make(tmp_path, "tensorboard")
    again.resume_at(2)
    for step in (3, 4, 5):
        again.step(step, {"reward_mean": 10 * step})
    again.close()
    expected = [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert points(tmp_path / "tensorboard", "reward_mean") == expected


def test_tensorboard_works_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    script = (
        "import sys; from pathlib import Path\n"
        "from ppo_cli.config.schema import Config\n"
        "from ppo_cli.report.tracker import Screen, Tracker\n"
        f"t = Tracker(Path({str(tmp_path)!r}), Screen(), ['tensorboard'], total_steps=1, "
        "config=Config())\nt.step(1, {'x': 1.0}); t.close()\n"
        "assert not {'torch', 'tensorflow', 'wandb'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert points(tmp_path / "tensorboard", "x") == [(1, 1.0)]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_told_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # what import makes of an absent package
    with pytest.raises(MissingPart, match=f"pip install {package}"):
        make(tmp_path, "console", package)


def test_wandb_offline_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = []
    for start in (1, 3):
        tracker = make(tmp_path, "wandb")
        tracker.resume_at(start - 1)
        for step in (start, start + 1):
            tracker.step(step, {"x": 1.0})
        tracker.close()
        names.append((tmp_path / "wandb" / "run_id").read_text())
    assert names[0] == names[1]
    assert list((tmp_path / "wandb").glob(f"offline-run-*{names[0]}"))


def test_wandb_is_given_the_run_its_name_and_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With something in the place of the package, which need not be installed."""
    asked: list[tuple[str, Any]] = []

    class Run:
        def log(self, metrics: dict[str, float], step: int) -> None:
            asked.append(("log", (step, metrics)))

        def finish(self) -> None:
            asked.append(("finish", None))

    def init(**options: Any) -> Run:
        asked.append(("init", options))
        return Run()

    class Refused(Exception): ...

    stand_in = ModuleType("wandb")
    stand_in.__spec__ = ModuleSpec("wandb", None)
    vars(stand_in).update(init=init, Error=Refused)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    trainer = {"project_name": "sums", "experiment_name": "third"}
    reward = {"function": "f.py", "function_kwargs": {"api_key": "hush", "k": 2}}
    config = Config.model_validate({"trainer": trainer, "reward": reward})

    def ran(*steps: int) -> dict[str, Any]:
        asked.clear()
        tracker = Tracker(tmp_path, Screen(), ("wandb",), total_steps=9, config=config)
        for step in steps:
            tracker.step(step, {"x": float(step), "nan": float("nan")})
        tracker.close()
        tracker.close()
        assert asked[1:] == [*(("log", (s, {"x": float(s)})) for s in steps), ("finish", None)]
        options: dict[str, Any] = asked[0][1]
        return options

    first, again = ran(1, 2), ran(3)
    assert first == again
    assert (first["project"], first["name"], first["resume"]) == ("sums", "third", "allow")
    assert first["dir"] == str(tmp_path) and len(first["id"]) >= 8
    assert first["config"]["reward"]["function_kwargs"] == {"api_key": "***", "k": 2}
    (tmp_path / "metrics.jsonl").unlink()  # a new run in the same folder
    assert ran(1)["id"] != first["id"]

    def refuse(**options: Any) -> None:
        raise Refused("no login")

    vars(stand_in)["init"] = refuse
    with pytest.raises(UserError, match=r"did not start \(no login\)\. Log in with `wandb login`"):
        ran(4)
