"""`ppo prompts list`, `show` and `render`, as they are typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.app import main
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.extras.lab.prompts import render_row
from ppo_cli.records import Score, Scored
from ppo_cli.report.tracker import make_rollout_line
from tests.rewards.scoring import sum_episode

ROW = {"prompt": "2 + 2 = ?", "ground_truth": "4", "response": "It is 4."}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["prompts", *args])
    out, err = capsys.readouterr()
    return code, out, err


def rendered(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = run(capsys, "render", *args, "--json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def test_what_show_prints_is_a_file_of_ones_own(
    rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(run(capsys, "show", "math")[1], encoding="utf-8")
    other_prompts = rendered(capsys, rows, "--rm_prompt_preset", "math")
    mine = rendered(capsys, rows, "--rm_prompt_file", "mine.yaml")
    assert mine["system"] == other_prompts["system"]


def test_a_line_of_an_episode_is_rendered_as_the_judge_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "step_000003.jsonl"
    file.write_text(json.dumps(make_rollout_line(3, Scored(sum_episode(1), Score(1.0)))) + "\n")
    user = render_row(ApiReward(), str(file), 1).question.user
    assert re.search(r"<call-1-(\w+)>\nadd\(a=1, b=1\)\n</call-1-\1>\n<tool-1-\1>\n2\n", user)
    assert "add(a=1" not in render_row(ApiReward(scope="turn"), str(file), 1).question.user
    assert "add(a=1" not in render_row(ApiReward(), str(file), 1, response="It is 3.").question.user
