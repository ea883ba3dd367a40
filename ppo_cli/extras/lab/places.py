"""How well a judge's places agree with people's: labels of the pieces of responses.

A label is a number for each piece, in order, such as 1 for a right one and 0 for a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.data_sets.files import Place, RowProblem, raise_problems
from ppo_cli.errors import DataError, plural
from ppo_cli.extras.lab.reward_facts import single_judge
from ppo_cli.records import Score
from ppo_cli.rewards.judge.placing import cut_response
from ppo_cli.scoring.rows import ResponseRow, ResponseSet, column_cells
from ppo_cli.scoring.score import shorten

FLAG = "--place_labels"
Marks = Mapping[Place, Sequence[float]]
# Shares of wrong places up to which placing saves calls and money, and calls alone: measured on the
# task of benchmarks/judge_bill.py at 0 and 0.3 (notes/lab_book.md), and estimated between them.
CHEAPER, FEWER_CALLS = 0.1, 0.3


def read_place_marks(responses: ResponseSet, column: str, settings: RewardSettings) -> Marks:
    """Read the labels of pieces, a list in each row; the error lists all mistakes."""
    judge = single_judge(settings)
    if judge is None or judge.part or judge.settings.place in (None, "criterion"):
        raise DataError(f"{FLAG} needs one judge, with --rm_place that cuts responses in pieces.")
    marks, problems = dict[Place, Sequence[float]](), []
    for row, cell in zip(responses.rows, column_cells(responses, column, FLAG), strict=True):
        pieces = cut_response(row.rollout, judge.settings)
        if cell is None:
            continue
        numbers = isinstance(cell, list) and all(type(x) in (int, float, bool) for x in cell)
        if not numbers:
            problems.append(RowProblem(row.place, column, "is not a list of numbers"))
        elif len(cell) != max(1, len(pieces)):
            texts = [piece.text for piece in pieces] or [row.rollout.text]
            shown = " | ".join(map(shorten, texts))
            message = f"has {len(cell)} labels for {plural(len(texts), 'piece')}: {shown}"
            problems.append(RowProblem(row.place, column, message))
        else:
            marks[row.place] = [float(x) for x in cell]
    raise_problems(problems, None)
    return marks


def place_facts(
    rows: Sequence[ResponseRow], scores: Sequence[Score], marks: Marks
) -> dict[str, Any]:
    """Return the share of pairs of pieces with other labels that the judge orders wrongly.

    A tie is half wrong. Where a share of the scores of right and wrong pieces is turned over, this
    is that share, and 0.5 is chance. {} without such pairs.
    """
    wrong, pairs, responses = 0.0, 0, 0
    for row, score in zip(rows, scores, strict=True):
        labels, pieces = marks.get(row.place, ()), score.info.get("pieces", ())
        both = list(combinations(zip(labels, pieces, strict=False), 2))
        gaps = [(a - b) * (p - q) for (a, p), (b, q) in both if a != b]
        wrong += sum(1.0 if gap < 0 else 0.5 if gap == 0 else 0.0 for gap in gaps)
        pairs, responses = pairs + len(gaps), responses + bool(gaps)
    return {"wrong": wrong / pairs, "pairs": pairs, "responses": responses} if pairs else {}


def place_advice(facts: Mapping[str, Any]) -> str:
    """Return whether placing pays at the measured share of wrong places."""
    wrong = facts["wrong"]
    start = f"Places: {wrong:.0%} of the pairs of pieces are in the wrong order"
    if wrong <= CHEAPER:
        return f"{start}: --rm_place saves calls and money if each piece is right or wrong alone."
    if wrong <= FEWER_CALLS:
        return f"{start}: --rm_place saves calls, not money, if each piece is right or wrong alone."
    return f"{start}: leave --rm_place out, or use a stronger judge."
