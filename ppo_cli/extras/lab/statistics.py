"""Agreement of scores with labels and with each other: correlations, AUC, thresholds.

Undefined values are None, never NaN. Ties count half, as in `scoring.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ppo_cli.errors import plural
from ppo_cli.estimates import bootstrap
from ppo_cli.scoring.statistics import Floats, as_floats, ranks, spearman

RowNumbers = NDArray[np.intp]
MIN_ROWS = 10  # rows for an interval


def partial_spearman(x: ArrayLike, y: ArrayLike, control: ArrayLike) -> float | None:
    """Rank correlation of x and y after removing what `control` explains of each.

    (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2)(1 - r_yz^2)); None when `control` explains one of them
    fully, or when one of the three is constant.
    """
    xy, xz, yz = spearman(x, y), spearman(x, control), spearman(y, control)
    if xy is None or xz is None or yz is None:
        return None
    unexplained = (1 - xz * xz) * (1 - yz * yz)
    if unexplained < 1e-12:
        return None
    return float(np.clip((xy - xz * yz) / np.sqrt(unexplained), -1.0, 1.0))


def auc(scores: ArrayLike, positive: ArrayLike) -> float | None:
    """Share of (positive, negative) pairs in which the positive has the higher score; ties half."""
    good = np.asarray(positive, dtype=bool)
    count = int(good.sum())
    # From the rank sum of the positives (Mann-Whitney U).
    others = len(good) - count
    if not count or not others:
        return None
    total = ranks(scores)[good].sum() - count * (count + 1) / 2.0
    return float(total / (count * others))


def order_counts(scores: ArrayLike, labels: ArrayLike) -> tuple[float, float, float, float]:
    """Count pairs of rows: in the same order, in the opposite one, differing in score, in label."""
    x, y = as_floats(scores), as_floats(labels)
    same = opposite = by_score = by_label = 0
    for row in range(len(x)):
        signs, truth = np.sign(x[row + 1 :] - x[row]), np.sign(y[row + 1 :] - y[row])
        same += int((signs * truth > 0).sum())
        opposite += int((signs * truth < 0).sum())
        by_score += int(np.count_nonzero(signs))
        by_label += int(np.count_nonzero(truth))
    return same, opposite, by_score, by_label


def kendall(scores: ArrayLike, labels: ArrayLike) -> float | None:
    """Kendall's tau-b (Kendall 1945): (C - D) / sqrt(pairs that differ in x, times in y)."""
    same, opposite, by_score, by_label = order_counts(scores, labels)
    return (same - opposite) / math.sqrt(by_score * by_label) if by_score and by_label else None


def ordered_share(scores: ArrayLike, labels: ArrayLike) -> float | None:
    """Share of the pairs with other labels that scores order alike; ties half, as in the AUC."""
    same, opposite, _, by_label = order_counts(scores, labels)
    return (same + (by_label - same - opposite) / 2) / by_label if by_label else None


def accuracy_at(scores: ArrayLike, positive: ArrayLike, threshold: float) -> float | None:
    """Share of rows that `score >= threshold` classifies correctly."""
    good = np.asarray(positive, dtype=bool)
    return float(np.mean((as_floats(scores) >= threshold) == good)) if len(good) else None


def best_threshold(scores: ArrayLike, positive: ArrayLike) -> tuple[float, float] | None:
    """The threshold with the highest accuracy, and that accuracy; of equal ones the lowest.

    Candidates are the midpoints of neighbouring scores and one outside each end, so that
    "all positive" and "all negative" are among them.
    """
    good = np.asarray(positive, dtype=bool)
    if not len(good):
        return None
    levels, numbers = np.unique(as_floats(scores), return_inverse=True)
    positives = np.bincount(numbers, weights=good, minlength=len(levels))
    negatives = np.bincount(numbers, weights=~good, minlength=len(levels))
    # right[k]: rows classified correctly with the k lowest levels negative and the others positive
    below = np.concatenate([[0.0], np.cumsum(negatives)])
    above = positives.sum() - np.concatenate([[0.0], np.cumsum(positives)])
    right = below + above
    best = int(np.argmax(right))
    # The lowest candidate is the lowest score, at which all rows are positive.
    edges = np.concatenate([[levels[0]], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    return float(edges[best]), float(right[best] / len(good))


def verdict_agreement(verdicts: Sequence[Sequence[float]]) -> dict[str, Any] | None:
    """Compare all pairs of verdicts on each row; rows with fewer than two do not count.

    Returns the number of rows, the share of equal pairs, and the mean and largest gap.
    """
    # Each row gives all pairs of its verdicts; the rows then count alike.
    rows = [as_floats(v) for v in verdicts if len(v) > 1]
    if not rows:
        return None
    pairs = [np.triu_indices(len(row), k=1) for row in rows]
    gaps = [np.abs(row[first] - row[two]) for row, (first, two) in zip(rows, pairs, strict=True)]
    return {
        "rows": len(rows),
        "same": float(np.mean([np.mean(gap == 0) for gap in gaps])),
        "mean_gap": float(np.mean([gap.mean() for gap in gaps])),
        "largest_gap": float(max(gap.max() for gap in gaps)),
    }


def estimate_or_reason(
    rows: int, statistic: Callable[[RowNumbers], float | None], why_not: str, *, share: bool = False
) -> dict[str, Any]:
    """An estimate as a dict; its `why` is the reason when there is no value."""
    # Few rows first: that reason is more useful than the others.
    if rows < MIN_ROWS:
        why_not = f"{plural(rows, 'row')} with a score; at least {MIN_ROWS} are needed"
    if why_not:
        return {"value": None, "low": None, "high": None, "why": why_not}
    estimate = bootstrap(statistic, rows, share=share)
    why = "it is not defined for these rows" if estimate.value is None else ""
    return {**asdict(estimate), "why": why}


def constant_reason(what: str, values: Floats) -> str:
    """The reason why constant values cannot be ranked; empty if they vary."""
    return f"every {what} is the same" if len(values) and np.ptp(values) == 0 else ""
