"""Preparing HH-RLHF and MATH: from their own files, in every layout, to verl's rows and pairs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from ppo_cli.data_sets.prepare import MATH_INSTRUCTION, boxed_answer, prepare
from ppo_cli.data_sets.rows import load_rows
from ppo_cli.errors import DataError
from ppo_cli.extras.fitting.preferences import load_pairs
from ppo_cli.rewards.rules import compare_algebra, score_math

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "hh_rlhf"
OPENING = "\n\nHuman: How do I boil an egg?"
PAIR = {
    "chosen": f"{OPENING}\n\nAssistant: Eight minutes.\n\nHuman: Thanks!\n\nAssistant: Enjoy.",
    "rejected": f"{OPENING}\n\nAssistant: Eight minutes.\n\nHuman: Thanks!\n\nAssistant: No.",
}
SHORT = {"chosen": f"{OPENING}\n\nAssistant: In water.", "rejected": f"{OPENING}\n\nAssistant: "}
ENDS_EARLY = {"chosen": OPENING, "rejected": OPENING}
PARTS_EARLY = {"chosen": SHORT["chosen"], "rejected": "\n\nHuman: Hi\n\nAssistant: Hello"}


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def test_dialogues_become_pairs_and_each_prompt_once(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write(source / "helpful-base" / "train.jsonl.gz", [PAIR, SHORT])
    write(source / "harmless-base" / "train.jsonl.gz", [SHORT])
    write(source / "harmless-base" / "test.jsonl.gz", [PAIR])
    write(source / "red-team-attempts" / "red_team_attempts.jsonl.gz", [{"transcript": "x"}])
    files = prepare("hh_rlhf", source=str(source), out=str(out))
    assert [(f.split, f.rows, f.note) for f in files] == [
        ("train", 2, ""), ("pairs_train", 3, ""), ("test", 1, ""), ("pairs_test", 1, ""),
    ]  # fmt: skip
    question = {"role": "user", "content": "How do I boil an egg?"}
    talk = [
        question, {"role": "assistant", "content": "Eight minutes."},
        {"role": "user", "content": "Thanks!"},
    ]  # fmt: skip
    assert rows_of(out / "pairs_test.parquet") == [PAIR]
    assert rows_of(out / "test.parquet")[0]["prompt"] == talk
    assert rows_of(out / "train.parquet")[0]["prompt"] == [question]
    assert rows_of(out / "train.parquet")[1]["extra_info"] == {"split": "train", "index": 1}
    # Both readers take them as they are.
    pairs = load_pairs([str(out / "pairs_train.parquet")])
    assert [(p.chosen, p.rejected) for p in pairs.pairs][:2] == [
        ("In water.", ""), ("Enjoy.", "No."),
    ]  # fmt: skip
    prompts = load_rows(str(out / "train.parquet"))
    assert (len(prompts.rows), prompts.problems, prompts.notes) == (2, (), ())
    assert {row.data_source for row in prompts.rows} == {"Anthropic/hh-rlhf"}


def test_a_single_file_is_one_split(tmp_path: Path) -> None:
    for name, split in (("harmless-base-test.jsonl", "test"), ("mine.jsonl", "train")):
        write(tmp_path / name, [PAIR])
        files = prepare("hh_rlhf", source=str(tmp_path / name), out=str(tmp_path / split))
        assert [f.split for f in files] == [split, f"pairs_{split}"]


def test_a_few_odd_dialogues_are_left_out_and_many_are_told(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    write(source, [PAIR] * 200 + [ENDS_EARLY, PARTS_EARLY])
    files = prepare("hh_rlhf", source=str(source), out=str(tmp_path / "out"))
    assert files[-1].rows == 200 and files[-1].note.startswith("2 rows left out, such as ")
    assert "line 201, column chosen: does not end with a reply" in files[-1].note
    write(source, [PAIR, PARTS_EARLY, {"chosen": "bare", "rejected": "text"}])
    with pytest.raises(DataError) as caught:
        prepare("hh_rlhf", source=str(source), out=str(tmp_path / "more"))
    assert "line 2, column rejected: is another dialogue" in str(caught.value)
    assert "line 3, column chosen: is not a transcript" in str(caught.value)
    assert not (tmp_path / "more").exists()


def test_places_without_a_split_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("hh_rlhf", "math"):
        with pytest.raises(DataError, match="holds no file of a split; expected train"):
            prepare(name, source=str(tmp_path / "empty"), out=str(tmp_path / "out"))
        with pytest.raises(DataError, match="did not load"):
            prepare(name, source="no-such-owner/no-such-set", out=str(tmp_path / "out"))


@pytest.mark.skipif(not REAL.is_dir(), reason="the real HH-RLHF files are not at hand")
def test_the_real_dialogues(tmp_path: Path) -> None:
    files = prepare("hh_rlhf", source=str(REAL), out=str(tmp_path))
    assert [(f.split, f.rows, f.note) for f in files] == [
        ("test", 2310, ""), ("pairs_test", 2312, ""),
    ]  # fmt: skip
    assert len(load_pairs([str(tmp_path / "pairs_test.parquet")]).pairs) == 2312
    rows = load_rows(str(tmp_path / "test.parquet"))
    assert (len(rows.rows), rows.problems) == (2310, ())


PROBLEM = {
    "problem": "What is half of $3$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": r"We find $3/2=\boxed{\frac{3}{2}}$.",
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("{split}.jsonl", PROBLEM),
        ("MATH/{split}/algebra/12.json", PROBLEM),
        ("algebra/{split}-00000-of-00001.jsonl.gz", PROBLEM),
    ],
)
def test_problems_of_every_layout_become_rows_that_the_rule_scores(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    for split in ("train", "test"):
        write(tmp_path / "source" / name.format(split=split), [row])
    files = prepare("math", source=str(tmp_path / "source"), out=str(tmp_path / "out"))
    assert [(f.split, f.rows) for f in files] == [("train", 1), ("test", 1)]
    (rows,) = rows_of(tmp_path / "out" / "test.parquet")
    assert rows == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": f"What is half of $3$?\n\n{MATH_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{3}{2}"},
        "extra_info": {
            "split": "test", "index": 0, "problem": PROBLEM["problem"],
            "solution": PROBLEM["solution"], "level": "Level 1", "type": "Algebra",
        },
    }  # fmt: skip
    (loaded,) = load_rows(str(tmp_path / "out" / "test.parquet")).rows
    for reply, right in ((r"so \boxed{1.5}", 1.0), (r"so \boxed{2}", 0.0)):
        truth = loaded.ground_truth
        rows = score_math(reply, truth, {}) or compare_algebra(reply, truth, {})
        assert rows is not None and rows["score"] == right


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} done", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x \in \left\{1\right]}", r"x \in \left\{1\right]"),
        (r"$\boxed 7$.", "7"),
        (r"\fbox{12}", "12"),
        (r"\boxed{ \text{A} }", r"\text{A}"),
        (r"\boxed{open", ""),
        ("none", ""),
    ],
)
def test_the_answer_in_the_last_box(solution: str, answer: str) -> None:
    assert boxed_answer(solution) == answer


def test_problems_without_an_answer_are_told_together(tmp_path: Path) -> None:
    rows = [PROBLEM, PROBLEM | {"solution": "It is 2."}, {"solution": r"\boxed{1}"}]
    write(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as caught:
        prepare("math", source=str(tmp_path / "train.jsonl"), out=str(tmp_path / "out"))
    message = str(caught.value)
    assert "2 bad rows" in message
    assert r"line 2, column solution: has no final answer in \boxed{…}" in message
    assert "line 3, column problem: is missing or not text" in message
