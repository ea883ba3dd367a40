"""`ppo show`: files that it writes, the drift of a judge, a reader that stops early.

What it prints is in tests/messages.txt.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.screen import ABOVE, BELOW, BOLD, PLAIN, STYLES
from ppo_cli.cli.show import format_rollout
from ppo_cli.report.page.run_data import RunData
from ppo_cli.run_folder.lines import append_line, read_lines, replace_lines, rollout_file
from tests.config.settling import settle
from tests.golden import INPUTS
from tests.report.page.runs import add_critic, add_episodes, make_run
from tests.settings import config_yaml


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run that the golden file of messages shows."""
    return Path(shutil.copytree(INPUTS / "run", tmp_path / "run"))


def test_all_steps_go_to_a_csv_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--csv"]) == 0
    rows = capsys.readouterr().out
    assert main(["show", "--csv", "all.csv", str(run)]) == 0
    assert Path("all.csv").read_text() == rows


def test_the_drift_of_a_judge_against_labels_is_told_when_the_run_is_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def show() -> str:
        assert main(["show", str(run)]) == 0
        return capsys.readouterr().out

    settings = {"reward.api.enable": ("true", "flag"), "reward.api.model": ("m", "flag")}
    (run / "config.yaml").write_text(config_yaml(settle(flags=settings)), encoding="utf-8")
    labels = [
        {"id": f"train:{step}:{n}", "step": step, "score": 0.5 + 0.4 * (step > 5), "label": 1}
        for step in (1, 25)
        for n in range(10)
    ]
    replace_lines(run / "labels.jsonl", labels[1:])
    assert "its scores have risen" not in show()
    replace_lines(run / "labels.jsonl", labels)
    output = "its scores have risen by +0.40 beyond the labels that people gave"
    assert output in show()
    odd: list[dict[str, Any]]
    odd = [{"step": "x"}, {"step": 1e400}, {"label": float("nan")}, {"score": "good"}]
    replace_lines(run / "labels.jsonl", [*labels, *({**labels[0], **change} for change in odd)])
    assert output in show()
    data = RunData(run, "run")
    kinds = [finding["kind"] for finding in data.read()["findings"]]
    assert "hacking" in kinds
    replace_lines(run / "labels.jsonl", [])
    assert "hacking" not in [finding["kind"] for finding in data.read()["findings"]]


def test_runs_of_other_lengths_are_compared_at_their_last_common_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, steps, alpha in (("a", 12, "16"), ("b", 30, "16.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(
            f"lora_alpha: {alpha}  # flag\nx: [{name}  # f\n"
        )
        for step in range(1, steps + 1):
            line = {"uid": step, "sample": 0, "prompt": f"p{step}", "response": [name], "score": 0}
            replace_lines(rollout_file(tmp_path / name, step), [line])
    assert main(["show", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in compared["prompts"]] == [12]
    assert compared["settings"] == {"x": ["[a", "[b"]}  # which is not YAML


def test_a_reader_that_needs_no_more_is_no_error(tmp_path: Path) -> None:
    wide = {f"loss/{n}": 0.123456789 for n in range(100)}  # more than a pipe holds
    lines = (json.dumps({"step": step} | wide) + "\n" for step in range(500))
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    command = [sys.executable, "-m", "ppo_cli", "show", str(tmp_path), "--csv"]
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=buffered, **pipes) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        assert shown.stdout.readline().startswith(b"step,loss/0,")
        shown.stdout.close()
        assert (shown.wait(timeout=60), shown.stderr.read()) == (0, b"")


def test_what_the_critic_predicts_is_below_the_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run)]) == 0
    assert "variance" not in capsys.readouterr().out
    add_critic(run, 20)
    append_line(run / "critic.jsonl", {"step": "x"})
    append_line(run / "metrics.jsonl", {"step": 21, "kl_divergence": -9.5e-10})
    assert main(["show", str(run)]) == 0
    steps, *_, positions, tenths = capsys.readouterr().out.rstrip().split("\n\n")
    # A KL of rounding errors is 0, as on the line of the step.
    assert steps.split("\n")[-1].split()[:3] == ["21", "-", "0.000"]
    assert [row.split() for row in positions.split("\n")] == [
        ["explained", "variance", "at", "token", "1", "2"],
        ["steps", "1", "to", "2", "0.013", "-0.187"],
        ["steps", "19", "to", "20", "0.487", "0.287"],
    ]
    first, second = (row.split() for row in tenths.split("\n"))
    assert first[:8] == ["steps", "19", "to", "20:", "value", "of", "a", "token"]
    assert first[8:10] == ["0.000", "0.100"] and second[3:5] == ["0.195", "0.245"]


def test_an_episode_is_shown_by_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=3)
    add_episodes(run, 3)
    assert main(["show", str(run), "--step", "3"]) == 0
    shown = capsys.readouterr().out
    assert (
        """
turn 1 (form 0.250, add 0.5 s, cut off):
  thought: One more … (16 characters, --full shows them)
  Let me add.
  call: add(a=1, b=1)
  error: add: b is not a number
  tool: 2 …"""
        in shown
    )
    head = next(line for line in shown.splitlines() if "tool error" in line)
    assert head.endswith("2 turns, 1 tool error, ended by the limit of turns, data_source add")
    assert "the environment took longer than 30 s" in shown
    assert main(["show", str(run), "--step", "3", "--full"]) == 0
    assert "\n    than 1.\n" in capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    assert "add 0.5 s (3 calls)" in capsys.readouterr().out
    # Files of other programs may have anything in their place.
    file = rollout_file(run, 3)
    lines = read_lines(file)
    lines[1]["turns"][1]["message"] = "It is 2."
    replace_lines(file, lines)
    assert main(["show", str(run), "--step", "3"]) == 2
    assert "turns.1.message is" in capsys.readouterr().err


def test_placed_rewards_and_advantages_are_shown_by_passage() -> None:
    """A passage ends at a reward or with its advantage; a single reward is not placed."""
    reward, advantage = (
        base64.b64encode(struct.pack("<4e", *numbers)).decode()
        for numbers in ((0, 0.5, 0, 0.25), (1, 1, -2, -2))
    )
    details = {"lengths": "2 3 3 0", "reward": reward, "advantage": advantage}
    line = {"step": 1, "score": 0.75, "response": "A b. C.\n", "token_details": details}
    text = format_rollout(line)
    for mark in STYLES:
        text = text.replace(mark, "")
    assert "  +0.50  +1.00  A b.\n  +0.25  -2.00  C." in text
    assert f"{ABOVE}{BOLD}A b.{PLAIN}" in format_rollout(line)
    assert f"{BELOW}{BOLD}C.{PLAIN}" in format_rollout(line)
    # A piece that earns nothing is shown too.
    lone = base64.b64encode(struct.pack("<4e", 0, 0.75, 0, 0)).decode()
    line["token_details"] = details | {"reward": lone}
    assert "advantages" not in format_rollout(line)
    assert "advantages" in format_rollout({**line, "places": [[4, 0.75], [8, 0.0]]})
    for damage in ({"reward": 0.0}, {"lengths": "2 x"}, {"reward": "AAAA"}, {"advantage": None}):
        line["token_details"] = details | damage
        assert "advantages" not in format_rollout(line)
