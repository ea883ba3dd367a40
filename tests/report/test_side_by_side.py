"""Runs side by side: contents in place of paths, and groups of runs that differ in the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ppo_cli.report.side_by_side import put_side_by_side, tabulate_groups
from ppo_cli.run_folder.checkpoints import FORMAT
from ppo_cli.run_folder.lines import read_metrics, replace_lines


def make_run(folder: Path, settings: Mapping[str, str], score: float) -> Path:
    """Write a run of which each setting was set by a flag."""
    lines = [f"{key}: {value}  # --flag" for key, value in settings.items()]
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("\n".join(lines) + "\n")
    replace_lines(folder / "metrics.jsonl", [{"step": 1, "reward_mean": score}])
    return folder


def save_fingerprint(run: Path, fingerprint: Mapping[str, object]) -> None:
    state = run / "checkpoints" / "step_000001" / "state"
    state.mkdir(parents=True)
    saved = {
        "format": FORMAT,
        "run": {"step": 1},
        "order": {},
        "reward": {},
        "fingerprint": fingerprint,
    }
    (state / "run.json").write_text(json.dumps(saved))


def test_files_count_by_their_content(tmp_path: Path) -> None:
    runs = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        rows = tmp_path / name / "inputs" / "rows.jsonl"
        runs.append(make_run(tmp_path / name, {"reward.function": f"{rows}:score"}, 0.5))
        rows.parent.mkdir()
        rows.write_text(text)
    assert not put_side_by_side(runs[:2]).varied
    assert list(put_side_by_side(runs).varied) == ["reward.function"]


def test_a_file_that_was_edited_between_two_runs_is_a_difference(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text("as it is now")
    runs = [make_run(tmp_path / n, {"reward.api.rubric": str(rubric)}, 0.5) for n in "ab"]
    assert not put_side_by_side(runs).varied
    for run, digest in zip(runs, ("1", "2"), strict=True):
        save_fingerprint(run, {"contents": {str(rubric): digest}})
    first, second = put_side_by_side(runs).varied["reward.api.rubric"]
    assert first != second


@pytest.mark.parametrize("seeds", [("1", "2", "3"), ("7", "7.0", "8")])
def test_runs_that_differ_in_the_seed_form_a_group(tmp_path: Path, seeds: tuple[str, ...]) -> None:
    runs = [
        make_run(tmp_path / f"{kl}_{n}", {"kl": kl, "trainer.seed": seed}, float(kl) + n)
        for kl in ("0.5", "2")
        for n, seed in enumerate(seeds)
    ]
    compared = put_side_by_side(runs)
    assert compared.groups == [[0, 1, 2], [3, 4, 5]] and list(compared.varied) == ["kl"]
    histories = [read_metrics(run) for run in runs]
    # Mean of 0.5, 1.5, 2.5, and their sample standard deviation.
    assert tabulate_groups(compared, histories)[1:] == [
        ["kl=0.5", "3", "1.5 ± 1", "-"], ["kl=2", "3", "3 ± 1", "-"],
    ]  # fmt: skip
    assert tabulate_groups(put_side_by_side(runs[::3]), histories[::3]) == []
