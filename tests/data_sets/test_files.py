"""Files of every kind, whole and broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ppo_cli.data_sets.files import count_rows, read_file
from ppo_cli.data_sets.row_sets import load_sets
from ppo_cli.data_sets.sources import read_source
from ppo_cli.errors import DataError

ROWS = [{"prompt": "Grüße, 世界 🙂\u2028second"}, {"prompt": "b"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


BOM = b"\xef\xbb\xbf"


def refusal(path: Path | str) -> str:
    with pytest.raises(DataError) as caught:
        read_file(str(path))
    return str(caught.value)


TEXT = json.dumps(ROWS).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES), ("a.ndjson", LINES), ("a.JSONL", LINES), ("a.jsonl", BOM + LINES),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n")), ("a.jsonl", LINES.rstrip()),
        ("a.jsonl", TEXT), ("a.json", LINES), ("a.json", TEXT), ("a.json", BOM + TEXT),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json", json.dumps({"data": ROWS}).encode()),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)), ("a.json.gz", gzip.compress(TEXT, mtime=0)),
    ],
)  # fmt: skip
def test_text_files_of_every_kind(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    records = read_file(str(tmp_path / name))
    assert [record for _, record in records.records] == ROWS
    assert (records.problems, records.label) == ((), "a")


def test_lines_keep_their_numbers_over_blank_ones(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"prompt": "a"}\n   \n{"prompt": "b"}\n')
    records = read_file(str(tmp_path / "a.jsonl"))
    places = [str(place) for place, _ in records.records]
    assert places == [f"{tmp_path}/a.jsonl line 2", f"{tmp_path}/a.jsonl line 4"]
    (tmp_path / "a.json").write_text('[{"prompt": "a"}, "b"]')
    records = read_file(str(tmp_path / "a.json"))
    assert [str(place) for place, _ in records.records] == [f"{tmp_path}/a.json row 1"]
    message = 'the row is text, not an object such as {"prompt": …}'
    assert [str(p) for p in records.problems] == [f"{tmp_path}/a.json row 2: {message}"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "not JSON (Expecting ',' delimiter at character 15)"),
        (b"hello", "not JSON"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 (byte 0xe9)"),
        (b'["a"]', "the row is a list, not an object"),
        (b'"a"', "the row is text, not an object"),
        (b"7", "the row is a number, not an object"),
        (b"null", "the row is null, not an object"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(
    tmp_path: Path, line: bytes, message: str
) -> None:
    good = b'{"prompt": "a"}\n'
    (tmp_path / "a.jsonl").write_bytes(good * 6 + line + b"\n" + good)
    records = read_file(str(tmp_path / "a.jsonl"))
    (problem,) = map(str, records.problems)
    assert len(records.records) == 7
    assert problem.startswith(f"{tmp_path}/a.jsonl line 7: ") and message in problem


@pytest.mark.parametrize(
    ("name", "data", "fragment"),
    [
        ("a.jsonl", b"", "is empty"), ("a.jsonl", b" \n\n", "is empty"),
        ("a.jsonl", BOM, "is empty"), ("a.json", b"3", "holds a number, not a list of rows"),
        ("a.json", b"[]", "holds no rows"), ("a.json", b'{"data": []}', "holds no rows"),
        ("a.json", b'{"rows": [1], "n": 2}', "one JSON object (keys: 'rows', 'n'), not rows"),
        ("a.json", b'[{"prompt": "a"},\n oops]', "line 2 column 2: not JSON"),
        ("a.json", b'[\n"caf\xe9"]', "line 2: not UTF-8"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16. Save it as UTF-8"),
        ("a.jsonl.gz", b"plain", "broken gzip data"),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], "broken gzip data"),
        ("a.csv", b"prompt\na\n", "files of this kind (.csv) are not read"),
        ("a", b"{}", "files of this kind (no suffix) are not read"),
    ],
)  # fmt: skip
def test_a_broken_file_is_told(tmp_path: Path, name: str, data: bytes, fragment: str) -> None:
    (tmp_path / name).write_bytes(data)
    message = refusal(tmp_path / name)
    assert message.startswith(str(tmp_path / name))
    assert fragment in message


def test_a_missing_file_names_the_data_files_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "train.sh").write_text("x")
    assert "Did you mean" not in refusal(tmp_path / "train.jsonl")
    assert "it contains no JSON, JSONL, parquet or Arrow file" in refusal(tmp_path)
    assert "Data files" not in refusal(tmp_path / "zzz.parquet")
    (tmp_path / "train.jsonl").write_bytes(LINES)
    assert "is a folder; name a file in it: train.jsonl." in refusal(tmp_path)
    assert "Data files there: train.jsonl." in refusal(tmp_path / "zzz.parquet")


def test_parquet_with_structs_and_lists(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": name}], "scores": np.arange(count)}
        for name, count in ((None, 2.0), ("x", 3.0))
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    records = read_file(str(tmp_path / "a.parquet"))
    assert [place.number for place, _ in records.records] == [1, 2]
    message = {"role": "user", "content": "a", "name": "x"}
    assert records.records[1][1] == {"prompt": [message], "scores": [0.0, 1.0, 2.0]}
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "b.parquet")
    assert "holds no rows" in refusal(tmp_path / "b.parquet")


def test_text_of_a_parquet_file_that_is_not_utf_8_costs_its_row_alone(tmp_path: Path) -> None:
    """Rows 2 and 3 are broken in one column each; the others keep their numbers and all columns."""
    broken = pa.array([b"a", b"\xff", b"c", b"d"], pa.binary())
    table = pa.table({
        "prompt": broken.view(pa.string()), "n": pa.array([1, 2, 3, 4]),
        "why": pa.array([b"x", b"y", b"\xfe\xfe", b"z"], pa.binary()).view(pa.string()),
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "a.parquet")
    records = read_file(str(tmp_path / "a.parquet"))
    assert [(place.number, row) for place, row in records.records] == [
        (1, {"prompt": "a", "n": 1, "why": "x"}), (4, {"prompt": "d", "n": 4, "why": "z"}),
    ]  # fmt: skip
    problems = [(p.place.number, p.column, p.message) for p in records.problems]
    assert sorted(problems) == [
        (2, "prompt", "is not UTF-8 (byte 0xff)"), (3, "why", "is not UTF-8 (byte 0xfe)"),
    ]  # fmt: skip


def test_no_more_rows_are_read_than_are_wanted(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "ground_truth": str(n)} for n in range(7)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    texts = {
        "a.jsonl": lines.replace("\n", "\n\n"), "b.json": json.dumps(rows),
        "c.json": json.dumps({"data": rows}), "d.ndjson.gz": lines, "e.json.gz": json.dumps(rows),
    }  # fmt: skip
    for name, text in texts.items():
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet", row_group_size=2)
    files = [str(tmp_path / name) for name in [*texts, "f.parquet"]]
    for name in files:
        count = 5 if name.endswith("a.jsonl") else 3  # blank lines count as lines
        assert len(read_source(name, count).records) == 3, name
        assert len(read_source(name).records) == 7
    sets = load_sets(files[1:4], at_most=8)
    assert [len(records.rows) for records in sets] == [7, 1, 1]  # one row at least of each file


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pa.array(["a"])
    inner = pa.StructArray.from_arrays([column, column], ["content", "content"])
    for name, table in {
        "a": pa.Table.from_arrays([column, column], ["prompt", "prompt"]),
        "b": pa.table({"prompt": inner}),
        "c": pa.table({"prompt": pa.ListArray.from_arrays([0, 1], inner)}),
    }.items():
        parquet.write_table(table, tmp_path / f"{name}.parquet", store_schema=False)
        write_arrow(tmp_path / f"{name}.arrow", table)
        for suffix in (".parquet", ".arrow"):
            message = refusal(tmp_path / f"{name}{suffix}")
            assert "two columns are named 'prompt" in message and "rename or drop one" in message


def write_arrow(path: Path, table: pa.Table, *, stream: bool = True) -> None:
    writer = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, writer(file, table.schema) as out:
        out.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams(tmp_path: Path, stream: bool) -> None:
    rows = [{"prompt": str(n)} for n in range(5)]
    write_arrow(tmp_path / "a.arrow", pa.Table.from_pylist(rows), stream=stream)
    records = read_file(str(tmp_path / "a.arrow"))
    assert [(place.number, row) for place, row in records.records] == list(enumerate(rows, start=1))
    assert len(read_file(str(tmp_path / "a.arrow"), 3).records) == 3
    assert count_rows(str(tmp_path / "a.arrow")) == 5


def test_what_arrow_cannot_read_is_the_files_fault(tmp_path: Path) -> None:
    """Truncated, flipped, of another kind, or with values that Python does not have."""
    table = pa.table({"prompt": [f"question {n}" for n in range(500)]})
    parquet.write_table(table, tmp_path / "whole.parquet", compression="zstd")
    write_arrow(tmp_path / "whole.arrow", table)
    for kind in ("parquet", "arrow"):
        data = (tmp_path / f"whole.{kind}").read_bytes()
        middle = len(data) // 2
        for number, broken in enumerate((
            b"", b"no", data[:middle], data[middle:], data[:60] + b"\xff" * 40 + data[100:],
            gzip.compress(data), b"prompt,answer\na,b\n", json.dumps(ROWS).encode(),
        )):  # fmt: skip
            path = tmp_path / f"{number}.{kind}"
            path.write_bytes(broken)
            message = refusal(path)
            assert message.startswith(str(path)) and "plain JSONL always works" in message
            assert kind == "arrow" or "not a readable parquet file" in message
    late = pa.array([2**60], pa.int64()).cast(pa.timestamp("ms"))
    parquet.write_table(pa.table({"prompt": ["a"], "t": late}), tmp_path / "late.parquet")
    assert "plain JSONL always works" in refusal(tmp_path / "late.parquet")


@pytest.mark.slow
def test_more_nested_text_than_arrow_returns_at_once(tmp_path: Path) -> None:
    """130 rows of 17 MiB in one row group; a batch of 128 is above 2 GiB."""
    text = "1 " * (17 << 19)
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 130, pa.int32()), pa.array([text]))
    tests = pa.StructArray.from_arrays(
        [pa.ListArray.from_arrays(pa.array(range(131), pa.int32()), texts)], ["inputs"]
    )
    table = pa.table({"prompt": [str(n) for n in range(130)], "ground_truth": tests})
    options = {"row_group_size": 130, "store_schema": False, "compression": "zstd"}
    parquet.write_table(table, tmp_path / "a.parquet", **options)
    records = read_file(str(tmp_path / "a.parquet"), 3)
    assert [row["prompt"] for _, row in records.records] == ["0", "1", "2"]
    assert all(row["ground_truth"] == {"inputs": [text]} for _, row in records.records)
