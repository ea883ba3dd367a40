"""`ppo reward calibrate`: columns, equal labels, tables, repeats past the cache, mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import UserError
from ppo_cli.extras.lab import calibrate
from ppo_cli.extras.lab.commands.calibrate import format_calibration
from tests.cli.test_reward import ROW, write
from tests.scoring.commands import Bench, run_reward
from tests.scoring.test_mixtures import sums

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture
def judge(bench: Bench) -> list[str]:
    return ["--use_api_reward", *bench.judge()]


@pytest.fixture
def mixture(bench: Bench) -> list[str]:
    return [*bench.judge(), "--reward", "judge:0.5", "--reward", "rule:0.5"]


def test_columns_of_any_name_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def record_call(*args: Any, **options: Any) -> Any:
        seen.extend((*args, options))
        raise UserError("enough")

    monkeypatch.setattr(calibrate, "calibrate", record_call)
    names = {"prompt": "q", "data_source": "kind", "response": "said"}
    row = {names.get(key, key): value for key, value in ROW.items()} | {"good": "yes"}
    other = {**row, "q": "2 + 2 = ?", "ground_truth": "4", "said": "#### 5", "good": "no"}
    file = write(tmp_path / "a.jsonl", row, other)
    columns = ("data.prompt_key=q", "data.reward_fn_key=kind", "--response_key", "said")
    labels = ("--labels", "good", "--positive", "no", "--repeat", "7")
    run_reward(capsys, "calibrate", file, *columns, *labels)
    _, _, labelled, options = seen
    assert [row.rollout.prompt.data_source for row in labelled.rows] == ["gsm8k", "gsm8k"]
    assert [row.rollout.text for row in labelled.rows] == ["#### 2", "#### 5"]
    assert (options["repeat"], labelled.description) == (7, "'no' is good (1 of 2)")


def test_equal_labels_are_refused_before_anything_is_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", ROW | {"good": 1}, ROW | {"good": 1})
    code, out, err = run_reward(capsys, "calibrate", file, "--labels", "good")
    assert (code, out) == (2, "")
    assert "all labels are equal (2 rows)" in err and "Add rows with another label" in err


def test_verdicts_from_the_cache_say_nothing_about_the_cost() -> None:
    result = {
        "rows": 1, "scored": 0, "failed": {}, "labels": "x", "spent": {"seconds": 3.0},
        "agreement": {}, "bias": {}, "repeated": None, "cascade": {}, "per_1000": {}, "advice": [],
        "parts": {}, "reported": {}, "correlations": [], "length": None, "criteria": {},
    }  # fmt: skip
    assert "every verdict came from the cache" in "\n".join(format_calibration(result))


def test_calibrate_asks_past_the_cache(bench: Bench, judge: list[str]) -> None:
    file = bench.sums(12)
    summary = bench.reward("calibrate", file, "--labels", "good", *judge, "--json").summary
    assert summary["agreement"]["AUC"]["value"] == 1.0
    assert summary["repeated"] == {
        "rows": 12, "same": 1.0, "mean_gap": 0.0, "largest_gap": 0.0, "verdicts": 3,
    }  # fmt: skip
    assert bench.server.count >= 12 + 36
    assert summary["per_1000"]["tokens_in"] > 0


def test_calibrate_looks_at_each_part_of_a_mixture(mixture: list[str], bench: Bench) -> None:
    bench.server.score = lambda system, user: 5
    args = ("calibrate", sums(bench, 12), "--labels", "good", *mixture)
    summary = bench.reward(*args, "--json").summary
    rule, of_judge = summary["parts"]["rule"], summary["parts"]["judge"]
    assert summary["kind"] == "mixture"
    assert summary["agreement"]["AUC"]["value"] == rule["agreement"]["AUC"]["value"] == 1.0
    assert of_judge["agreement"]["AUC"]["why"] == "every score is the same"
    assert (of_judge["repeated"]["verdicts"], rule["repeated"]) == (3, None)
    assert bench.server.count >= 12 + 36
    assert summary["spent"]["calls"] >= 48
    assert summary["agreement"]["accuracy at 0.5"]["value"] is None
    out = bench.reward(*args).out
    assert "Part rule alone" in out and "Repeated verdicts of judge" in out


def test_fresh_verdicts_keep_to_the_budget(mixture: list[str], bench: Bench) -> None:
    limits = ("--rm_max_tokens", "50", "--rm_budget_tokens", "12000")
    args = ("calibrate", sums(bench, 12), "--labels", "good", *mixture, *limits, "--json")
    summary = bench.reward(*args, code=3).summary
    assert summary["scored"] == 12 and "budget" in summary["stopped"]
    assert summary["spent"]["tokens_in"] + summary["spent"]["tokens_out"] <= 12_000
