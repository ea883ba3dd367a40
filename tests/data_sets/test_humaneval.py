"""Preparing HumanEval: from its own file to rows that the rule `code` can test."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.prepare import HUMANEVAL_INSTRUCTION, prepare
from ppo_cli.data_sets.rows import load_rows
from ppo_cli.errors import DataError

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "humaneval"
ROW = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n):\n    """Return twice n."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder / "HumanEval.jsonl.gz", ROW, {**ROW, "task_id": "HumanEval/1"})
    return folder


def write(path: Path, *rows: dict[str, Any]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("where", [".", "HumanEval.jsonl.gz"])
def test_writes_verl_rows(where: str, source: Path, tmp_path: Path) -> None:
    files = prepare("humaneval", source=str(source / where), out=str(tmp_path / "out"))
    assert [(f.split, f.path.name, f.rows) for f in files] == [("test", "test.parquet", 2)]
    first, second = load_rows(str(files[0].path)).rows
    assert json.loads(first.ground_truth) == {
        key: ROW[key] for key in ("test", "entry_point", "prompt")
    }
    assert first.data_source == "openai_humaneval"
    assert second.extra_info == {"split": "test", "index": 1, "task_id": "HumanEval/1"}
    question = first.prompt[0]["content"]
    assert isinstance(question, str)
    assert question.startswith(HUMANEVAL_INSTRUCTION)
    assert question.endswith('```python\ndef twice(n):\n    """Return twice n."""\n```')
    assert "return 2" not in question


def test_bad_rows_are_told_and_nothing_is_written(source: Path, tmp_path: Path) -> None:
    bad = ({**ROW, "test": "assert True"}, {**ROW, "entry_point": ""}, {**ROW, "prompt": None})
    write(source / "HumanEval.jsonl.gz", ROW, *bad)
    with pytest.raises(DataError) as caught:
        prepare("humaneval", source=str(source), out=str(tmp_path / "out"))
    message = str(caught.value)
    assert "3 bad rows" in message
    assert "line 2, column test: has no function check(candidate)" in message
    assert "line 3, column entry_point: is missing" in message
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no HumanEval file"):
        prepare("humaneval", source=str(tmp_path), out=str(tmp_path / "out"))


@pytest.mark.skipif(not REAL.is_dir(), reason="the real HumanEval file is not at hand")
def test_the_real_set(tmp_path: Path) -> None:
    files = prepare("humaneval", source=str(REAL), out=str(tmp_path))
    rows = load_rows(str(files[0].path)).rows
    assert len(rows) == 164
    assert {row.data_source for row in rows} == {"openai_humaneval"}
