"""`ppo reward score`, `calibrate` and `audit`, as they are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cli.reward import format_calibration, format_histogram, format_parts
from ppo_cli.errors import UserError
from tests.scoring.commands import read, run_reward

ROW: dict[str, Any] = {
    "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "gsm8k", "response": "#### 2",
}  # fmt: skip


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def test_score_with_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**ROW, "response": "#### 3", "mine": {"a": [1]}}
    file = write(tmp_path / "a.jsonl", ROW, wrong)
    code, out, err = run_reward(capsys, "score", file, "--rule", "gsm8k")
    assert (code, err) == (0, "")
    first, second = read(tmp_path / "a.scored.jsonl")
    assert first == {
        **ROW, "score": 1.0, "failure": None, "reason": "",
        "parts": {"gsm8k": {"raw": 1.0, "scaled": 1.0}},
        "info": {"extracted": "2", "rule": "gsm8k"},
    }  # fmt: skip
    assert (second["score"], second["mine"]) == (0.0, {"a": [1]})
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in ("rows 2", "scored 2", "mean 0.500", "1.000 " + "#" * 30 + " 1"):
        assert line in lines
    assert f"1.000 {file} line 1: #### 2" in lines
    assert lines[-1] == f"Written: {tmp_path / 'a.scored.jsonl'}"


def test_rows_choose_their_rule_and_failures_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", ROW, {**ROW, "ground_truth": "many"})
    code, out, err = run_reward(capsys, "score", file, "--out", str(tmp_path / "o.jsonl"))
    assert code == 0
    assert err == "1 of 2 rows could not be scored; the column `failure` says why.\n"
    assert "failed: ground_truth 'many' is not a number  1" in out
    first, second = read(tmp_path / "o.jsonl")
    assert (first["score"], second["score"]) == (1.0, None)
    assert second["failure"] == "ground_truth 'many' is not a number"


def test_score_as_json_with_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'style': 2.0}\n"
    )
    file = write(tmp_path / "a.jsonl", ROW)
    code, out, err = run_reward(capsys, "score", file, "--reward-function", str(function), "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["rows"], document["scored"], document["mean"], document["failed"]) == (
        1,
        1,
        0.5,
        {},
    )
    (row,) = read(tmp_path / "a.scored.jsonl")
    assert row["parts"] == {"style": {"raw": 2.0, "scaled": None}}


def test_settings_come_from_every_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = tmp_path / "mine.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    return bonus\n"
    )
    monkeypatch.setenv("REWARD_FUNCTION", str(function))
    file = write(tmp_path / "a.jsonl", {"question": "x", "response": "y"})
    code, _, err = run_reward(capsys, "score", file, "reward.function_kwargs.bonus=0.25")
    assert code == 0
    assert err == "a.jsonl: the prompt is read from column 'question'.\n"
    assert read(tmp_path / "a.scored.jsonl")[0]["score"] == 0.25


def test_ctrl_c_writes_what_is_there_and_exits_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_cli.rewards.function import RuleReward

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


def labelled(tmp_path: Path, count: int = 20) -> str:
    rows = [
        {**ROW, "response": f"{'so ' * (i // 2)}#### {2 + i % 2}", "good": "ny"[i % 2 == 0]}
        for i in range(count)
    ]
    rows = [{**row, "good": {"n": "no", "y": "yes"}[row["good"]]} for row in rows]
    return write(tmp_path / "a.jsonl", *rows)


def test_calibrate_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = labelled(tmp_path, 8)
    code, out, _ = run_reward(
        capsys, "calibrate", file, "--labels", "good", "--positive", "no", "--repeat", "0", "--json"
    )
    assert code == 0
    document = json.loads(out)
    assert document["labels"] == "'no' is good (4 of 8)"
    assert document["agreement"]["AUC"]["value"] is None
    assert document["repeated"] is None


def test_audit_as_json_with_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**ROW, "prompt": f"{n} + 1 = ?", "ground_truth": str(n + 1)} for n in range(4)]
    file = write(tmp_path / "a.jsonl", *rows)
    code, out, _ = run_reward(capsys, "audit", "--data", file, "--rule", "gsm8k", "--json")
    document = json.loads(out)
    assert code == 0
    assert {"name", "passed", "said", "worst", "cases"} == set(document["checks"][0])
    assert all(case["sent"] for case in document["checks"][0]["cases"])


def test_columns_of_any_name_are_read_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what else is typed reaches the calibration and the audit."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., Any]:
        def record_call(*args: Any, **options: Any) -> Any:
            seen[name] = (*args, options)
            raise UserError("enough")

        return record_call

    names = {"prompt": "q", "data_source": "kind", "response": "said"}
    row = {names.get(key, key): value for key, value in ROW.items()} | {"good": "yes"}
    other = {**row, "q": "2 + 2 = ?", "ground_truth": "4", "said": "#### 5", "good": "no"}
    file = write(tmp_path / "a.jsonl", row, other)
    keys = ("data.prompt_key=q", "data.reward_fn_key=kind")
    columns = (*keys, "--response_key", "said")
    code, _, err = run_reward(capsys, "score", file, *columns)
    assert (code, err) == (0, "")
    assert [row["score"] for row in read(tmp_path / "a.scored.jsonl")] == [1.0, 0.0]
    calibrate = import_module("ppo_cli.extras.trust.calibrate")
    monkeypatch.setattr(calibrate, "calibrate", keep("calibrate"))
    labels = ("--labels", "good", "--positive", "no", "--repeat", "7")
    run_reward(capsys, "calibrate", file, *columns, *labels)
    _, _, labelled, options = seen["calibrate"]
    assert [row.rollout.prompt.data_source for row in labelled.rows] == ["gsm8k", "gsm8k"]
    assert [row.rollout.text for row in labelled.rows] == ["#### 2", "#### 5"]
    assert (options["repeat"], labelled.description) == (7, "'no' is good (1 of 2)")
    audit = import_module("ppo_cli.extras.trust.audit")
    monkeypatch.setattr(audit, "audit", keep("audit"))
    for args, prompts in (
        (("--data", file, *keys), ["1 + 1 = ?", "2 + 2 = ?"]),
        (("--data", file, *keys, "--rows", "1"), ["1 + 1 = ?"]),
    ):
        run_reward(capsys, "audit", *args)
        assert [item.prompt.text for item in seen["audit"][2]] == prompts
    bundled = []
    for name in ("math", "safety"):
        run_reward(capsys, "audit", "--items", name, "--rule", "exact")
        bundled.append([item.prompt.text for item in seen["audit"][2]])
    assert bundled[0] != bundled[1]


def test_bars() -> None:
    lines = format_histogram(
        [{"from": 1.0, "to": 1.0, "count": 60}, {"from": 0.0, "to": 0.5, "count": 1}]
    )
    assert lines[2].split() == ["1.000", "#" * 30, "60"]
    assert lines[3].split() == ["0.000", "to", "0.500", "#", "1"]
    assert format_histogram([]) == []


def test_calibration_of_nothing_fresh() -> None:
    result = {
        "rows": 1, "scored": 0, "failed": {"timeout": 1}, "labels": "x", "spent": {"seconds": 3.0},
        "agreement": {"AUC": {"value": None, "low": None, "high": None, "why": "no rows"}},
        "bias": {}, "repeated": None, "per_1000": {}, "advice": [],
        "parts": {}, "reported": {}, "correlations": [], "length": None, "criteria": {},
    }  # fmt: skip
    text = "\n".join(format_calibration(result))
    assert "AUC  - (no rows)" in text
    assert "every verdict came from the cache" in text


def test_parts_stand_side_by_side() -> None:
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
