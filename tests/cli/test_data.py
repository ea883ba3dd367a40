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

GOOD = {"prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "sums"}


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["data", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_check_of_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "prompt": "2 + 2 = ?", "data_source": ""})
    code, out, _ = run(capsys, "check", file)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in ("usable 2", "bad 0", "sums 1", "(none) 1", "without ground truth 0"):
        assert line in lines
    assert "  | 1 + 1 = ?<|im_end|>" in out
    assert 'ground truth: "2"   data_source: sums' in out
    assert out.endswith("All 2 rows can be used.\n")


def test_check_says_what_training_would_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i}?", "ground_truth": "2"} for i in range(9)]
    file = write(tmp_path / "a.jsonl", *rows)
    _, out, _ = run(capsys, "check", file)
    assert "Tokens are counted with the bundled model" in out
    assert "There are 9 training rows: --batch_size is lowered to 8" in out
    assert "The prompts have no data_source, which chooses the rule." in out
    named_sources = write(
        tmp_path / "b.jsonl", *({**GOOD, "data_source": "gsm8k"} for _ in range(300))
    )
    _, out, _ = run(capsys, "check", named_sources, "--model", "embedded")
    for word in ("Tokens are counted", "fewer than a batch", "refuses these rows"):
        assert word not in out


def test_check_names_bad_rows_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, {"prompt": 3}, '{"prompt"', GOOD)
    code, out, _ = run(capsys, "check", file)
    assert code == 2
    assert f"  - {file} line 2, column prompt: is a number, not text" in out
    assert f"  - {file} line 3: not JSON (Expecting ':' delimiter at character 10)" in out
    assert f"{file} line 4 repeats {file} line 1" in out
    assert out.endswith("2 of 4 rows are bad; correct or remove them.\n")


def test_check_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, {"prompt": []}, {"prompt": "x<|im_end|>"})
    code, out, _ = run(capsys, "check", file, "--json")
    shown = json.loads(out)
    assert code == 2
    assert (shown["rows"], shown["usable"], shown["data_sources"]) == (3, 2, {"sums": 1, "": 1})
    assert shown["bad_rows"] == [
        {
            "file": file,
            "line": 2,
            "column": "prompt",
            "problem": "is an empty list of messages",
        }
    ]
    assert shown["missing_ground_truth"] == {"count": 1, "examples": [f"{file} line 3"]}
    assert shown["control_words"]["examples"] == [f"{file} line 3: <|im_end|>"]
    assert shown["tokens"]["max"] >= shown["tokens"]["min"] > 0


@pytest.mark.parametrize("flag", ["--max_prompt_length", "--max-prompt-length"])
def test_check_counts_overlong_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    file = write(tmp_path / "a.jsonl", GOOD, {**GOOD, "prompt": "why " * 50})
    code, out, _ = run(capsys, "check", file, flag, "40")
    assert code == 0
    assert "1 prompts exceed 40 tokens; training stops at them unless" in out


def test_check_takes_columns_and_system_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", {"task": "1 + 1 = ?", "kind": "sums"})
    flags = ["--prompt_key", "task", "--reward_fn_key", "kind", "--system_prompt", "Be brief."]
    code, out, _ = run(capsys, "check", file, *flags)
    assert code == 0
    assert "  | Be brief.<|im_end|>" in out
    assert "data_source: sums" in out


def test_check_of_raw_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", write(tmp_path / "a.jsonl", GOOD), "--raw", "--json")
    assert code == 0
    assert json.loads(out)["sample"]["rendered"] == "1 + 1 = ?"


def test_check_of_the_embedded_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "embedded", "--json")
    shown = json.loads(out)
    assert code == 0
    assert shown["bad_rows"] == []
    assert shown["missing_ground_truth"]["count"] == 0
    assert shown["control_words"]["count"] == 0


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
