"""Rows with responses: read whole or refused by name, written back with nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ppo_cli.errors import DataError, UserError
from ppo_cli.scoring.rows import check_out, default_out, read_responses, write_rows

ROW: dict[str, Any] = {
    "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "gsm8k", "response": "#### 2",
}  # fmt: skip


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_row_becomes_a_rollout(tmp_path: Path) -> None:
    row = {**ROW, "extra_info": {"level": 3}}
    responses = read_responses(write(tmp_path / "a.jsonl", "", row))
    (answered,) = responses.rows
    rollout = answered.rollout
    assert rollout.text == "#### 2"
    assert rollout.key == ("a:2", 0)
    assert rollout.token_ids == () and rollout.sampler_logprobs.size == 0
    prompt = rollout.prompt
    assert (prompt.text, prompt.ground_truth, prompt.data_source) == ("1 + 1 = ?", "2", "gsm8k")
    assert prompt.messages == ({"role": "user", "content": "1 + 1 = ?"},)
    assert prompt.extra_info == {"level": 3}
    assert answered.record == row


def test_messages_and_nested_truth_from_parquet(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "reward_model": {"ground_truth": "Hello"},
        "response": "",
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([row]), path)
    (answered,) = read_responses(str(path)).rows
    assert answered.rollout.prompt.text == "Hi"
    assert len(answered.rollout.prompt.messages) == 2
    assert answered.rollout.prompt.ground_truth == "Hello"
    assert answered.rollout.text == "", "an empty response is a response"


@pytest.mark.parametrize(
    ("column", "hint"),
    [("responses", "Did you mean 'responses'?"), ("completion", "It may be 'completion'.")],
)
def test_no_response_column(tmp_path: Path, column: str, hint: str) -> None:
    row = {"prompt": "x", column: "y"}
    with pytest.raises(DataError, match="no column 'response'") as caught:
        read_responses(write(tmp_path / "a.jsonl", row))
    assert hint in str(caught.value)
    assert "--response_key" in str(caught.value)


def test_every_bad_row_is_named(tmp_path: Path) -> None:
    bad = [{**ROW, "response": 3}, {**ROW, "response": None}, {**ROW, "prompt": 5}, "{oops"]
    file = write(tmp_path / "a.jsonl", ROW, *bad)
    with pytest.raises(DataError) as caught:
        read_responses(file)
    text = str(caught.value)
    assert "4 bad rows" in text
    assert "line 2, column response: is a number, not text" in text
    assert "line 3, column response: is missing or null" in text
    assert "line 4, column prompt" in text
    assert "line 5: not JSON" in text


def test_other_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x"}, ROW)
    assert [r.text for r in read_responses(file, response_key=None).rollouts] == ["", "#### 2"]
    file = write(tmp_path / "a.jsonl", {"question": "x", "completion": "y", "score": 1})
    responses = read_responses(file, response_key="completion")
    assert responses.rollouts[0].text == "y"
    assert "the prompt is read from column 'question'" in responses.notes[0]
    assert responses.notes[1].endswith("new scores replace: score.")


def test_where_scores_go(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json.gz", "a.parquet"):
        (tmp_path / name).touch()
        assert default_out(str(tmp_path / name)) == tmp_path / "a.scored.jsonl"
    assert default_out("some/hub-set") == Path("hub-set.scored.jsonl")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", ROW)
    for out in (tmp_path, tmp_path / "nowhere" / "b.jsonl", tmp_path / "a.jsonl"):
        with pytest.raises(UserError, match="--out"):
            check_out(out, file)
    check_out(tmp_path / "b.jsonl", file)


def test_rows_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "b.jsonl"
    out.write_text("before\n")
    broken = [{"a": 1}, {"a": {1: object}, "loop": None}]
    broken[1]["loop"] = broken
    with pytest.raises((ValueError, RecursionError)):
        write_rows(out, broken)
    assert out.read_text() == "before\n"
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]
    write_rows(out, [{"t": "naïve ½", "half": "\ud800"}, {"t": 2}])
    first, second = out.read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == {"t": "naïve ½", "half": "\ud800"}
    assert json.loads(second) == {"t": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]


def test_rows_with_the_same_prompt_are_samples_of_one(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1 = ?"}]
    rows = [ROW, {**ROW, "prompt": "x"}, {**ROW, "prompt": messages, "ground_truth": "3"}]
    file = write(tmp_path / "a.jsonl", *rows)
    responses = read_responses(file)
    assert [r.key for r in responses.rollouts] == [("a:1", 0), ("a:2", 0), ("a:1", 1)]
    assert [r.prompt.ground_truth for r in responses.rollouts] == ["2", "2", "3"]
    tasks = read_responses(file, response_key=None)
    assert len({r.prompt.uid for r in tasks.rollouts}) == 3, "without responses each is a task"
