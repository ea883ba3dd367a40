"""From scores, sums and counts to the numbers that a user reads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppo_cli.records import Scored


class StepSums:
    """Adds up what optimizer steps return; means are taken once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Add the sums and counts of one optimizer step."""
        for name, (total, count) in sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + count)

    def total(self, name: str) -> float:
        """The sum under a name, 0 when it never came."""
        return self._sums.get(name, (0.0, 0.0))[0]

    def means(self) -> dict[str, float]:
        """All quantities as means; counters of events stay sums."""
        counters = ("skipped_steps", "empty_minibatches", "stopped_early")
        return {
            name: total if name.endswith(counters) else total / count
            for name, (total, count) in self._sums.items()
            if count
        }


def staleness_metrics(scored: Sequence[Scored], version: int) -> dict[str, float]:
    """How many updates old the weights are that the responses were sampled with."""
    ages = np.array([version - s.rollout.weight_version for s in scored], dtype=float)
    return {
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": float(ages.max()),
    }


def score_metrics(scored: Sequence[Scored], prefix: str = "") -> dict[str, float]:
    """Reward and length statistics; failed scores are counted and left out of the rest.

    With a prefix (validation) the mean of each data_source is given too, and an accuracy when
    every score is 0 or 1.
    """
    values = np.array([s.score.value for s in scored if s.score.judged], dtype=float)
    lengths = np.array([len(s.rollout.token_ids) for s in scored], dtype=float)
    cut = [s.rollout.finish_reason == "length" for s in scored]
    metrics = {
        f"{prefix}response_length_mean": float(lengths.mean()),
        f"{prefix}response_length/max": float(lengths.max()),
        f"{prefix}response_length/clip_ratio": float(np.mean(cut)),
        f"{prefix}score/failed": float(len(scored) - len(values)),
        f"{prefix}score/failed_share": 1 - len(values) / len(scored),
    }
    if len(values):
        metrics |= {
            f"{prefix}reward_mean": float(values.mean()),
            f"{prefix}score/std": float(values.std()),
            f"{prefix}score/min": float(values.min()),
            f"{prefix}score/max": float(values.max()),
        }
        # Neither an opinion nor a weighted sum is an accuracy.
        opinion = any({"judge_reply", "mixture"} & s.score.info.keys() for s in scored)
        if prefix and not opinion and np.isin(values, (0.0, 1.0)).all():
            metrics[f"{prefix}accuracy"] = float(values.mean())
    metrics |= _part_metrics(scored, prefix)
    return metrics | (_source_metrics(scored, prefix) if prefix else {})


def recent(lines: Sequence[Mapping[str, Any]], most: int = 100) -> dict[str, float]:
    """Mean and standard deviation of each main metric over the last `most` training steps.

    Keys are `<metric>_mean` and `<metric>_std`; main metrics are those without a `/`. What a
    step did not measure is left out. The deviation is that of the values themselves (no n - 1).
    """
    steps = [line for line in lines if line["step"] > 0][-most:]
    found: dict[str, float] = {}
    for name in sorted({key for line in steps for key in line if "/" not in key} - {"step"}):
        values = [float(line[name]) for line in steps if line.get(name) is not None]
        if values:
            found[f"{name}_mean"] = float(np.mean(values))
            found[f"{name}_std"] = float(np.std(values))
    return found


def mixture_parts(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The raw mean of each part of a mixture, by name; nothing where rewards are not mixed."""
    start, end = f"{prefix}reward/", "/weight"
    names = [k[len(start) : -len(end)] for k in metrics if k.startswith(start) and k.endswith(end)]
    means = {name: metrics.get(f"{start}{name}") for name in names}
    return {name: float(value) for name, value in means.items() if value is not None}


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """1 - Var(returns - values) / Var(returns); NaN when the returns do not vary."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / spread if spread > 1e-12 else math.nan


def _part_metrics(scored: Sequence[Scored], prefix: str) -> dict[str, float]:
    parts: dict[str, list[float]] = defaultdict(list)
    for s in scored:
        for name, part in s.score.parts.items():
            if part.raw is not None and s.score.judged:
                parts[f"{prefix}reward/{name}"].append(part.raw)
    return {name: float(np.mean(values)) for name, values in parts.items()}


def _source_metrics(scored: Sequence[Scored], prefix: str) -> dict[str, float]:
    sources: dict[str, list[float]] = defaultdict(list)
    for s in scored:
        if s.score.value is not None and s.score.judged:
            sources[s.rollout.prompt.data_source or "unnamed"].append(s.score.value)
    return {
        f"{prefix}reward_mean/{source}": float(np.mean(values))
        for source, values in sources.items()
    }
