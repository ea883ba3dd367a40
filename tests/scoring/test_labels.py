"""Labels in the forms that people write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import DataError
from ppo_cli.scoring.rows import LabelledRows, read_held_out, read_labels, read_responses


def labelled(tmp_path: Path, cells: Sequence[Any], positive: str | None = None) -> LabelledRows:
    rows = [{"prompt": "x", "response": "y", "label": cell} for cell in cells]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_labels(read_responses(str(path)), "label", positive)


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
    labels = labelled(tmp_path, cells)
    assert labels.positive is not None
    assert labels.positive.tolist() == good


def test_graded_numbers(tmp_path: Path) -> None:
    labels = labelled(tmp_path, [1, 2.5, 4])
    assert labels.positive is None
    assert labels.values.tolist() == [1.0, 2.5, 4.0]
    assert labels.description == "3 levels from 1 to 4"


def test_named_positive_makes_all_others_bad(tmp_path: Path) -> None:
    labels = labelled(tmp_path, ["A", "b", "c", "a"], positive="a")
    assert labels.positive is not None
    assert labels.positive.tolist() == [True, False, False, True]
    assert labels.description == "'a' is good (2 of 4)"
    labels = labelled(tmp_path, [0, 1, 0], positive="0")
    assert labels.positive is not None and labels.positive.tolist() == [True, False, True]
    with pytest.raises(DataError, match="Did you mean 'label'"):
        read_labels(read_responses(str(tmp_path / "a.jsonl")), "labl")


def test_rows_without_a_label_are_left_out(tmp_path: Path) -> None:
    labels = labelled(tmp_path, [1, None, 0])
    assert len(labels.rows) == 2
    assert labels.notes == ("1 rows have no label and are left out.",)


@pytest.mark.parametrize(
    ("cells", "positive", "message"),
    [
        (["up", "down"], None, "name the good one with --positive"),
        (["good", "yes"], None, "with --positive VALUE"),
        (["a", "b", "c"], None, "3 different words: a, b, c"),
        (["good", "bad"], "god", "Did you mean 'good'?"),
        ([1, [2]], None, "line 2, column label: is a list"),
        ([float("nan"), 1], None, "line 1, column label: is NaN or infinite"),
        ([None, None], None, "is empty"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, cells: list[Any], positive: str | None, message: str
) -> None:
    with pytest.raises(DataError) as error:
        labelled(tmp_path, cells, positive)
    assert message in str(error.value)


def test_labelled_responses_are_thinned_evenly(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "response": "y", "label": "yes" if n % 3 else "no"}
            for n in range(100)]  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = read_held_out(str(path))
    numbers = [int(row.prompt.text[1:]) for row, _ in result]
    assert len(result) == 32 and numbers[0] == 0 and numbers[-1] == 96
    assert {b - a for a, b in pairwise(numbers)} == {3, 4}
    assert [label for _, label in result] == [float(n % 3 > 0) for n in numbers]
    two = [row | {"label": 5 + 3 * (n % 2)} for n, row in enumerate(rows[:8])]
    path.write_text("\n".join(map(json.dumps, two)))
    assert [label for _, label in read_held_out(str(path))] == [5.0, 8.0] * 4
    path.write_text("\n".join(map(json.dumps, rows[:8])))
    assert len(read_held_out(str(path))) == 8
    path.write_text("\n".join(map(json.dumps, rows[:7] * 2)))  # a reading counts each once
    with pytest.raises(DataError, match="7 different labelled responses; at least 8"):
        read_held_out(str(path))
    path.write_text("\n".join(json.dumps({"prompt": "a", "response": "b"}) for _ in rows))
    with pytest.raises(DataError, match="no column 'label'"):
        read_held_out(str(path))
