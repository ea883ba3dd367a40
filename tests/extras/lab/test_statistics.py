"""Agreement measures, against hand-worked numbers and slow but obvious versions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.extras.lab import statistics as stats
from ppo_cli.scoring.statistics import spearman


def test_partial_spearman_by_hand() -> None:
    x, y, z = [1, 2, 3, 4], [2, 1, 4, 3], [1, 2, 4, 3]
    xy, xz, yz = 0.6, 0.8, 0.8
    assert spearman(x, y) == pytest.approx(xy)
    assert spearman(x, z) == pytest.approx(xz)
    assert spearman(y, z) == pytest.approx(yz)
    expected = (xy - xz * yz) / ((1 - xz**2) * (1 - yz**2)) ** 0.5
    assert stats.partial_spearman(x, y, z) == pytest.approx(expected)
    assert stats.partial_spearman(z, y, z) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=14))
def test_auc_as_by_counting_pairs(rows: list[tuple[int, bool]]) -> None:
    good, bad = ([score for score, label in rows if label is kind] for kind in (True, False))
    pairs = [(g > b) + 0.5 * (g == b) for g, b in itertools.product(good, bad)]
    result = stats.auc([s for s, _ in rows], [y for _, y in rows])
    assert result is None if not pairs else result == pytest.approx(sum(pairs) / len(pairs))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=2, max_size=14))
def test_rank_agreement_as_by_counting_pairs(rows: list[tuple[int, int]]) -> None:
    """Tau-b from pairs and ties; for two labels the ordered share is the AUC."""
    pairs = [((a[0] - b[0]), (a[1] - b[1])) for a, b in itertools.combinations(rows, 2)]
    gain = sum((x * y > 0) - (x * y < 0) for x, y in pairs)
    free_x, free_y = (sum(pair[side] != 0 for pair in pairs) for side in (0, 1))
    scores, labels = zip(*rows, strict=True)
    tau, share = stats.kendall(scores, labels), stats.ordered_share(scores, labels)
    assert tau == (pytest.approx(gain / (free_x * free_y) ** 0.5) if free_x * free_y else None)
    ordered = [1.0 if x * y > 0 else 0.5 if x == 0 else 0.0 for x, y in pairs if y]
    assert share == (pytest.approx(sum(ordered) / len(ordered)) if ordered else None)
    if set(labels) == {0, 1}:
        assert share == pytest.approx(stats.auc(scores, labels))


def test_accuracy_counts_the_threshold_as_positive() -> None:
    assert stats.accuracy_at([0.2, 0.5, 0.9], [False, True, True], 0.5) == 1.0
    assert stats.accuracy_at([0.2, 0.5, 0.9], [True, True, False], 0.6) == 0.0
    assert stats.accuracy_at([], [], 0.5) is stats.best_threshold([], []) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=14))
def test_best_threshold_as_by_trying_all(rows: list[tuple[int, bool]]) -> None:
    scores, labels = [s for s, _ in rows], [y for _, y in rows]
    tried = [k / 2 for k in range(-1, 13)]
    best = max(stats.accuracy_at(scores, labels, t) or 0.0 for t in tried)
    result = stats.best_threshold(scores, labels)
    assert result is not None
    threshold, accuracy = result
    assert accuracy == pytest.approx(best)
    assert stats.accuracy_at(scores, labels, threshold) == pytest.approx(accuracy)


def test_agreement_by_hand() -> None:
    # Row 1: gaps 0, 0.5, 0.5. Row 2: gap 0. Row 3 has one verdict and does not count.
    by_hand = {"rows": 2, "same": (1 / 3 + 1) / 2, "mean_gap": (1 / 3 + 0) / 2, "largest_gap": 0.5}
    result = stats.verdict_agreement([[0.5, 0.5, 1.0], [0.2, 0.2], [0.9]])
    assert result == pytest.approx(by_hand)
    assert stats.verdict_agreement([[0.3], []]) is None
