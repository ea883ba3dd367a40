"""Scores of models on the same prompts: means and pass@k with intervals, and paired differences.

A prompt is the unit throughout: its responses go together, so intervals are drawn over prompts.
Failed scores are left out, and counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from ppo_cli.records import Score
from ppo_cli.trust.rows import Answered
from ppo_cli.trust.score import judged
from ppo_cli.trust.statistics import Floats, as_floats, bootstrap, spearman

ALL = "all"
FLIPS = 20_000  # random sign flips, where there are too many to try them all
MOST_EXACT = 14  # differences whose 2^14 flips are all tried
AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Answers:
    """The scores of a model's responses to one prompt; None where one failed."""

    data_source: str
    scores: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        """The scores that did not fail."""
        return [score for score in self.scores if score is not None]


ByPrompt = Mapping[str, Answers]  # by the prompt's uid


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that one of k responses is right, unbiased from `samples` with `right` right ones.

    1 - C(n - c, k) / C(n, k), eq. 1 of Chen et al. 2021 (arXiv 2107.03374).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def sources_of(answers: ByPrompt) -> dict[str, ByPrompt]:
    """The prompts of each data_source; all of them together come last, where there are several."""
    names = dict.fromkeys(a.data_source for a in answers.values())
    found: dict[str, ByPrompt] = {
        name or "unnamed": {u: a for u, a in answers.items() if a.data_source == name}
        for name in names
    }
    return found | ({ALL: answers} if len(found) > 1 else {})


def facts_of(answers: ByPrompt, threshold: float | None) -> dict[str, Any]:
    """Mean and pass@k of some prompts, each with its 95 % interval.

    A response is right from `threshold` on. Without one, pass@k is given where all scores are 0
    or 1.
    """
    known = [a.known for a in answers.values() if a.known]
    scores = [score for one in known for score in one]
    binary = all(score in (0.0, 1.0) for score in scores)
    if threshold is None and binary:
        threshold = 1.0
    most = max((len(one) for one in known), default=0)
    passes = {}
    if threshold is not None:
        for k in [2**i for i in range(1, most.bit_length()) if 2**i < most] + [most] * (most > 1):
            shares = [
                pass_at_k(len(one), sum(score >= threshold for score in one), k)
                for one in known
                if len(one) >= k
            ]
            passes[str(k)] = _estimate(as_floats(shares), share=True) | {"prompts": len(shares)}
    return {
        "prompts": len(answers),
        "responses": sum(len(a.scores) for a in answers.values()),
        "failed": sum(len(a.scores) for a in answers.values()) - len(scores),
        "mean": _estimate(as_floats([np.mean(one) for one in known]), share=binary),
        "pass": passes,
    }


def difference(one: ByPrompt, other: ByPrompt) -> dict[str, Any]:
    """Mean score of one model less that of another, over the prompts that both have scores of.

    With its 95 % interval, and the p of a paired sign-flip test (Fisher's randomisation test):
    how often the difference would be as large if each prompt's were as likely the other way round.
    """
    both = [uid for uid, a in one.items() if a.known and uid in other and other[uid].known]
    gaps = as_floats([np.mean(one[uid].known) - np.mean(other[uid].known) for uid in both])
    return {"prompts": len(both), **_estimate(gaps), "p": sign_flip_p(gaps)}


def sign_flip_p(gaps: Floats, seed: int = 0) -> float | None:
    """Two-sided p that paired differences are centred on 0; exact for a few, else sampled."""
    if not len(gaps):
        return None
    gaps = gaps[gaps != 0]
    found = abs(gaps.sum()) - 1e-9
    if len(gaps) <= MOST_EXACT:
        flips = 1 - 2 * (np.arange(2 ** len(gaps))[:, None] >> np.arange(len(gaps)) & 1)
        return float(np.mean(np.abs(flips @ gaps) >= found))
    random = np.random.default_rng(seed)
    rows = max(1, AT_ONCE // len(gaps))
    larger, tried = 0, 0
    while tried < FLIPS:
        flips = random.integers(0, 2, (min(rows, FLIPS - tried), len(gaps)), dtype=np.int8) * 2 - 1
        larger += int((np.abs(flips @ gaps) >= found).sum())
        tried += len(flips)
    return (larger + 1) / (tried + 1)


def _estimate(values: Floats, *, share: bool = False) -> dict[str, Any]:
    def mean(rows: Any) -> float | None:
        return float(values[rows].mean()) if len(values) else None

    return asdict(bootstrap(mean, len(values), share=share))


def compare(models: Sequence[tuple[str, ByPrompt]], threshold: float | None) -> dict[str, Any]:
    """The facts of every model by data_source, and the first one's difference from each other."""
    facts = [
        {"name": name, "sources": {s: facts_of(a, threshold) for s, a in sources_of(all_).items()}}
        for name, all_ in models
    ]
    (first, mine), *others = models
    differences = [
        {
            "of": first,
            "from": name,
            "sources": {s: difference(a, theirs) for s, a in sources_of(mine).items()},
        }
        for name, theirs in others
    ]
    return {"models": facts, "differences": differences}


def rankings(rows: Sequence[Answered], scores: Sequence[Score]) -> dict[str, Any] | None:
    """How rankings move against the scores that the rows had; None where fewer than two compare.

    `within` is the mean rank correlation among the responses to one prompt (of one step), which is
    what a group estimator learns from, `turned` the share of their pairs whose order is reversed.
    """
    pairs = [
        (row.record.get("step"), row.rollout.prompt.uid, float(row.record["score"]), value)
        for row, score in zip(rows, scores, strict=True)
        if _is_number(row.record.get("score")) and (value := judged(score)) is not None
    ]
    if len(pairs) < 2:
        return None
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    by_step: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for step, uid, before, now in pairs:
        groups[step, uid].append((before, now))
        by_step[step].append((before, now))
    within = [r for group in groups.values() if (r := _agreement(group)) is not None]
    apart = [
        (a[0] - b[0]) * (a[1] - b[1])
        for group in groups.values()
        for a, b in combinations(group, 2)
        if a[0] != b[0] and a[1] != b[1]
    ]
    return {
        "rows": len(pairs),
        "agreement": _agreement([pair[2:] for pair in pairs]),
        "within": float(np.mean(within)) if within else None,
        "groups": len(within),
        "turned": float(np.mean([product < 0 for product in apart])) if apart else None,
        "steps": [
            {
                "step": step,
                "rows": len(found),
                "before": float(np.mean([before for before, _ in found])),
                "now": float(np.mean([now for _, now in found])),
                "agreement": _agreement(found),
            }
            for step, found in by_step.items()
        ],
    }


def _agreement(pairs: Sequence[tuple[float, float]]) -> float | None:
    before, now = zip(*pairs, strict=True)
    return spearman(before, now)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
