"""Flat rows, verl rows, columns under other names, and rows that are wrong."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ppo_cli.data_sets.files import SHOWN, Place, RowProblem, raise_problems
from ppo_cli.data_sets.row_sets import RowSet, load_rows
from ppo_cli.data_sets.rows import NotUtf8Error, Row, as_plain, question_of
from ppo_cli.errors import DataError
from tests.data_sets.lines import write_rows
from tests.rewards.tables import table

ASK = [{"role": "user", "content": "1+1?"}]


def read(tmp_path: Path, *rows: dict[str, Any], **keys: str) -> RowSet:
    return load_rows(write_rows(tmp_path / "a.jsonl", *rows), **keys)


def only(tmp_path: Path, row: dict[str, Any]) -> Row:
    row_set = read(tmp_path, row)
    assert row_set.problems == ()
    (only_row,) = row_set.rows
    return only_row


def test_flat_and_verl_rows(tmp_path: Path) -> None:
    extra = {"i": 1}
    flat = {"prompt": "1+1?", "ground_truth": "2", "data_source": "sums", "extra_info": extra}
    row = only(tmp_path, flat)
    assert (row.prompt, row.ground_truth, row.data_source) == ("1+1?", "2", "sums")
    assert (row.extra_info, row.place.number) == (extra, 1)
    bare = only(tmp_path, {"prompt": "a"})
    assert (bare.ground_truth, bare.data_source, bare.extra_info) == (None, "", {})
    model = {"style": "rule", "ground_truth": "2"}
    verl = {"prompt": ASK, "reward_model": model, "data_source": "gsm8k", "extra_info": None}
    row = only(tmp_path, verl)
    assert row.prompt == tuple(ASK)
    assert (row.ground_truth, row.data_source, row.extra_info) == ("2", "gsm8k", {})


def test_where_the_ground_truth_is_read(tmp_path: Path) -> None:
    for truth in (0, 2, 1.5, False, "", ["a", "b"], {"a": 1}):
        assert only(tmp_path, {"prompt": "a", "ground_truth": truth}).ground_truth == truth
    for model in ({"style": "rule"}, {"ground_truth": None}, {"ground_truth": "2"}):
        row = {"prompt": "a", "ground_truth": "2", "reward_model": model}
        assert only(tmp_path, row).ground_truth == "2"
    row_set = read(tmp_path, {"prompt": "p", "ground_truth": None, "answer": "2"})
    assert (row_set.rows[0].ground_truth, row_set.columns.unused) == (None, ("answer",))


def test_the_tests_of_a_code_row_join_its_extra_info(tmp_path: Path) -> None:
    row = {"prompt": "a", "test_list": ["assert f(1)"], "test_setup_code": "", "other": 1}
    row_set = read(tmp_path, row, {**row, "extra_info": {"test_list": ["assert f(2)"]}})
    tests = [row.extra_info for row in row_set.rows]
    assert tests == [{"test_list": ["assert f(1)"]}, {"test_list": ["assert f(2)"]}]
    assert row_set.columns.unused == ("other",)


def test_verl_parquet_row(tmp_path: Path) -> None:
    extra = {
        "when": datetime.date(2024, 5, 1), "price": decimal.Decimal("1.50"), "blob": b"ab",
        "nested": [{"n": 1}],
    }  # fmt: skip
    rows = [
        {
            "prompt": [{"role": "user", "content": content, "tool_calls": calls}],
            "reward_model": {"style": "rule", "ground_truth": truths}, "extra_info": info,
        }
        for content, calls, truths, info in (
            ("a", None, ["x", "y"], extra), ("b", "t", ["z"], None),
        )
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    row = load_rows(str(tmp_path / "a.parquet")).rows[0]
    assert row.prompt == ({"role": "user", "content": "a"},)
    assert row.ground_truth == ["x", "y"]
    plain = {"when": "2024-05-01", "price": "1.50", "blob": "ab", "nested": [{"n": 1}]}
    assert row.extra_info == plain
    assert json.dumps(row.extra_info)


def test_columns_of_known_shapes_are_found_and_told(tmp_path: Path) -> None:
    for row, keys, prompt, truth_column, truth in table(__file__, "shape"):
        row_set = read(tmp_path, row, **keys)
        columns = (row_set.columns.prompt, row_set.columns.ground_truth)
        assert (*columns, row_set.rows[0].ground_truth) == (prompt, truth_column, truth), row
        assert question_of(row_set.rows[0].prompt) == "q"
        notes = " ".join(row_set.notes)
        for column, usual in (
            (prompt, keys.get("prompt_key", "prompt")),
            (truth_column, "ground_truth"),
        ):
            assert (f"from column '{column}'" in notes) == (column != usual), row
        if truth is None:
            others = {"prompt", "question", "ground_truth", "test", "answering"}
            assert set(row_set.columns.answers) == row.keys() - others


@pytest.mark.parametrize(("row", "keys", "message"), table(__file__, "missing column"))
def test_a_missing_column_names_those_that_are_there(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, **keys)
    assert f"{tmp_path}/a.jsonl: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(("row", "message"), table(__file__, "wrong"))
def test_a_wrong_row_is_named_with_its_column(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    row_set = read(tmp_path, {"prompt": "fine", "data_source": "s"}, row)
    assert len(row_set.rows) == 1
    assert str(row_set.problems[0]).startswith(f"{tmp_path}/a.jsonl line 2, column ")
    assert message in str(row_set.problems[0])


def test_text_that_only_looks_like_json_is_a_prompt_and_parts_are_joined(tmp_path: Path) -> None:
    for text in ("[{not json", '[{"a": 1}] is what?', '[{"a": 1}]'):
        assert only(tmp_path, {"prompt": text}).prompt == text
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    row = only(tmp_path, {"prompt": [{"role": "user", "content": parts}]})
    assert row.prompt == tuple(ASK)


def test_problems_of_parsing_and_of_columns_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": 1}\nno\n{"prompt": "a"}\n{"prompt": ""}\n')
    row_set = load_rows(str(tmp_path / "a.jsonl"))
    assert [p.place.number for p in row_set.problems] == [1, 2, 4]


def test_an_empty_name_is_told() -> None:
    with pytest.raises(DataError, match="An empty name"):
        load_rows(" ")


def test_values_of_any_kind_become_plain() -> None:
    values = {
        1: np.float32(0.5), "array": np.array([[1, 2]]), "pair": (np.int64(3), None),
        "span": datetime.timedelta(minutes=2), "day": datetime.date(2026, 1, 2),
        "time": datetime.time(3, 4), "price": decimal.Decimal("1.50"), "bytes": b"a\xc3\xbc",
        "flag": True,
    }  # fmt: skip
    plain = {
        "1": 0.5, "array": [[1, 2]], "pair": [3, None], "span": 120.0, "day": "2026-01-02",
        "time": "03:04:00", "price": "1.50", "bytes": "aü", "flag": True,
    }  # fmt: skip
    for strict in (False, True):
        assert as_plain(values, strict=strict) == plain
        assert json.loads(json.dumps(as_plain(values, strict=strict))) == plain
    for inside in (lambda x: x, lambda x: [x], lambda x: {"a": (x,)}, lambda x: np.array([x])):
        with pytest.raises(NotUtf8Error, match=r"byte 0xff|\\ud800"):
            as_plain(inside(b"a\xff"), strict=True)
        with pytest.raises(NotUtf8Error, match=r"\\ud800, half of a surrogate"):
            as_plain(inside("a\ud800"), strict=True)
    assert as_plain([b"a\xff"]) == ["a\\xff"]


def test_the_question_is_the_last_thing_that_the_user_said() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert question_of(tuple({"role": r, "content": c} for r, c in turns)) == "c"
    assert question_of("plain") == "plain"


def test_the_first_bad_rows_are_named_and_the_others_counted() -> None:
    raise_problems([])
    for count in (1, 2, SHOWN, SHOWN + 1, SHOWN + 3):
        problems = [RowProblem(Place("a b.jsonl", n), f"x{n}", "is bad") for n in range(count)]
        with pytest.raises(DataError) as caught:
            raise_problems(problems)
        message = str(caught.value).splitlines()
        shown = sum("is bad" in line for line in message)
        assert shown == min(count, SHOWN)
        assert (f"{count} bad rows:" in message) == (count > 1)
        assert [line for line in message if "more" in line] == (
            [f"… and {count - SHOWN} more."] if count > SHOWN else []
        )
        assert message[-1].count("'a b.jsonl'") == 1


@pytest.mark.parametrize(("row", "column"), table(__file__, "media"))
def test_a_row_with_content_that_is_not_text_is_refused(
    tmp_path: Path, row: dict[str, Any], column: str
) -> None:
    row_set = read(tmp_path, {"prompt": "fine"}, {"prompt": "a"} | row)
    assert len(row_set.rows) == 1
    assert str(row_set.problems[0]).startswith(f"{tmp_path}/a.jsonl line 2, column {column}")
    assert "only text is read. Remove the row, or " in row_set.problems[0].message


def test_empty_media_columns_flags_and_markup_are_no_content(tmp_path: Path) -> None:
    for row in table(__file__, "no media"):
        only(tmp_path, {"prompt": "a"} | row)


def test_rows_with_the_same_fault_are_one_line() -> None:
    problems = [RowProblem(Place("a.jsonl", n), "x", "is bad") for n in range(1, 9)]
    problems.insert(3, RowProblem(Place("a.jsonl", 9), "y", "is worse"))
    with pytest.raises(DataError) as caught:
        raise_problems(problems, ["--model", "m"])
    assert str(caught.value).splitlines() == [
        "9 bad rows:",
        "a.jsonl row 1, column x: is bad (also row 2, 3, 4, 5 and 3 more)",
        "a.jsonl row 9, column y: is worse",
        "Correct or remove them; `ppo data check a.jsonl --model m` names them all.",
    ]


def test_nan_is_no_ground_truth(tmp_path: Path) -> None:
    nan = float("nan")
    row_set = read(
        tmp_path,
        {"prompt": "a", "ground_truth": nan},
        {"prompt": "b", "reward_model": {"ground_truth": nan}},
        {"prompt": "c", "ground_truth": "1", "reward_model": {"ground_truth": nan}},
    )
    assert [row.ground_truth for row in row_set.rows] == [None, None, "1"]
    assert "2 of 3 rows" in "".join(row_set.notes)


def test_columns_that_belong_to_the_question_are_told(tmp_path: Path) -> None:
    row = {"prompt": "a", "tools": "[{}]", "system": "Be brief.", "choices": [], "level": "2"}
    (note,) = read(tmp_path, row).notes
    assert "'tools', 'system'" in note and "choices" not in note and "level" not in note


@pytest.mark.parametrize(
    "text",
    [
        "[{'role': 'user', 'content': '1+1?'}]",
        "{'role': 'user', 'content': '1+1?'}",
        "[{'content': 'Be brief.', 'role': 'system'}\n {'content': '1+1?', 'role': 'user'}]",
        "array([{'role': 'user', 'content': '1+1?'}], dtype=object)",
    ],
)
def test_messages_printed_by_python_are_refused(tmp_path: Path, text: str) -> None:
    (problem,) = read(tmp_path, {"prompt": text}).problems
    assert "is a message list written as text" in problem.message


def test_a_row_nested_too_deep_is_refused(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(500):
        value = [value]
    (problem,) = read(tmp_path, {"prompt": "a", "extra_info": {"a": value}}).problems
    assert problem.column == "extra_info"
