"""Analyse a rubric per criterion: agreement with labels, and useless criteria.

Credits are in [0, 1]: a criterion earns its grade, a fault its absence. Criteria with the same name
and text are the same criterion, whether they come from one file or from each row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.data_sets.files import Place, RowProblem, name_type, raise_problems
from ppo_cli.errors import DataError, did_you_mean
from ppo_cli.estimates import wilson
from ppo_cli.extras.lab.audit.criteria import criterion_credits, find_rubrics
from ppo_cli.extras.lab.statistics import constant_reason, estimate_or_reason
from ppo_cli.records import Score
from ppo_cli.rewards.judge.rubric import Criterion
from ppo_cli.scoring.rows import ResponseRow, ResponseSet, column_cells
from ppo_cli.scoring.statistics import Floats, as_floats, spearman

Facts = Mapping[str, Any]
Marks = Mapping[Place, Mapping[str, float]]  # grades in [0, 1] from people, by row and criterion
LABEL_VALUE = "what the labels of the criteria come to"
ALL = "all criteria"
MIN_CRITERION_ROWS = 10  # a criterion in fewer rows is not listed
# Rank correlation with the other criteria, at most, to call a criterion opposed to them.
OPPOSED_CORRELATION = -0.3
CHANCE_KAPPA = 0.2  # a kappa up to this value is hardly better than chance


@dataclass
class GradedCriterion:
    """One criterion in the rows with a verdict on it; `marked` are the credits from labels."""

    criterion: Criterion
    rows: list[int] = field(default_factory=list)
    credits: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    marked: list[float | None] = field(default_factory=list)


def read_marks(responses: ResponseSet, column: str, settings: RewardSettings) -> Marks:
    """Read the labels of criteria, {name: met or level} in each row; the error lists all mistakes.

    A label has the meaning of a verdict: for a fault, whether the response has it.
    """
    rubrics = find_rubrics(settings, responses.rollouts)
    if not rubrics:
        raise DataError("--criteria_labels needs criteria; name them with --rm_rubric.")
    # Collect the problems of all rows before raising.
    marks: dict[Place, dict[str, float]] = {}
    problems = []
    cells = column_cells(responses, column, "--criteria_labels")
    for n, (row, cell) in enumerate(zip(responses.rows, cells, strict=True)):
        # Criteria of all judges by name: a label is looked up in any of them.
        levels = {c.name: c.levels for of_judge in rubrics.values() for c in of_judge[n].criteria}
        try:
            marks[row.place] = dict(read_grades(cell, levels))
        except ValueError as error:
            problems.append(RowProblem(row.place, column, str(error)))
    raise_problems(problems, None)
    if not any(marks.values()):
        raise DataError(f"{responses.source}: the column '{column}' (--criteria_labels) is empty.")
    return marks


def add_label_values(responses: ResponseSet, marks: Marks, settings: RewardSettings) -> ResponseSet:
    """Add to each row the rubric's value of its labels, or None if a criterion has no label."""
    rubrics = find_rubrics(settings, responses.rollouts)
    if len(rubrics) > 1:
        raise DataError(
            "Several judges have criteria: name a column of labels for responses with --labels."
        )
    rows = []
    for row, rubric in zip(responses.rows, *rubrics.values(), strict=True):
        # A rubric's value needs all of its criteria, so a row with a missing label has none.
        row_marks = [marks[row.place].get(criterion.name) for criterion in rubric.criteria]
        grades = [grade for grade in row_marks if grade is not None]
        worth = rubric.value(grades) if len(grades) == len(row_marks) else None
        rows.append(replace(row, record={**row.record, LABEL_VALUE: worth}))
    if all(row.record[LABEL_VALUE] is None for row in rows):
        raise DataError(
            f"{responses.source}: no row has a label for each of its criteria; name a column with "
            "labels of the whole responses (--labels)."
        )
    return replace(responses, rows=tuple(rows))


def grade_criteria(
    settings: RewardSettings, rows: Sequence[ResponseRow], scores: Sequence[Score], marks: Marks
) -> dict[str, GradedCriterion]:
    """Each criterion by name; in a mixture the judge's name is a prefix."""
    # Collect the credits by judge, name and text of a criterion.
    entries: dict[tuple[str | None, str, str], GradedCriterion] = {}
    for part, rubrics in find_rubrics(settings, [row.rollout for row in rows]).items():
        for n, (rubric, score) in enumerate(zip(rubrics, scores, strict=True)):
            credits = criterion_credits(score, part)
            if set(credits) != {criterion.name for criterion in rubric.criteria}:
                continue  # no verdict, or the gate answered
            row_marks = marks.get(rows[n].place, {})
            for criterion in rubric.criteria:
                entry = entries.setdefault(
                    (part, criterion.name, criterion.text), GradedCriterion(criterion)
                )
                entry.rows.append(n)
                entry.credits.append(credits[criterion.name])
                # The weighted credits of the other criteria, for the correlation "with the rest".
                entry.rest.append(
                    math.fsum(
                        c.weight * credits[c.name] for c in rubric.criteria if c is not criterion
                    )
                )
                mark = row_marks.get(criterion.name)
                entry.marked.append(None if mark is None else criterion.credit(mark))
    # Make the names unique.
    named: dict[str, GradedCriterion] = {}
    count: Counter[str] = Counter()  # different criteria may have the same name in different rows
    for (part, name, _), entry in entries.items():
        full = name if part is None else f"{part}: {name}"
        count[full] += 1
        named[full if count[full] == 1 else f"{full} ({count[full]})"] = entry
    return named


def criteria_facts(
    settings: RewardSettings,
    rows: Sequence[ResponseRow],
    scores: Sequence[Score],
    labels: Sequence[float],
    marks: Marks,
) -> dict[str, dict[str, Any]]:
    """Figures of each criterion; with labels of criteria, figures of all together come last."""
    every = grade_criteria(settings, rows, scores, marks)
    # Criteria of few rows are left out of the list, but count in the figures of all together.
    facts = {
        name: _criterion_facts(entry, labels)
        for name, entry in every.items()
        if len(entry.rows) >= MIN_CRITERION_ROWS
    }
    if marks and every:
        pairs = [pair for entry in every.values() for pair in _level_pairs(entry)]
        facts[ALL] = {
            "rows": sum(len(entry.rows) for entry in every.values()),
            **_label_agreement(pairs),
        }
    return facts


def _criterion_facts(entry: GradedCriterion, labels: Sequence[float]) -> dict[str, Any]:
    """Return mean, correlations, and agreement with people's grades of the same criterion.

    Credits are correlated with the rubric's other criteria and with `labels`, one for each response
    as a whole. In place of an undefined correlation there is the reason.
    """
    credit, rest = as_floats(entry.credits), as_floats(entry.rest)
    label = as_floats([labels[n] for n in entry.rows])

    def correlation(what: str, other: Floats) -> dict[str, Any]:
        # A correlation is undefined if one side is constant.
        why = constant_reason("credit", credit) or constant_reason(what, other)
        return estimate_or_reason(len(other), lambda rows: spearman(credit[rows], other[rows]), why)

    return {
        "rows": len(credit),
        "mean": float(credit.mean()),
        "with the rest": correlation("rest", rest),
        "with the label": correlation("label", label),
        **_label_agreement(_level_pairs(entry)),
    }


def _level_pairs(entry: GradedCriterion) -> list[tuple[int, int]]:
    """(judge's level, person's level) for each labelled row; means of votes are rounded."""
    levels = entry.criterion.levels
    return [
        (math.floor(credit * levels + 0.5), round(mark * levels))
        for credit, mark in zip(entry.credits, entry.marked, strict=True)
        if mark is not None
    ]


def _label_agreement(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Agreement with labels: share of equal levels, Cohen's kappa (1960), and who is higher."""
    if not pairs:
        return {}
    judged, labelled = np.asarray(pairs).T
    count, same = len(pairs), float(np.mean(judged == labelled))
    # Agreement expected by chance, from how often each side uses each level.
    chance = float(sum(
        np.mean(judged == level) * np.mean(labelled == level) for level in np.unique(pairs)
    ))  # fmt: skip
    return {
        "labelled": count,
        "agree": {**asdict(wilson(same, count)), "why": ""},
        "kappa": None if chance == 1.0 else (same - chance) / (1.0 - chance),
        "credited too much": float(np.mean(judged > labelled)),
        "credited too little": float(np.mean(judged < labelled)),
    }


def criteria_advice(facts_by_criterion: Mapping[str, Facts]) -> list[str]:
    """Sentences about criteria that are constant, opposed to the others, or unlike the labels."""
    sentences = []
    for name, facts in facts_by_criterion.items():
        if facts.get("mean") in (0.0, 1.0):
            word = "its full credit" if facts["mean"] else "no credit"
            sentences.append(
                f"The criterion '{name}' had {word} in all {facts['rows']} rows, so it "
                "does not separate responses: reword it, or remove it."
            )
        # Opposed only when the whole interval is below zero.
        rest = facts.get("with the rest", {"value": None})
        if (
            rest["value"] is not None
            and rest["value"] <= OPPOSED_CORRELATION
            and (rest["high"] or 0.0) < 0.0
        ):
            sentences.append(
                f"The criterion '{name}' opposes the others (rank correlation "
                f"{rest['value']:.2f}): responses that earn credit there lose it here."
            )
        if "labelled" in facts and facts["labelled"] >= MIN_CRITERION_ROWS:
            sentences += _disagreement_sentences(name, facts)
    return sentences


def _disagreement_sentences(name: str, facts: Facts) -> list[str]:
    """How judge and labels differ on a criterion, in at most one sentence."""
    too_much, too_little = facts["credited too much"], facts["credited too little"]
    share, larger = facts["agree"]["value"], max(too_much, too_little)
    agree = f"{name}: the judge agrees with the labels in {share:.0%} of {facts['labelled']}"
    # A disagreement that chance explains comes first; otherwise a clear lean to one side.
    if facts["kappa"] is not None and facts["kappa"] <= CHANCE_KAPPA and larger > 0:
        return [f"{agree}, hardly better than chance (kappa {facts['kappa']:.2f})."]
    if larger >= 0.1 and larger >= 3 * min(too_much, too_little):
        lean = "too kind" if too_much == larger else "too harsh"
        return [f"{agree}; it is {lean} in {larger:.0%}."]
    return []


def read_grades(cell: Any, levels: Mapping[str, int | None]) -> Iterator[tuple[str, float]]:
    """Yield (criterion, grade in [0, 1]) from a cell of labels; ValueError for a wrong cell.

    `levels` are the highest levels of the criteria: 1 for one that is met or not, None for one
    whose label is a share.
    """
    if cell is None:
        return
    if not isinstance(cell, Mapping):
        raise ValueError(
            f"is {name_type(cell)}, not an object such as {{'{next(iter(levels))}': …}}"
        )
    # A row may have labels for some of its criteria; null counts as no label.
    for name, value in cell.items():
        if name not in levels:
            near = did_you_mean(name, levels)
            raise ValueError(f"has no criterion '{name}' in its rubric.{near}")
        if value is None:
            continue
        top, numbers = levels[name], bool | int | float if levels[name] is None else bool | int
        if not isinstance(value, numbers) or not 0 <= value <= (top or 1):
            forms = {None: "true, false or a number from 0 to 1", 1: "true or false"}
            expected = forms.get(top, f"a level from 0 to {top}")
            raise ValueError(f"has {value!r} for '{name}', not {expected}")
        yield name, value / (top or 1)
