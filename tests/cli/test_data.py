"""`ppo data check` and `ppo data prepare`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ppo_cli.cli.app import main
from ppo_cli.cli.data import Finding, Report, list_remarks, print_report
from ppo_cli.data_sets.files import Place, RowProblem
from ppo_cli.data_sets.rows import load_rows


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["data", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_prepare_and_refusal_and_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", {"question": "1+1?", "answer": "#### 2"})
    out = tmp_path / "out"
    args = ["prepare", "gsm8k", "--source", str(tmp_path), "--out", str(out)]
    code, output, _ = run(capsys, *args)
    assert code == 0
    assert output.splitlines() == [
        f"{out}/train.parquet: 1 rows",
        f"{out}/test.parquet: 1 rows",
        f"Next: ppo train --train_files {out}/train.parquet --val_files {out}/test.parquet",
    ]
    code, _, err = run(capsys, *args)
    assert code == 2
    assert "already holds train.parquet and test.parquet. Add --force" in err
    code, output, _ = run(capsys, *args, "--force", "--json")
    assert (code, [file["rows"] for file in json.loads(output)]) == (0, [1, 1])
    assert load_rows(str(out / "test.parquet")).rows[0].ground_truth == "2"
    assert parquet.read_table(out / "test.parquet").num_rows == 1


def report(**changed: Any) -> Report:
    none = Finding(0, ())
    empty = {
        "files": ("a.jsonl",), "rows": 80, "usable": 0, "bad_rows": (), "data_sources": {},
        "missing_ground_truth": none, "duplicates": none, "characters": None, "tokens": None,
        "max_prompt_length": 9, "overlong": none, "control_words": none, "unused_columns": (),
        "notes": (), "sample": None,
    }  # fmt: skip
    return Report(**{**empty, **changed})


def test_very_many_bad_rows_and_sources_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    bad = tuple(RowProblem(Place("a.jsonl", i, "line"), "prompt", "is empty") for i in range(80))
    sources = {f"s{i}": 100 - i for i in range(30)}
    print_report(report(bad_rows=bad, data_sources=sources), "m", [])
    out = capsys.readouterr().out
    assert "a.jsonl line 0, column prompt: is empty (also line 1, 2, " in out
    assert ", 48, 49 and 30 more)" in out
    assert f"10 more  {sum(range(71, 81))}" in out


def test_remarks_keep_to_a_few_examples() -> None:
    lines = list_remarks(report(duplicates=Finding(7, ("b", "c")), unused_columns=("x", "y")))
    assert lines == ["7 prompts are repeated: b; c, …", "Columns that are not read: x, y."]
