"""Statistics of scores: correlations, intervals, comparisons of models.

Undefined values are None, never NaN. Ties count half everywhere: equal values share the mean of
their ranks. Comparisons of models on the same prompts use the prompt as the unit: its responses
stay together when intervals are resampled. Failed scores are excluded and counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ppo_cli.estimates import estimate_mean
from ppo_cli.records import Score
from ppo_cli.scoring.rows import ResponseRow
from ppo_cli.scoring.score import judged_value

Floats = NDArray[np.float64]


def as_floats(values: ArrayLike) -> Floats:
    """Return the values as a float64 array."""
    return np.asarray(values, dtype=np.float64)


def ranks(values: ArrayLike) -> Floats:
    """Return ranks from 1; equal values share their mean rank."""
    _, numbers, counts = np.unique(as_floats(values), return_inverse=True, return_counts=True)
    # The mean rank of a level: its last rank, minus half of its other members.
    return as_floats((np.cumsum(counts) - (counts - 1) / 2.0)[numbers])


def pearson(x: ArrayLike, y: ArrayLike) -> float | None:
    """Linear correlation; None when one side is constant or there are fewer than 2 values."""
    a, b = as_floats(x), as_floats(y)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        # Constant columns were excluded above, but the size may still underflow to 0.
        return None
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return None if size == 0 else float(np.clip((a @ b) / size, -1.0, 1.0))


def spearman(x: ArrayLike, y: ArrayLike) -> float | None:
    """Spearman's rank correlation; None where Pearson's is undefined."""
    return pearson(ranks(x), ranks(y))


ALL = "all"
FLIPS = 20_000  # random sign flips, when there are too many to try all
MAX_EXACT = 14  # up to so many differences all 2^n flips are tried
MAX_FLIPS_AT_ONCE = 4_000_000  # bounds the memory of a block of flips, one byte each


@dataclass(frozen=True)
class PromptScores:
    """The scores of a model's responses to one prompt; a failed score is None."""

    data_source: str
    scores: tuple[float | None, ...]

    @property
    def valid(self) -> list[float]:
        """The scores without the failed ones."""
        return [score for score in self.scores if score is not None]


ScoresByPrompt = Mapping[str, PromptScores]  # by the prompt's uid


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that one of k responses is right, from `samples` of which `right` are right.

    1 - C(n - c, k) / C(n, k), eq. 1 of Chen et al. 2021 (arXiv 2107.03374).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def split_by_source(answers: ScoresByPrompt) -> dict[str, ScoresByPrompt]:
    """Prompts by data_source; with several sources, `all` comes last."""
    names = dict.fromkeys(a.data_source for a in answers.values())
    sources: dict[str, ScoresByPrompt] = {
        name or "unnamed": {u: a for u, a in answers.items() if a.data_source == name}
        for name in names
    }
    return sources | ({ALL: answers} if len(sources) > 1 else {})


def model_facts(answers: ScoresByPrompt, threshold: float | None) -> dict[str, Any]:
    """Mean and pass@k over prompts, each with its 95 % interval.

    A response is right if its score reaches `threshold`. Without one, pass@k is only given if
    all scores are 0 or 1.
    """
    # Without a threshold, scores of only 0 and 1 say which responses are right.
    by_prompt = [a.valid for a in answers.values() if a.valid]
    scores = [score for values in by_prompt for score in values]
    binary = all(score in (0.0, 1.0) for score in scores)
    if threshold is None and binary:
        threshold = 1.0
    # pass@k for powers of two, and for the largest number of samples.
    max_samples = max((len(values) for values in by_prompt), default=0)
    passes = {}
    if threshold is not None:
        for k in [2**i for i in range(1, max_samples.bit_length()) if 2**i < max_samples] + [
            max_samples
        ] * (max_samples > 1):
            shares = [
                pass_at_k(len(values), sum(score >= threshold for score in values), k)
                for values in by_prompt
                if len(values) >= k
            ]
            passes[str(k)] = asdict(estimate_mean(shares, share=True)) | {"prompts": len(shares)}
    return {
        "prompts": len(answers),
        "responses": sum(len(a.scores) for a in answers.values()),
        "failed": sum(len(a.scores) for a in answers.values()) - len(scores),
        "mean": asdict(estimate_mean([np.mean(values) for values in by_prompt], share=binary)),
        "pass": passes,
    }


def mean_difference(first: ScoresByPrompt, other: ScoresByPrompt) -> dict[str, Any]:
    """Mean score of the first model minus the other's, over prompts that both have scores for.

    With its 95 % interval and the p-value of a paired sign-flip test (Fisher's randomisation test):
    how often the difference is as large when each prompt's sign is random.
    """
    both = [uid for uid, a in first.items() if a.valid and uid in other and other[uid].valid]
    gaps = as_floats([np.mean(first[uid].valid) - np.mean(other[uid].valid) for uid in both])
    return {"prompts": len(both), **asdict(estimate_mean(gaps)), "p": sign_flip_p(gaps)}


def sign_flip_p(gaps: Floats) -> float | None:
    """Two-sided p-value for paired differences centred on 0; exact for few, else sampled."""
    if not len(gaps):
        return None
    # A prompt without a difference is the same under every flip.
    gaps = gaps[gaps != 0]
    # A flipped sum equal up to rounding counts as large.
    observed = abs(gaps.sum()) - 1e-9
    if len(gaps) <= MAX_EXACT:
        # Row i of the matrix has the signs in the bits of i.
        flips = 1 - 2 * (np.arange(2 ** len(gaps))[:, None] >> np.arange(len(gaps)) & 1)
        return float(np.mean(np.abs(flips @ gaps) >= observed))
    # Too many to try all: sample flips in blocks of bounded memory.
    random = np.random.default_rng(0)
    rows = max(1, MAX_FLIPS_AT_ONCE // len(gaps))
    larger, tried = 0, 0
    while tried < FLIPS:
        flips = random.integers(0, 2, (min(rows, FLIPS - tried), len(gaps)), dtype=np.int8) * 2 - 1
        larger += int((np.abs(flips @ gaps) >= observed).sum())
        tried += len(flips)
    # With one added to both, a sampled p-value is never 0.
    return (larger + 1) / (tried + 1)


def compare_models(
    models: Sequence[tuple[str, ScoresByPrompt]], threshold: float | None
) -> dict[str, Any]:
    """Facts of each model by data_source, and the first model's difference from each other one."""
    facts = [
        {
            "name": name,
            "sources": {s: model_facts(a, threshold) for s, a in split_by_source(all_).items()},
        }
        for name, all_ in models
    ]
    # The first model is compared with each of the others.
    (first, mine), *others = models
    differences = [
        {
            "of": first,
            "from": name,
            "sources": {s: mean_difference(a, scores) for s, a in split_by_source(mine).items()},
        }
        for name, scores in others
    ]
    return {"models": facts, "differences": differences}


def compare_rankings(rows: Sequence[ResponseRow], scores: Sequence[Score]) -> dict[str, Any] | None:
    """Compare old and new scores of rows; None if fewer than two rows have both.

    `within` is the mean rank correlation among responses to one prompt of one step, which is
    what a group estimator learns from. `turned` is the share of reversed order among pairs of such
    responses, without ties.
    """
    # Only rows that had a score before and have one now.
    pairs = [
        (row.record.get("step"), row.rollout.prompt.uid, float(row.record["score"]), value)
        for row, score in zip(rows, scores, strict=True)
        if isinstance(row.record.get("score"), int | float)
        and math.isfinite(row.record["score"])
        and (value := judged_value(score)) is not None
    ]
    if len(pairs) < 2:
        return None
    # Group the pairs by prompt within a step, and by step.
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    by_step: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for step, uid, before, now in pairs:
        groups[step, uid].append((before, now))
        by_step[step].append((before, now))
    # Correlations within groups, and reversed pairs among those with different scores.
    within = [r for group in groups.values() if (r := _rank_correlation(group)) is not None]
    apart = [
        (a[0] - b[0]) * (a[1] - b[1])
        for group in groups.values()
        for a, b in combinations(group, 2)
        if a[0] != b[0] and a[1] != b[1]
    ]
    return {
        "rows": len(pairs),
        "agreement": _rank_correlation([pair[2:] for pair in pairs]),
        "within": float(np.mean(within)) if within else None,
        "groups": len(within),
        "turned": float(np.mean([product < 0 for product in apart])) if apart else None,
        "steps": [
            {
                "step": step,
                "rows": len(values),
                "before": float(np.mean([before for before, _ in values])),
                "now": float(np.mean([now for _, now in values])),
                "agreement": _rank_correlation(values),
            }
            for step, values in by_step.items()
        ],
    }


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    before, now = zip(*pairs, strict=True)
    return spearman(before, now)
