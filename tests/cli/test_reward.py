"""`ppo reward score`: files, columns, tables, Ctrl-C.

What they print is in tests/messages.txt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.reward_tables import format_histogram, format_parts
from tests.scoring.commands import read, run_reward

ROW: dict[str, Any] = {
    "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "gsm8k", "response": "#### 2",
}  # fmt: skip


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def test_scores_are_written_next_to_the_columns_of_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {**ROW, "response": "#### 3", "mine": {"a": [1]}}
    file = write(tmp_path / "a.jsonl", ROW, wrong)
    assert run_reward(capsys, "score", file, "--rule", "gsm8k")[0] == 0
    first, second = read(tmp_path / "a.scored.jsonl")
    assert first == {
        **ROW, "score": 1.0, "failure": None, "reason": "",
        "parts": {"gsm8k": {"raw": 1.0, "scaled": 1.0}},
        "info": {"extracted": "2", "rule": "gsm8k"},
    }  # fmt: skip
    assert (second["score"], second["mine"]) == (0.0, {"a": [1]})


def test_numbers_that_a_function_only_reports_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'style': 2.0}\n"
    )
    file = write(tmp_path / "a.jsonl", ROW)
    assert run_reward(capsys, "score", file, "--reward-function", str(function))[0] == 0
    (row,) = read(tmp_path / "a.scored.jsonl")
    assert row["parts"] == {"style": {"raw": 2.0, "scaled": None}}


def test_ctrl_c_writes_what_is_there_and_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.rewards.rule_reward import RuleReward

    def end_round(self: RuleReward, kind: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RuleReward, "end_round", end_round)
    file = write(tmp_path / "a.jsonl", ROW, ROW)
    code, out, err = run_reward(capsys, "score", file)
    assert code == 3
    assert "scored" in out
    assert "Stopped by Ctrl-C. 2 of 2 rows have a score" in err
    assert "Run the same command again." in err
    assert [row["score"] for row in read(tmp_path / "a.scored.jsonl")] == [1.0, 1.0]


def test_columns_of_any_name_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"prompt": "q", "data_source": "kind", "response": "said"}
    row = {names.get(key, key): value for key, value in ROW.items()}
    file = write(tmp_path / "a.jsonl", row, {**row, "said": "#### 5"})
    columns = ("data.prompt_key=q", "data.reward_fn_key=kind", "--response_key", "said")
    assert run_reward(capsys, "score", file, *columns)[0] == 0
    assert [row["score"] for row in read(tmp_path / "a.scored.jsonl")] == [1.0, 0.0]


def test_the_longest_bar_has_30_characters_and_the_shortest_one() -> None:
    lines = format_histogram(
        [{"from": 1.0, "to": 1.0, "count": 60}, {"from": 0.0, "to": 0.5, "count": 1}]
    )
    assert lines[2].split() == ["1.000", "#" * 30, "60"]
    assert lines[3].split() == ["0.000", "to", "0.500", "#", "1"]
    assert format_histogram([]) == []


def test_a_mixture_has_a_table_of_its_parts() -> None:
    model = {"weight": 0.7, "share": 0.5, "scored": 12, "failed": 0, "mean": 20.0, "affine": None}
    rule = {**model, "weight": 0.3, "gated": 4, "mean": None, "affine": "scaling: affine, mean: 1"}
    facts = {
        "parts": {"model": model, "rule": rule}, "length": None,
        "reported": {"model.tone": {"mean": 0.5}},
        "correlations": [{"parts": ["model", "rule"], "value": 0.25}],
    }  # fmt: skip
    lines = [line.split() for line in format_parts(facts)]
    assert ["model", "70%", "50%", "12", "0", "-", "20.000"] in lines
    assert ["rule", "30%", "50%", "12", "0", "4", "-"] in lines
    assert ["model.tone", "0.500"] in lines
    assert ["model", "with", "rule", "0.250"] in lines
    assert format_parts(facts)[-1] == "  rule: {scaling: affine, mean: 1}"
    alone = {**facts, "parts": {"judge": rule}, "reported": {}, "correlations": []}
    assert format_parts(alone) == []
