"""Pairs are read from every shape that they come in, and bad rows are told with their place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.rows import split_transcript
from ppo_cli.errors import DataError
from ppo_cli.extras.fitting.preferences import Pair, load_pairs

USER = {"role": "user", "content": "Hi?"}
GOOD = {"role": "assistant", "content": "Hello."}
BAD = {"role": "assistant", "content": "Go."}
SYSTEM = {"role": "system", "content": "Be kind."}
PLAIN = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go."}
TRANSCRIPT = {
    "chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.",
    "rejected": "\n\nHuman: Hi?\n\nAssistant: Go.",
}


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


def read_one(tmp_path: Path, row: dict[str, Any]) -> Pair:
    (pair,) = load_pairs([write(tmp_path / "a.jsonl", row)]).pairs
    return pair


def refused(tmp_path: Path, row: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        load_pairs([write(tmp_path / "a.jsonl", PLAIN, row)])
    text = str(caught.value)
    assert text.startswith("1 bad row:")
    assert f"{tmp_path / 'a.jsonl'} line 2" in text
    assert "A pair is" in text and "--skip_bad_rows" in text
    return text


@pytest.mark.parametrize(
    "row",
    [
        PLAIN,
        {**PLAIN, "prompt": [USER]},
        {**PLAIN, "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"question": "Hi?", "chosen": "Hello.", "rejected": "Go."},
        {"prompt": "\n\nHuman: Hi?\n\nAssistant:", "chosen": " Hello.", "rejected": " Go."},
        TRANSCRIPT,
        {"prompt": None, **TRANSCRIPT},
    ],
    ids=["text", "messages", "all messages", "whole dialogues", "implicit prompt", "other column",
         "transcript prompt", "transcripts", "null prompt"],
)  # fmt: skip
def test_every_shape_gives_the_same_pair(row: dict[str, Any], tmp_path: Path) -> None:
    pair = read_one(tmp_path, row)
    assert [dict(m) for m in pair.messages] == [USER]
    assert (pair.chosen.strip(), pair.rejected.strip()) == ("Hello.", "Go.")
    assert pair.margin == 0.0


def test_a_dialogue_of_several_turns_keeps_them(tmp_path: Path) -> None:
    before = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pair = read_one(tmp_path, {"chosen": f"{before} yes", "rejected": f"{before} no"})
    assert [(m["role"], m["content"]) for m in pair.messages] == [
        ("user", "a"), ("assistant", "b"), ("user", "c")
    ]  # fmt: skip
    assert (pair.chosen, pair.rejected) == ("yes", "no")
    row = {"prompt": "Hi?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}
    pair = read_one(tmp_path, {**row, "margin": 2})
    assert [m["role"] for m in pair.messages] == ["system", "user"]
    assert pair.margin == 2.0


def test_transcripts_join_two_turns_of_one_speaker() -> None:
    text = "\n\nHuman: a\n\nHuman: b\n\nAssistant: c\n\nmore: Human: no turn"
    assert [(m["role"], m["content"]) for m in split_transcript(text)] == [
        ("user", "a\n\nb"), ("assistant", "c\n\nmore: Human: no turn")
    ]  # fmt: skip


def test_gzip_json_and_parquet_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps(TRANSCRIPT).encode()))
    (tmp_path / "b.json").write_text(json.dumps([PLAIN]))
    chat = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    parquet.write_table(pa.Table.from_pylist([chat]), tmp_path / "c.parquet")
    names = (str(zipped), str(tmp_path / "b.json"), str(tmp_path / "c.parquet"))
    pairs = load_pairs(names).pairs
    assert [pair.chosen for pair in pairs] == ["Hello."] * 3
    assert len({pair.prompt_id for pair in pairs}) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PLAIN, "chosen": None}, "column chosen: is null, not text or a list of messages"),
        ({**PLAIN, "rejected": 3}, "column rejected: is a number"),
        ({**PLAIN, "rejected": []}, "column rejected: is an empty list"),
        ({"chosen": "Hello.", "rejected": "Go."}, "chosen: is only a reply"),
        ({**TRANSCRIPT, "chosen": "\n\nHuman: Hi?"}, "column chosen: ends with the user"),
        (
            {**TRANSCRIPT, "rejected": "\n\nHuman: Ho?\n\nAssistant: Go."},
            "column rejected: differs from `chosen` from turn 1 on",
        ),
        (
            {**TRANSCRIPT, "rejected": f"{TRANSCRIPT['chosen']}\n\nHuman: y\n\nAssistant: z"},
            "column rejected: differs from `chosen` from turn 2 on",
        ),
        (
            {"prompt": "What?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "column chosen: has other turns",
        ),
        (
            {"chosen": [{"role": "bot", "content": "x"}], "rejected": [USER, BAD]},
            "column chosen[0].role: is 'bot', not one of",
        ),
        ({**PLAIN, "images": ["a.png"]}, "column images: holds content that the model never sees"),
        ({**PLAIN, "margin": "big"}, "column margin: is text, not a number"),
        ({**PLAIN, "margin": -1}, "column margin: is -1; a margin is a number from 0 up"),
    ],
)  # fmt: skip
def test_bad_rows_are_told(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, row)


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", PLAIN, {**PLAIN, "chosen": None}, 7)
    pairs = load_pairs([file], skip_bad_rows=True)
    assert len(pairs.pairs) == 1 and pairs.dropped == {"bad": 2}
    assert pairs.notes[0].startswith(f"2 bad rows left out, such as {file} line 2, column chosen")
    bad = {**PLAIN, "chosen": None}
    files = [write(tmp_path / f"{name}.jsonl", *[bad] * 4) for name in "ab"]
    with pytest.raises(DataError, match=r"8 bad rows:[\s\S]*… and 3 more\."):
        load_pairs(files)


def test_equal_responses_are_dropped_and_counted(tmp_path: Path) -> None:
    pairs = load_pairs([write(tmp_path / "a.jsonl", PLAIN, {**PLAIN, "rejected": "Hello."})])
    assert len(pairs.pairs) == 1 and pairs.dropped == {"equal": 1}
    assert pairs.notes == ("1 pair left out: chosen and rejected are the same text.",)
    empty = {"question": "Hi?", "chosen": "a", "rejected": ""}
    pairs = load_pairs([write(tmp_path / "a.jsonl", empty)])
    assert pairs.pairs[0].rejected == ""
    assert pairs.notes[0].endswith("the prompt is read from column 'question'.")
    assert pairs.notes[1] == "1 pair with an empty response; kept."


def test_a_missing_column_is_told_with_its_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "x", "chosen": "a", "reject": "b"})
    with pytest.raises(DataError, match=r"no column 'rejected'.*Did you mean 'reject'"):
        load_pairs([file])
