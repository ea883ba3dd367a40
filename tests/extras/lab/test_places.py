"""Labels of pieces in `ppo reward calibrate`, and attacks on places in `ppo reward audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import DataError
from ppo_cli.extras.lab.audit.attacks import Item, place_trials, user_prompt
from ppo_cli.extras.lab.audit.audit import _check_added_pieces
from ppo_cli.extras.lab.places import place_advice, place_facts, read_place_marks
from ppo_cli.records import PlacedReward, Score
from ppo_cli.scoring.rows import read_responses
from tests.settings import complete_judge


def read(tmp_path: Path, *labels: Any) -> tuple[Any, Any]:
    rows = [
        {"prompt": "Q", "response": "One. Two. Three.", "good": 1, "pieces": label}
        for label in labels
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    api = complete_judge(enable=True, model="m", place="sentence")
    responses = read_responses(str(file))
    return responses, read_place_marks(responses, "pieces", Reward(api=api))


def test_pairs_in_the_wrong_order_are_counted_and_ties_half(tmp_path: Path) -> None:
    responses, marks = read(tmp_path, [1, 0, 1], [1, 1, 1], None)
    scores = [Score(1.0, info={"pieces": pieces}) for pieces in ([0.9, 0.1, 0.1], [0, 1, 0], [])]
    facts = place_facts(responses.rows, scores, marks)
    assert facts == {"wrong": 0.25, "pairs": 2, "responses": 1}  # a pair is right, one is a tie
    assert "saves calls" in place_advice(facts) and "leave" in place_advice({"wrong": 0.5})
    assert place_facts(responses.rows, scores, {}) == {}


@pytest.mark.parametrize(
    ("label", "message"),
    [([1, 0], "2 labels for 3 pieces: One"), ("1 0 1", "list of numbers"), ([1, "x", 0], "list")],
)
def test_labels_that_do_not_fit_the_pieces_are_named(
    tmp_path: Path, label: Any, message: str
) -> None:
    with pytest.raises(DataError, match=rf"line 2, column pieces.*{message}"):
        read(tmp_path, [1, 0, 1], label)


@pytest.mark.parametrize(("credit", "passed"), [(0.5, True), (1.0, False)])
def test_added_pieces_may_not_score_above_the_answer(credit: float, passed: bool) -> None:
    text = "It is 4. I added 2 and 2."
    trials = place_trials([Item("row 1", user_prompt("u", "2 + 2?", "4", "", {}), text)], None)
    placed = (PlacedReward(9, 0.2), PlacedReward(len(text) + 2, 0.2), PlacedReward(900, 0.2))
    score = Score(0.6, info={"pieces": [0.5, 0.5, credit]}, steps=placed)
    (check,) = _check_added_pieces(trials, {key: score for t in trials for key in t.keys})
    assert check.passed is passed and len(check.cases) == 6  # of two answers, not those split
