"""What is told of a scored file: counts, scale, parts, cost, and its best and worst rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.records import Score
from ppo_cli.redact import redact
from ppo_cli.trust.part_facts import part_facts
from ppo_cli.trust.rows import Answered
from ppo_cli.trust.score import Scoring, cause_of, cut, judged
from ppo_cli.trust.spending import spending

MOST_LEVELS = 12
SHOWN = 3


def summarise(
    rows: Sequence[Answered], scoring: Scoring, settings: RewardSettings
) -> dict[str, Any]:
    """Everything that the screen and `--json` say of a scored file."""
    scores = scoring.scores
    values = [value for s in scores if (value := judged(s)) is not None]
    return {
        "rows": len(rows),
        "scored": len(values),
        "failed": dict(Counter(cause_of(s) for s in scores if judged(s) is None).most_common()),
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(values)) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "histogram": histogram(values),
        **part_facts(settings, [row.rollout for row in rows], scores),
        **spending(scores, scoring),
        **_ends(rows, scores),
        "stopped": redact(scoring.stopped),
    }


def histogram(values: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by level, highest first; scores of many values fall into ten equal bins."""
    known = [v for v in values if math.isfinite(v)]
    levels = Counter(round(v, 6) for v in known)
    if not known or len(levels) <= MOST_LEVELS:
        return [
            {"from": level, "to": level, "count": levels[level]}
            for level in sorted(levels, reverse=True)
        ]
    counts, edges = np.histogram(known, bins=10)
    return [
        {"from": float(edges[i]), "to": float(edges[i + 1]), "count": int(counts[i])}
        for i in reversed(range(len(counts)))
    ]


def _ends(rows: Sequence[Answered], scores: Sequence[Score]) -> dict[str, Any]:
    order = sorted(
        (i for i, s in enumerate(scores) if judged(s) is not None),
        key=lambda i: (scores[i].value, i),
    )
    half = order[len(order) // 2 :]
    return {
        "best": [_example(rows[i], scores[i]) for i in reversed(half[-SHOWN:])],
        "worst": [_example(rows[i], scores[i]) for i in order[: min(SHOWN, len(order) // 2)]],
    }


def _example(row: Answered, score: Score) -> dict[str, Any]:
    return {
        "row": str(row.place),
        "score": score.value,
        "response": cut(row.rollout.text),
        "reason": cut(score.reason),
    }
