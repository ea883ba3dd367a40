"""What a check of prompt files reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ppo_cli.cli.data import Report, compute_percentiles, examine_files
from ppo_cli.data_sets.prompts import Renderer


def look(tokenizer: Any, path: Path, *lines: object, limit: int = 100) -> Report:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return examine_files([str(path)], Renderer(tokenizer), max_prompt_length=limit)


def test_columns_that_are_not_read_and_the_first_prompt(tokenizer: Any, tmp_path: Path) -> None:
    report = look(tokenizer, tmp_path / "a.jsonl", {"prompt": "a", "note": 1}, {"prompt": "bb"})
    assert report.unused_columns == ("note",)
    assert report.sample is not None and report.tokens is not None
    assert report.sample.rendered.startswith("<s><|im_start|>user\na<|im_end|>")
    assert report.tokens["min"] == report.sample.tokens


def test_bad_rows_of_every_stage_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    refused = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
    report = look(
        tokenizer, tmp_path / "a.jsonl", "no", {"prompt": 3}, {"prompt": "a"}, {"prompt": refused}
    )
    assert (report.rows, report.usable, report.bad) == (4, 1, 3)
    assert {(p.place.number, p.column) for p in report.bad_rows} == {
        (1, ""), (2, "prompt"), (4, "prompt")
    }  # fmt: skip


def test_a_row_with_two_problems_is_one_bad_row(tokenizer: Any, tmp_path: Path) -> None:
    broken = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"prompt": broken, "ground_truth": broken}), path)
    report = examine_files([str(path)], Renderer(tokenizer), max_prompt_length=100)
    assert [p.column for p in report.bad_rows] == ["prompt", "ground_truth"]
    assert (report.rows, report.usable, report.bad) == (2, 1, 1)


def test_repeats_over_two_files_are_seen(tokenizer: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": [{"role": "user", "content": "q"}]}\n')
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    report = examine_files(files, Renderer(tokenizer), max_prompt_length=100)
    assert report.duplicates.examples == (f"{files[1]} line 1 repeats {files[0]} line 1",)
    long = [{"prompt": "b" * 90}] * 50
    report = look(tokenizer, tmp_path / "a.jsonl", {"prompt": "a"}, *long, limit=60)
    assert (report.duplicates.count, len(report.duplicates.examples)) == (49, 5)
    assert report.overlong.count == 50
    assert report.overlong.examples[0].startswith(f"{tmp_path}/a.jsonl line 2: 1")


def test_a_note_on_many_files_is_shown_once(tokenizer: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{number}.jsonl") for number in range(7)]
    for file in files:
        Path(file).write_text('{"question": "q"}\n')
    note = "the prompt is read from column 'question'."
    for count, notes in (
        (2, [f"0.jsonl: {note}", f"1.jsonl: {note}"]),
        (7, [f"0.jsonl and 6 more files: {note}"]),
    ):
        report = examine_files(files[:count], Renderer(tokenizer), max_prompt_length=100)
        assert list(report.notes) == notes


def test_json_names_every_bad_row(tokenizer: Any, tmp_path: Path) -> None:
    report = look(tokenizer, tmp_path / "a.jsonl", *(["no"] * 80), {"prompt": "ü"})
    assert (report.rows, report.usable, report.bad) == (81, 1, 80)
    shown = json.loads(report.to_json(None))
    assert len(shown["bad_rows"]) == 80
    problem = "not JSON (Expecting value at character 1)"
    last = {"file": f"{tmp_path}/a.jsonl", "line": 80, "column": "", "problem": problem}
    assert shown["bad_rows"][79] == last
    assert shown["sample"]["rendered"].startswith("<s><|im_start|>user\nü")
    report = look(tokenizer, tmp_path / "a.jsonl", "no", "nor this")
    assert (report.usable, report.bad) == (0, 2)
    assert (report.characters, report.tokens, report.sample) == (None, None, None)


@pytest.mark.parametrize(
    ("lengths", "median", "p99"), [([5], 5, 5), ([1, 2, 3], 2, 3), (list(range(1, 101)), 51, 100)]
)
def test_percentiles_are_lengths_that_occur(lengths: list[int], median: int, p99: int) -> None:
    values = compute_percentiles(lengths)
    assert values is not None
    assert (values["min"], values["p50"], values["p99"]) == (min(lengths), median, p99)
    assert set(values.values()) <= set(lengths)
