"""`ppo show`: the steps of a run, its responses, and what is said of folders that are none."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ppo_cli.cli.app import main
from ppo_cli.cli.show import show_app
from ppo_cli.config.plan import config_yaml
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import DataError
from ppo_cli.records import Part, Prompt, Rollout, Score, Scored
from ppo_cli.report.metrics import summarise
from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.tracker import Screen, Tracker
from ppo_cli.run_folder import METRICS_FILE, read_metrics, replace_lines, rollout_file
from tests.config.settling import settle


def scored(uid: str, text: str, value: float | None) -> Scored:
    prompt = Prompt(uid, f"question {uid}", (), "", (1,), data_source="add", ground_truth={"a": 4})
    rollout = Rollout(prompt, 0, (5, 6), np.zeros(2, np.float32), text, "length")
    if value is None:
        return Scored(rollout, Score.failed("timeout after 10 s"))
    parts = {"judge": Part(value, value), "rule": Part(1.0, 0.0)}
    return Scored(rollout, Score(value, reason=f"because {uid}", parts=parts))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tracker = Tracker(tmp_path, Screen(), (), total_steps=30, config=Config())
    tracker.validation(0, {"val/accuracy": 0.125})
    tracker.rollouts(0, [scored("v", "val \ud83d text", 1.0)], split="val")
    for step in range(1, 26):
        tracker.step(step, {"reward_mean": step / 100, "kl_divergence": float("nan")})
    for step in (1, 25):
        rows = [scored("a", "A", 0.9), scored("b", "B\nB2 \x1b[2J", -1.0), scored("c", "C", None)]
        tracker.rollouts(step, rows)
    tracker.close()
    return tmp_path


def show(*args: Any) -> str:
    result = CliRunner().invoke(show_app, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_of_steps(run: Path) -> None:
    rows = show(run, "--last", 100).splitlines()
    assert rows[0].split() == ["step", "reward", "val"]
    assert rows[1].split() == ["0", "-", "0.125"]
    assert rows[26].split() == ["25", "0.250", "-"]
    assert len({len(row) for row in rows}) == 1
    assert len(show(run).splitlines()) == 21


def test_the_summary_has_means_and_deviations(run: Path) -> None:
    rows = [row.split() for row in show(run, "--summary").splitlines()]
    assert rows == [["metric", "mean", "std"], ["reward_mean", "0.130", "0.072"]]
    report = json.loads(show(run, "--summary", "--json"))
    assert set(report) == {"reward_mean_mean", "reward_mean_std"}
    assert report["reward_mean_mean"] == pytest.approx(0.13)


def test_the_worst_come_first_and_the_unscored_last(run: Path) -> None:
    shown = show(run, "--worst", 2)
    assert shown.index("question b") < shown.index("question a") and "question c" not in shown
    assert "step 25, score -1.000, 2 tokens, cut off, data_source add" in shown
    assert "because b" in shown and "judge -1.000, rule 1.000" in shown and '{"a": 4}' in shown
    assert "  B\n  B2 \\x1b[2J" in shown and "\x1b" not in shown
    assert "no score" in show(run, "--worst", 3) and "timeout after 10 s" in show(run, "--worst", 3)


def test_a_step_and_validation(run: Path) -> None:
    assert show(run, "--step", 1).count("--- step 1,") == 3
    assert "val ? text" in show(run, "--val")


def test_json(run: Path) -> None:
    assert [line["step"] for line in json.loads(show(run, "--json", "--last", 2))] == [24, 25]
    (line,) = json.loads(show(run, "--worst", 1, "--json"))
    assert line["uid"] == "b" and line["response"] == "B\nB2 \x1b[2J"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--step", "24"], r"no responses of step 24.*from 1 to 25.*--step 25"),
        (["--val", "--step", "3"], r"no validation responses of step 3"),
    ],
)
def test_a_step_that_is_not_there(run: Path, args: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        show(run, *args)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        show(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        show(tmp_path / "absent")
    (tmp_path / "metrics.jsonl").write_text("")
    assert show(tmp_path) == "No step is finished yet.\n"
    with pytest.raises(DataError, match="no responses yet"):
        show(tmp_path, "--worst", 1)


def test_lines_of_others_do_not_break_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[]\n{"x": 1}\n{"st')
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text('{"prompt": "p"}\n')
    assert show(tmp_path).split() == ["step", "1"]
    assert "no score" in show(tmp_path, "--worst", 1)


def test_all_steps_as_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    steps = read_metrics(run)
    assert [int(row["step"]) for row in rows] == [line["step"] for line in steps]
    keys = {key for line in steps for key in line}
    assert set(rows[0]) == keys
    for row, line in zip(rows, steps, strict=True):
        assert {k: float(v) for k, v in row.items() if v} == {
            k: v for k, v in line.items() if v is not None
        }
    file = run / "all.csv"
    assert main(["show", "--csv", str(file), str(run)]) == 0
    assert len(file.read_text().splitlines()) == len(steps) + 1
    assert main(["show", str(run), "--csv", str(run / "no" / "x.csv")]) == 2
    assert "--csv" in capsys.readouterr().err


def pay(run: Path, *outcomes: str, judge: str = "judge_calls") -> None:
    calls = [{"outcome": o, "input": 60, "output": 10, "usd": 0.0001} for o in outcomes]
    replace_lines(run / f"{judge}.jsonl", calls)


def test_what_the_judges_did_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"step": 0, "val/judge/calls": 4.0},
        {"step": 1, "judge/calls": 10.0, "judge/retries": 2.0, "judge/cached": 3.0,
         "score/failed": 1.0},
        {"step": 2, "reward_mean": None},
    ]  # fmt: skip
    replace_lines(tmp_path / METRICS_FILE, steps)
    pay(tmp_path, *["ok"] * 17, "rate_limit", "rate_limit")  # some of a step that was cut short
    pay(tmp_path, "ok", "ok", judge="judge_calls_b")
    assert main(["show", str(tmp_path)]) == 0
    expected = (
        "21 calls, 2 failed (rate_limit 2), 2 retries, 3 verdicts reused, "
        "1 responses without a score, $0.0021"
    )
    assert f"judge: {expected}" in capsys.readouterr().out
    end = summarise(steps, tmp_path, Config(), session=(2, 1.0), resume_command="")
    assert end.judge == expected


def test_a_run_that_spent_its_budget_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    assert main(["show", str(run)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    pay(run, *["ok"] * 10)
    assert main(["show", str(run)]) == 0
    output = capsys.readouterr().out
    assert "No step is finished yet." in output and "judge: 10 calls, $0.001" in output
    assert "command of this run is run again" in output
    (run / "config.yaml").write_text(
        "data: {train_files: [embedded], val_files: []}\nmodel: {path: embedded}\n"
        "data.train_batch_size: 16\nactor.ppo_mini_batch_size: 16\n"
        "reward: {api: {enable: true, budget_usd: 0.001}}\n"
        "trainer: {total_training_steps: 10}\n"
    )
    assert main(["show", str(run)]) == 0
    line = capsys.readouterr().out.split("Go on with: ")[1]
    assert shlex.split(line)[-2:] == ["--rm_budget_usd", "0.02"]  # 160 responses, and a fifth
    assert main(["plan", *shlex.split(line)[2:]]) == 0


def test_two_runs_are_compared(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    tracker = Tracker(other, Screen(), (), total_steps=30, config=Config())
    tracker.validation(0, {"val/accuracy": 0.75})
    for step in (1, 2):
        tracker.step(step, {"reward_mean": 0.5, "entropy": 1.0})
        tracker.rollouts(step, [scored("b", "better", 0.5), scored("a", "A", 0.9)])
    tracker.close()
    (run / "config.yaml").write_text(
        "actor:\n  optim:\n    lr: 1.0e-06  # default\n  new: 3  # default\n"
    )
    (other / "config.yaml").write_text("actor:\n  optim:\n    lr: 0.5  # flag --lr\n")
    report = json.loads(show(run, other, "--json"))
    assert report["settings"] == {"actor.optim.lr": ["1.0e-06", "0.5"]}
    assert report["metrics"]["reward_mean"] == pytest.approx([0.205, 0.5])
    assert report["metrics"]["entropy"] == [None, 1.0]
    assert report["validation"] == [0.125, 0.75]
    assert [row["step"] for row in report["prompts"]] == [1, 1]  # the newest that both have
    assert report["prompts"][0]["prompt"] == "question b" and report["prompts"][0]["apart"] == 1.5
    text = show(run, other, "--worst", 1)
    assert "actor.optim.lr" in text and "better" in text and "question a" not in text
    assert "\x1b" not in text
    assert "none" in show(run, run)
    assert "The runs have no step" in show(run, other, "--step", 2)


def test_a_response_of_other_types_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rollout_file(run, 25, "train")
    first = json.loads(file.read_text().splitlines()[0])
    for change, fragment in {
        '{"score": "good"}': 'score is "good", which has the wrong type',
        '{"parts": {"judge": {"raw": "7"}}}': 'parts.judge.raw is "7", which has the wrong type',
        '{"parts": {"judge": 7}}': "parts.judge is 7, which has the wrong type",
        '{"uid": ["a"]}': 'uid is ["a"], which has the wrong type',
    }.items():
        file.write_text("\n".join(json.dumps(row) for row in (first, first | json.loads(change))))
        for extra_args in (["--step", "25"], ["--worst", "2"], [str(run), "--step", "25"]):
            assert main(["show", str(run), *extra_args]) == 2
            output = capsys.readouterr().err
            assert f"{file}, response 2: {fragment}" in output and "bug" not in output
    file.write_text(json.dumps(first | {"reason": 7, "failure": ["x"], "finish_reason": 3}))
    assert "reason:\n  7" in show(run, "--step", 25)


def test_the_drift_of_a_judge_against_labels_is_told_when_the_run_is_over(run: Path) -> None:
    settings = {"reward.api.enable": ("true", "flag"), "reward.api.model": ("m", "flag")}
    (run / "config.yaml").write_text(config_yaml(settle(flags=settings)), encoding="utf-8")
    labels = [
        {"id": f"train:{step}:{n}", "step": step, "score": 0.5 + 0.4 * (step > 5), "label": 1}
        for step in (1, 25)
        for n in range(10)
    ]
    replace_lines(run / "labels.jsonl", labels[1:])
    assert "drift" not in show(run)
    replace_lines(run / "labels.jsonl", labels)
    output = "its scores have risen by +0.40 beyond the labels that people gave"
    assert output in show(run)
    odd: list[dict[str, Any]]
    odd = [{"step": "x"}, {"step": 1e400}, {"label": float("nan")}, {"score": "good"}]
    replace_lines(run / "labels.jsonl", [*labels, *({**labels[0], **change} for change in odd)])
    assert output in show(run)
    data = RunData(run, "run")
    kinds = [finding["kind"] for finding in data.read()["findings"]]
    assert "judge_drift" in kinds
    replace_lines(run / "labels.jsonl", [])
    assert "judge_drift" not in [finding["kind"] for finding in data.read()["findings"]]


def test_a_reader_that_needs_no_more_is_no_error(tmp_path: Path) -> None:
    wide = {f"loss/{n}": 0.123456789 for n in range(100)}  # more than a pipe holds
    lines = (json.dumps({"step": step} | wide) + "\n" for step in range(5_000))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    command = [sys.executable, "-m", "ppo_cli", "show", str(tmp_path), "--csv"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=buffered, **pipes) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        assert shown.stdout.readline().startswith(b"step,loss/0,")
        shown.stdout.close()
        assert (shown.wait(timeout=60), shown.stderr.read()) == (0, b"")
