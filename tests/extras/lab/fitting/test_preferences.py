"""Pairs are read from every shape that they come in, and bad rows are told with their place.

Scored responses become pairs. A prompt is on one side of a split only, and the same seed splits the
same way.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.data_sets.files import Place
from ppo_cli.errors import DataError
from ppo_cli.extras.lab.fitting import preferences
from ppo_cli.extras.lab.transcripts import split_transcript
from tests.scoring.scripted import write_rows

USER = {"role": "user", "content": "Hi?"}
GOOD = {"role": "assistant", "content": "Hello."}
BAD = {"role": "assistant", "content": "Go."}
SYSTEM = {"role": "system", "content": "Be kind."}
PLAIN = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go."}
TRANSCRIPT = {
    "chosen": "\n\nHuman: Hi?\n\nAssistant: Hello.",
    "rejected": "\n\nHuman: Hi?\n\nAssistant: Go.",
}


def read(tmp_path: Path, *rows: object) -> preferences.PairSet:
    return preferences.load_pairs([write_rows(tmp_path / "a.jsonl", *rows)])


def read_one(tmp_path: Path, row: dict[str, Any]) -> preferences.Example:
    (pair,) = read(tmp_path, row).pairs
    return pair


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
    assert [text.strip() for text in pair.texts] == ["Hello.", "Go."] and pair.targets == (0.0,)


def test_a_dialogue_of_several_turns_keeps_them(tmp_path: Path) -> None:
    before = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    pair = read_one(tmp_path, {"chosen": f"{before} yes", "rejected": f"{before} no"})
    assert [(m["role"], m["content"]) for m in pair.messages] == [
        ("user", "a"), ("assistant", "b"), ("user", "c")
    ]  # fmt: skip
    assert pair.texts == ("yes", "no")
    row = {"prompt": "Hi?", "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}
    pair = read_one(tmp_path, {**row, "margin": 2})
    assert [m["role"] for m in pair.messages] == ["system", "user"]
    assert pair.targets == (2.0,)


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
    pairs = preferences.load_pairs(names).pairs
    assert [pair.texts[0] for pair in pairs] == ["Hello."] * 3
    assert len({pair.prompt_id for pair in pairs}) == 1


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path) -> None:
    bad = {**PLAIN, "chosen": None}
    file = write_rows(tmp_path / "a.jsonl", PLAIN, bad, 7)
    pairs = preferences.load_pairs([file], skip_bad_rows=True)
    assert len(pairs.pairs) == 1 and pairs.dropped == {"bad": 2}
    assert pairs.notes[0].startswith(f"2 bad rows left out, such as {file} line 2, column chosen")
    files = [write_rows(tmp_path / f"{name}.jsonl", *[bad] * 4) for name in "ab"]
    with pytest.raises(DataError, match=r"8 bad rows:[\s\S]*… and 3 more\."):
        preferences.load_pairs(files)


def test_equal_responses_are_dropped_and_counted(tmp_path: Path) -> None:
    pairs = read(tmp_path, PLAIN, {**PLAIN, "rejected": "Hello."})
    assert len(pairs.pairs) == 1 and pairs.dropped == {"equal": 1}
    assert pairs.notes == ("1 pair left out: chosen and rejected are the same text.",)
    pairs = read(tmp_path, {"question": "Hi?", "chosen": "a", "rejected": ""})
    assert pairs.pairs[0].texts[1] == ""
    assert pairs.notes[0].endswith("the prompt is read from column 'question'.")
    assert pairs.notes[1] == "1 pair with an empty response; kept."


def scored(prompt: str, response: str, score: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "score": score, "failure": None}


def test_each_response_is_paired_with_those_below_it(tmp_path: Path) -> None:
    pairs = read(
        tmp_path, scored("p", "low", 1), scored("q", "other", 3), scored("p", "high", 3.5),
        scored("p", "middle", 2), scored("p", "also middle", 2), scored("q", "best", 9),
    )  # fmt: skip
    triples = [(p.messages[0]["content"], *p.texts) for p in pairs.pairs]
    assert len(triples) == 6 and set(triples) == {
        ("p", "high", "middle"), ("p", "high", "also middle"), ("p", "high", "low"),
        ("p", "middle", "low"), ("p", "also middle", "low"), ("q", "best", "other"),
    }  # fmt: skip
    assert pairs.notes[0].endswith("6 pairs out of scored responses to 2 prompts.")


def test_failed_scores_and_repeated_texts_make_no_pairs(tmp_path: Path) -> None:
    scores = [("a", 1), ("a", 2), ("b", None), ("c", 5)]
    pairs = read(tmp_path, *(scored("p", text, score) for text, score in scores))
    assert [p.texts for p in pairs.pairs] == [("c", "a")]
    assert "to 1 prompt, 1 without a score left out." in pairs.notes[0]


def test_chosen_and_rejected_come_first(tmp_path: Path) -> None:
    pair = {"prompt": "p", "chosen": "x", "rejected": "y", "response": "z", "score": 1}
    assert [p.texts for p in read(tmp_path, pair).pairs] == [("x", "y")]


def make(prompt: str, number: int = 1) -> preferences.Example:
    messages = ({"role": "user", "content": prompt},)
    return preferences.Example(Place("a", number), messages, (f"good {number}", "bad"))


def prompts(pairs: tuple[preferences.Example, ...]) -> set[str]:
    return {pair.prompt_id for pair in pairs}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_all_pairs_of_a_prompt_go_together(share: float) -> None:
    pairs = [make(f"prompt {i % 40}", i) for i in range(200)]
    split = preferences.split_by_prompt(pairs, share, seed=1)
    assert not prompts(split.train) & prompts(split.held_out)
    assert split.train and split.held_out
    assert len(split.train) + len(split.held_out) == 200
    assert abs(len(split.held_out) - share * 200) <= 5


def test_the_split_goes_by_seed_and_not_by_the_order_of_rows() -> None:
    pairs = [make(f"prompt {i}", i) for i in range(50)]
    first = prompts(preferences.split_by_prompt(pairs, 0.2, seed=1).held_out)
    assert first == prompts(preferences.split_by_prompt(pairs[::-1], 0.2, seed=1).held_out)
    assert first != prompts(preferences.split_by_prompt(pairs, 0.2, seed=2).held_out)
    many = [make(f"prompt {i}", i) for i in range(3 * preferences.MAX_HELD_OUT)]
    assert len(preferences.split_by_prompt(many, 0.9, seed=1).held_out) == preferences.MAX_HELD_OUT


def test_prompts_of_the_held_out_file_leave_the_training() -> None:
    split = preferences.exclude_held_out([make("a"), make("b")], [make("b", 7), make("c")])
    assert prompts(split.train) == {make("a").prompt_id}
    assert len(split.held_out) == 2
