"""Folders of `Dataset.save_to_disk` and of `DatasetDict.save_to_disk`, made by the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.files import check_readable, count_rows
from ppo_cli.data_sets.row_sets import load_sets
from ppo_cli.data_sets.sources import is_hub_name, split_sources
from ppo_cli.errors import DataError
from ppo_cli.planning.resolve import resolve


def rows(count: int, first: int = 0) -> Any:
    from datasets import Dataset

    numbers = range(first, first + count)
    return Dataset.from_list([{"prompt": f"{n}?", "ground_truth": str(n)} for n in numbers])


@pytest.fixture
def splits(tmp_path: Path) -> str:
    from datasets import DatasetDict

    DatasetDict(train=rows(4), test=rows(2, 10)).save_to_disk(tmp_path / "both")
    return str(tmp_path / "both")


def test_shards_are_one_source_numbered_through(tmp_path: Path) -> None:
    rows(7).save_to_disk(tmp_path / "saved", num_shards=3)
    source = str(tmp_path / "saved")
    (row_set,) = load_sets([source])
    assert [row.prompt for row in row_set.rows] == [f"{n}?" for n in range(7)]
    assert [str(row.place) for row in row_set.rows][-1] == f"{source} row 7"
    assert (row_set.label, row_set.notes, count_rows(source)) == ("saved", (), 7)
    assert [row.prompt for row in load_sets([source], at_most=4)[0].rows][-1] == "3?"


def test_a_split_is_named_after_a_colon(splits: str) -> None:
    (row_set,) = load_sets([f"{splits}:test"])
    assert [row.prompt for row in row_set.rows] == ["10?", "11?"]
    assert not is_hub_name(f"{splits}:test")
    (row_set,) = load_sets([splits])
    assert [row.ground_truth for row in row_set.rows] == ["0", "1", "2", "3"]
    assert row_set.notes == (
        f"{splits}: split train of train, test; {splits}:SPLIT names another.",
    )
    assert split_sources(splits) == {"train": [f"{splits}:train"], "test": [f"{splits}:test"]}


def test_the_folder_of_the_data_gives_both_splits(splits: str) -> None:
    overrides = [f"data.path={splits}"]
    data = resolve(
        flags={}, preset="embedded", config_files=[], overrides=overrides, environ={}
    ).config.data
    assert data.train_files == (f"{splits}:train",)
    assert data.val_files == (f"{splits}:test",)


def test_a_folder_that_is_not_whole_is_told(splits: str, tmp_path: Path) -> None:
    rows(3).save_to_disk(tmp_path / "saved")
    for source, message in {
        f"{splits}:tset": "saved splits are train, test. Name one: .* Did you mean 'test'",
        f"{tmp_path}/saved:train": "was saved without splits. Name .*saved alone",
    }.items():
        with pytest.raises(DataError, match=message):
            check_readable(source)
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "elsewhere.arrow")
    with pytest.raises(DataError, match=r"data-00000-of-00001.arrow: no such file, .*whole"):
        check_readable(str(tmp_path / "saved"))
    state = tmp_path / "saved" / "state.json"
    for text in ("{", "[]", "{}", json.dumps({"_data_files": 3})):
        state.write_text(text)
        with pytest.raises(DataError, match=r"state.json: not what `save_to_disk` writes"):
            check_readable(str(tmp_path / "saved"))
