"""Rows with responses: read whole, written back with nothing lost; labels as people write them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ppo_cli.errors import DataError
from ppo_cli.records import Score, Scored
from ppo_cli.report.tracker import make_rollout_line
from ppo_cli.scoring import rows as reader
from tests.rewards.scoring import sum_episode

ROW: dict[str, Any] = {
    "prompt": "1 + 1 = ?", "ground_truth": "2", "data_source": "gsm8k", "response": "#### 2",
}  # fmt: skip


def write(path: Path, *rows: object) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_row_becomes_a_rollout(tmp_path: Path) -> None:
    row = {**ROW, "extra_info": {"level": 3}}
    (answered,) = reader.read_responses(write(tmp_path / "a.jsonl", "", row)).rows
    rollout, prompt = answered.rollout, answered.rollout.prompt
    assert (rollout.text, rollout.key, rollout.token_ids) == ("#### 2", ("a:2", 0), ())
    assert rollout.sampler_logprobs.size == 0
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
    (rollout,) = reader.read_responses(str(path)).rollouts
    assert (rollout.prompt.text, rollout.prompt.ground_truth) == ("Hi", "Hello")
    assert len(rollout.prompt.messages) == 2
    assert rollout.text == "", "an empty response is a response"


def test_other_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x"}, ROW)
    assert [r.text for r in reader.read_responses(file, response_key=None).rollouts] == [
        "",
        "#### 2",
    ]
    file = write(tmp_path / "a.jsonl", {"question": "x", "completion": "y", "score": 1})
    responses = reader.read_responses(file, response_key="completion")
    assert responses.rollouts[0].text == "y"
    assert "the prompt is read from column 'question'" in responses.notes[0]
    assert responses.notes[1].endswith("new scores replace: score.")


@pytest.mark.parametrize(
    ("fields", "labels", "truth"),
    [
        ({"label": 1}, None, None),
        ({"metadata": {"label": 1}}, None, None),
        ({"label": 1, "answer": "2"}, None, "2"),
        ({"target": 0.5, "answer": "2"}, "target", "2"),
        ({"label": 1, "ground_truth": "2"}, None, "2"),
    ],
)
def test_a_label_beside_a_response_is_no_ground_truth(
    tmp_path: Path, fields: dict[str, Any], labels: str | None, truth: str | None
) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x", "response": "y"} | fields)
    (rollout,) = reader.read_responses(file, labels=labels).rollouts
    assert rollout.prompt.ground_truth == truth
    # A key of the training files matters only where it may be the ground truth.
    if "ground_truth" in fields:
        (same,) = reader.read_responses(file, answer_key="gold").rollouts
        assert same.prompt.ground_truth == truth
    bare = write(tmp_path / "b.jsonl", {"prompt": "x", "label": 1})
    assert reader.read_responses(bare, response_key=None).rollouts[0].prompt.ground_truth == 1


def test_a_conversation_and_a_line_of_a_run_are_episodes(tmp_path: Path) -> None:
    episode = sum_episode(1, thought="Hm.")
    line = make_rollout_line(3, Scored(episode, Score(1.0)))
    rows: list[dict[str, Any]] = [line, {"messages": episode.messages}]
    for row in rows:
        responses = reader.read_responses(write(tmp_path / "a.jsonl", row))
        (rollout,) = responses.rollouts
        assert rollout.prompt.ground_truth is None or "ground_truth" in row
        assert not any("content" in note for note in responses.notes)
        assert rollout.messages == episode.messages
        assert (rollout.prompt.text, rollout.text) == ("What is 1 + 1?", "It is 2.")
    (rollout,) = reader.read_responses(write(tmp_path / "a.jsonl", line)).rollouts
    first, last = rollout.turns
    assert (first.rewards, first.seconds, first.tools) == ({"form": 0.25}, 0.5, (("add", 0.5),))
    assert not (first.cut or first.error or last.rewards or last.replies)
    # A conversation that waits for its answer is a prompt.
    row = {"messages": [*episode.messages, {"role": "user", "content": "And?"}], "response": "3"}
    (asked,) = reader.read_responses(write(tmp_path / "a.jsonl", row)).rollouts
    assert not asked.turns and asked.prompt.text == "And?"
    broken = {**line, "turns": [{"message": {"role": "judge", "content": "10"}}]}
    with pytest.raises(DataError, match=r"turns\[0\]\[0\]: is not a message with a role"):
        reader.read_responses(write(tmp_path / "a.jsonl", broken))


def test_where_scores_go(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json.gz", "a.parquet"):
        (tmp_path / name).touch()
        assert reader.default_out(str(tmp_path / name)) == tmp_path / "a.scored.jsonl"
    assert reader.default_out("some/hub-set") == Path("hub-set.scored.jsonl")


def test_rows_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "b.jsonl"
    out.write_text("before\n")
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises((ValueError, RecursionError)):
        reader.write_rows(out, [{"a": 1}, loop])
    assert out.read_text() == "before\n"
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]
    rows = [{"t": "naïve ½", "half": "\ud800"}, {"t": 2}]
    reader.write_rows(out, rows)
    assert [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] == rows
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]


def test_rows_with_the_same_prompt_are_samples_of_one(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1 + 1 = ?"}]
    rows = [ROW, {**ROW, "prompt": "x"}, {**ROW, "prompt": messages, "ground_truth": "3"}]
    file = write(tmp_path / "a.jsonl", *rows)
    responses = reader.read_responses(file)
    assert [r.key for r in responses.rollouts] == [("a:1", 0), ("a:2", 0), ("a:1", 1)]
    assert [r.prompt.ground_truth for r in responses.rollouts] == ["2", "2", "3"]
    tasks = reader.read_responses(file, response_key=None)
    assert len({r.prompt.uid for r in tasks.rollouts}) == 3, "without responses each is a task"


def labelled(tmp_path: Path, cells: list[Any], positive: str | None = None) -> reader.LabelledRows:
    rows = [{"prompt": "x", "response": "y", "label": cell} for cell in cells]
    responses = reader.read_responses(write(tmp_path / "a.jsonl", *rows))
    return reader.read_labels(responses, "label", positive)


def good_rows(labels: reader.LabelledRows) -> list[bool]:
    assert labels.positive is not None
    return list(labels.positive.tolist())


@pytest.mark.parametrize(
    ("cells", "good"),
    [
        ([True, False, True], [True, False, True]),
        ([0, 1, 1], [False, True, True]),
        ([-1, 1, -1], [False, True, False]),
        (["yes", "No", " YES "], [True, False, True]),
        (["bad", "good"], [False, True]),
        (["rejected", "chosen"], [False, True]),
        (["1", "0"], [True, False]),
        (["false", "true"], [False, True]),
    ],
)
def test_two_classes(tmp_path: Path, cells: list[Any], good: list[bool]) -> None:
    assert good_rows(labelled(tmp_path, cells)) == good


def test_graded_numbers(tmp_path: Path) -> None:
    labels = labelled(tmp_path, [1, 2.5, 4])
    assert labels.positive is None
    assert labels.values.tolist() == [1.0, 2.5, 4.0]
    assert labels.description == "3 levels from 1 to 4"


def test_named_positive_makes_all_others_bad(tmp_path: Path) -> None:
    labels = labelled(tmp_path, ["A", "b", "c", "a"], positive="a")
    assert good_rows(labels) == [True, False, False, True]
    assert labels.description == "'a' is good (2 of 4)"
    assert good_rows(labelled(tmp_path, [0, 1, 0], positive="0")) == [True, False, True]


def test_rows_without_a_label_are_left_out(tmp_path: Path) -> None:
    labels = labelled(tmp_path, [1, None, 0])
    assert len(labels.rows) == 2
    assert labels.notes == ("1 row without a label left out.",)


def test_labelled_responses_are_thinned_evenly(tmp_path: Path) -> None:
    def held_out(rows: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
        result = reader.read_held_out(write(tmp_path / "a.jsonl", *rows))
        return [int(row.prompt.text[1:]) for row, _ in result], [label for _, label in result]

    rows: list[dict[str, Any]] = [
        {"prompt": f"p{n}", "response": "y", "label": "yes" if n % 3 else "no"} for n in range(100)
    ]
    numbers, labels = held_out(rows)
    assert len(numbers) == 32 and numbers[0] == 0 and numbers[-1] == 96
    assert {b - a for a, b in pairwise(numbers)} == {3, 4}
    assert labels == [float(n % 3 > 0) for n in numbers]
    levels = [row | {"label": 5 + 3 * (n % 2)} for n, row in enumerate(rows[:8])]
    assert held_out(levels)[1] == [5.0, 8.0] * 4
    assert len(held_out(rows[:8])[0]) == 8
    with pytest.raises(DataError, match="7 different labelled responses; at least 8"):
        held_out(rows[:7] * 2)  # a reading counts each once
    with pytest.raises(DataError, match="no column 'label'"):
        held_out([{"prompt": "a", "response": "b"}] * 8)
