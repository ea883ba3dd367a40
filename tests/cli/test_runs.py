"""`ppo runs`, `ppo explain`, `ppo presets copy` and `--fork`: small commands around a run."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.models.bundled import preset_names, preset_path
from ppo_cli.config.schema.keys import table
from ppo_cli.report.catalogue import METRICS
from ppo_cli.run_folder.lines import replace_lines


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def make_run(folder: Path, steps: int, *, total: int, usd: float = 0.0) -> Path:
    lines = [{"step": step, "reward_mean": step / 10} for step in range(1, steps + 1)]
    replace_lines(folder / "metrics.jsonl", [{"step": 0, "val/reward_mean": 0.5}, *lines])
    (folder / "config.yaml").write_text(
        f"model: {{path: embedded}}\ntrainer: {{total_training_steps: {total}}}\n"
    )
    if usd:
        replace_lines(folder / "judge_calls.jsonl", [{"usd": usd, "input": 1, "output": 1}])
    (folder / "checkpoints" / f"step_{steps:06d}" / "state").mkdir(parents=True)
    return folder


def test_runs_with_their_state(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(desk / "a" / "one", 4, total=4, usd=0.25)
    make_run(desk / "two", 3, total=9)
    make_run(desk / "two" / "earlier_1", 1, total=9)  # set aside by the run
    make_run(desk / "two" / "copy", 1, total=9)  # anything else in a run is a part of it
    going = make_run(desk / "three", 2, total=9)
    with (going / ".lock").open("w") as claim:
        fcntl.flock(claim, fcntl.LOCK_EX)
        runs_by_name = {run["run"]: run for run in run_json(capsys, "runs", ".")}
    assert {name: (run["state"], run["step"]) for name, run in runs_by_name.items()} == {
        "a/one": ("done", 4), "two": ("stopped", 3), "three": ("running", 2),
        "two/earlier_1": ("stopped", 1),
    }  # fmt: skip
    assert runs_by_name["a/one"]["cost_usd"] == 0.25 and runs_by_name["a/one"]["saved_step"] == 4
    assert (runs_by_name["two"]["reward"], runs_by_name["two"]["validation"]) == (0.3, 0.5)
    assert main(["runs"]) == 0
    table_ = capsys.readouterr().out.splitlines()
    assert len(table_) == 5 and "$0.25" in "".join(table_)


def test_every_setting_and_metric_is_explained() -> None:
    names = [*table(), *(metric.key.replace("*", "x") for metric in METRICS)]
    assert [name for name in names if main(["explain", name]) != 0] == []


def test_presets_are_copied(desk: Path) -> None:
    for name in preset_names():
        assert main(["presets", "copy", name, f"{name}.yaml"]) == 0
        copied, preset = (desk / f"{name}.yaml").read_text(), preset_path(name).read_text()
        # Only the place of the schema differs.
        assert copied.splitlines()[1:] == preset.splitlines()[1:]
