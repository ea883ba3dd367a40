"""Preparing GSM8K: from its own files to verl's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from ppo_cli.data_sets.files import SETS
from ppo_cli.data_sets.prepare import GSM8K_INSTRUCTION, RECIPES, final_answer, prepare
from ppo_cli.data_sets.rows import load_rows
from ppo_cli.errors import DataError

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {"question": f"{split} {i}?", "answer": f"So it is {i}.\n#### {i},000"} for i in (1, 2)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_verl_rows(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    files = prepare("gsm8k", source=str(source), out=str(out))
    assert [(f.split, f.path, f.rows) for f in files] == [
        ("train", out / "train.parquet", 2),
        ("test", out / "test.parquet", 2),
    ]
    assert names(out) == ["test.parquet", "train.parquet"]
    assert parquet.read_table(out / "test.parquet").to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"test 2?\n\n{GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {
            "split": "test",
            "index": 1,
            "question": "test 2?",
            "answer": "So it is 2.\n#### 2,000",
        },
    }
    row_set = load_rows(str(out / "train.parquet"))
    assert [row.ground_truth for row in row_set.rows] == ["1000", "2000"]
    assert (row_set.problems, row_set.notes, row_set.columns.unused) == ((), (), ())


def test_a_missing_folder_is_told_by_the_names_of_the_recipes() -> None:
    assert sorted(RECIPES) == list(SETS)


def test_shards_are_joined_in_order(source: Path, tmp_path: Path) -> None:
    prepare("gsm8k", source=str(source), out=str(tmp_path / "first"))
    clone = tmp_path / "clone" / "main"
    clone.mkdir(parents=True)
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    for shard, row in enumerate(rows):
        (clone / f"train-0000{shard}-of-00002.jsonl").write_text(json.dumps(row))
    (clone / "test.jsonl").write_bytes((source / "test.jsonl").read_bytes())
    prepare("gsm8k", source=str(clone.parent), out=str(tmp_path / "second"))
    first, second = (
        parquet.read_table(tmp_path / name / "train.parquet") for name in ("first", "second")
    )
    assert first.equals(second)


def test_files_that_are_there_stay_without_force(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "test.parquet").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"already holds test\.parquet\. Add --force"):
        prepare("gsm8k", source=str(source), out=str(out))
    assert names(out) == ["test.parquet"]
    prepare("gsm8k", source=str(source), out=str(out), force=True)
    assert len(load_rows(str(out / "test.parquet")).rows) == 2


def test_nothing_is_left_when_writing_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = parquet.write_table

    def full_disk(table: object, path: Path) -> None:
        write(table, path)
        if "test" in path.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "write_table", full_disk)
    with pytest.raises(DataError, match="No space left on device"):
        prepare("gsm8k", source=str(source), out=str(tmp_path / "out"))
    assert names(tmp_path / "out") == []


def test_bad_rows_are_told_together_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    with (source / "train.jsonl").open("a") as file:
        file.write('{"question": "q", "answer": "no mark"}\n{"answer": "#### 1"}\nno\n')
        file.write('{"question": "q \\ud800", "answer": "#### 1"}\n')
    with pytest.raises(DataError) as caught:
        prepare("gsm8k", source=str(source), out=str(tmp_path / "out"))
    message = str(caught.value)
    assert "4 bad rows" in message
    assert "train.jsonl line 6, column question: holds \\ud800, half of a surrogate pair" in message
    assert "train.jsonl line 3, column answer: has no final '#### NUMBER'" in message
    assert "train.jsonl line 4, column question: is missing" in message
    assert "train.jsonl line 5: not JSON" in message
    assert not (tmp_path / "out").exists()


def test_wrong_places_are_told(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"out: cannot be written \(Not a directory\)"):
        prepare("gsm8k", source=str(source), out=str(source / "train.jsonl" / "out"))
    with pytest.raises(DataError, match=r"'gsm-8k'\. Did you mean 'gsm8k'\? Known: gsm8k"):
        prepare("gsm-8k", out="out")
    (source / "test.jsonl").unlink()
    with pytest.raises(DataError, match="holds no 'test' split"):
        prepare("gsm8k", source=str(source), out=str(tmp_path / "out"))
    with pytest.raises(DataError, match="takes the folder of both splits"):
        prepare("gsm8k", source=str(source / "train.jsonl"), out=str(tmp_path / "out"))
    with pytest.raises(DataError, match="is a file; name a folder"):
        prepare("gsm8k", source=str(source), out=str(source / "train.jsonl"))
    with pytest.raises(DataError, match="did not load"):
        prepare("gsm8k", source=str(tmp_path.name), out=str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("answer", "final"),
    [
        ("so\n#### 18", "18"),
        ("#### 1,234 ", "1234"),
        ("#### -3.5", "-3.5"),
        ("a #### 1\n#### 2", "2"),
        ("none", ""),
        ("####", ""),
    ],
)
def test_final_answer(answer: str, final: str) -> None:
    assert final_answer(answer) == final


@pytest.mark.skipif(not REAL.is_dir(), reason="the real GSM8K files are not at hand")
def test_the_real_set(tmp_path: Path) -> None:
    files = prepare("gsm8k", source=str(REAL), out=str(tmp_path))
    assert [f.rows for f in files] == [7473, 1319]
    row_set = load_rows(str(tmp_path / "test.parquet"))
    assert (len(row_set.rows), row_set.problems) == (1319, ())
    assert all(row.ground_truth.lstrip("-").replace(".", "").isdigit() for row in row_set.rows)
