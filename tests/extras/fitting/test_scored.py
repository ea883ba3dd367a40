"""Scored responses become pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import DataError
from ppo_cli.extras.fitting.preferences import PairSet, load_pairs


def row(prompt: str, response: str, score: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response": response, "score": score, "failure": None}


def read(tmp_path: Path, *rows: object) -> PairSet:
    file = tmp_path / "a.scored.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return load_pairs([str(file)])


def test_each_response_is_paired_with_those_below_it(tmp_path: Path) -> None:
    rows = read(
        tmp_path, row("p", "low", 1), row("q", "other", 3), row("p", "high", 3.5),
        row("p", "middle", 2), row("p", "also middle", 2), row("q", "best", 9),
    )  # fmt: skip
    pairs = {(p.messages[0]["content"], p.chosen, p.rejected) for p in rows.pairs}
    assert pairs == {
        ("p", "high", "middle"), ("p", "high", "also middle"), ("p", "high", "low"),
        ("p", "middle", "low"), ("p", "also middle", "low"), ("q", "best", "other"),
    }  # fmt: skip
    assert len(rows.pairs) == 6
    assert rows.notes[0].endswith("6 pairs out of scored responses to 2 prompts.")


def test_failed_scores_and_repeated_texts_make_no_pairs(tmp_path: Path) -> None:
    rows = read(tmp_path, row("p", "a", 1), row("p", "a", 2), row("p", "b", None), row("p", "c", 5))
    assert [(p.chosen, p.rejected) for p in rows.pairs] == [("c", "a")]
    assert "to 1 prompts, 1 without a score left out." in rows.notes[0]


def test_a_score_that_is_no_number_is_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2, column score: is 'high', not a number"):
        read(tmp_path, row("p", "a", 1), row("p", "b", "high"))


def test_chosen_and_rejected_come_first(tmp_path: Path) -> None:
    pair = {"prompt": "p", "chosen": "x", "rejected": "y", "response": "z", "score": 1}
    assert [(p.chosen, p.rejected) for p in read(tmp_path, pair).pairs] == [("x", "y")]
