"""What the parts of a reward came to over a file: their scale, share of the spread, and company.

`raw` is what a mixture scales: the score of a reward that stands alone, each part's own in one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ppo_cli.config.mixture import MixPart, mixture_of
from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.moments import TINY, Moments, correlation
from ppo_cli.records import Rollout, Score
from ppo_cli.trust.score import NOT_ASKED, judged
from ppo_cli.trust.sources import kind_of

Values = Sequence[float | None]
DROWNED = 1 / 3  # a share this small against the part's weight is as good as none


@dataclass(frozen=True)
class Column:
    """One part over all rows: None where it failed or was not asked."""

    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    failed: int = 0
    gated: int = 0


def column_of(scores: Sequence[Score], name: str | None) -> Column:
    """The scores of a part by its name; without one, those of the reward itself."""
    if name is None:
        raw = tuple(judged(score) for score in scores)
        lost = sum(v is None and s.failure != NOT_ASKED for v, s in zip(raw, scores, strict=True))
        return Column(raw, raw, lost)
    given = [score.parts.get(name) for score in scores]
    put_in = [_put_in(score, name) for score in scores]
    raw = tuple(None if p is None or lost else p.raw for p, lost in zip(given, put_in, strict=True))
    scaled = tuple(None if p is None else p.scaled for p in given)
    failed = sum(p is not None and p.scaled is None for p in given) + sum(put_in)
    gated = sum(p is not None and p.raw is None and p.scaled is not None for p in given)
    return Column(raw, scaled, failed, gated)


def _put_in(score: Score, name: str) -> bool:
    """Whether a part's value is one put in for want of a verdict."""
    mixed = score.info.get("mixture")
    own = mixed.get(name) if isinstance(mixed, Mapping) else None
    return isinstance(own, Mapping) and "imputed" in own


def part_facts(
    settings: RewardSettings, rollouts: Sequence[Rollout], scores: Sequence[Score]
) -> dict[str, Any]:
    """Every part in numbers, what its source only reports, and what goes together."""
    lengths = [float(len(rollout.text)) for rollout in rollouts]
    parts = mixture_of(settings)
    columns = columns_of(settings, scores)
    found = {name: _facts(column, lengths) for name, column in columns.items()}
    for name, facts in _in_mixture(parts, columns).items():
        found[name] |= facts
    total = [judged(score) for score in scores]
    return {
        "parts": found,
        "reported": _reported(scores, columns),
        "length": together(total, lengths),
        "correlations": [
            {"parts": [one, other], "value": value}
            for one, other in combinations(columns, 2)
            if (value := together(columns[one].raw, columns[other].raw)) is not None
        ],
        "remarks": _remarks(parts, found),
    }


def columns_of(settings: RewardSettings, scores: Sequence[Score]) -> dict[str, Column]:
    """The parts of a mixture by name; one column, under its kind, for a reward alone."""
    parts = mixture_of(settings)
    if not parts:
        return {kind_of(settings): column_of(scores, None)}
    return {part.name: column_of(scores, part.name) for part in parts}


def _facts(column: Column, lengths: Sequence[float]) -> dict[str, Any]:
    return {
        "scored": len(_known(column.raw)),
        "failed": column.failed,
        **({"gated": column.gated} if column.gated else {}),
        **_moments(column.raw),
        "length": together(column.raw, lengths),
        "affine": affine_line(column.raw),
    }


def _moments(values: Values) -> dict[str, float | None]:
    known = _known(values)
    moments = Moments.of(known)
    return {
        "mean": moments.mean if known else None,
        "std": moments.std if known else None,
        "min": min(known, default=None),
        "max": max(known, default=None),
    }


def affine_line(values: Values) -> str | None:
    """The settings that bring a part to this file's scale; None without a spread."""
    moments = Moments.of(_known(values))
    if moments.std <= TINY:
        return None
    # The mean is told as finely as the spread: a scale of 0.01 around 20 keeps its centre.
    digits = max(0, 2 - math.floor(math.log10(moments.std)))
    mean = round(moments.mean, digits) + 0.0
    return f"scaling: affine, mean: {_plain(mean)}, std: {_plain(float(f'{moments.std:.3g}'))}"


def _plain(number: float) -> str:
    """A number as YAML reads it: with a point wherever there is an exponent."""
    text = f"{number:.12g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _in_mixture(
    parts: Sequence[MixPart], columns: Mapping[str, Column]
) -> dict[str, dict[str, Any]]:
    """Weight asked for, and share of the spread that came of it, as in a run's metrics."""
    spreads = {
        p.name: abs(p.weight) * Moments.of(_known(columns[p.name].scaled)).std for p in parts
    }
    whole, weights = math.fsum(spreads.values()), math.fsum(abs(p.weight) for p in parts)
    return {
        p.name: {
            "scaling": p.scaling,
            "weight_given": p.weight,
            "weight": abs(p.weight) / weights if weights else None,
            "share": spreads[p.name] / whole if whole > TINY else None,
        }
        for p in parts
    }


def _reported(
    scores: Sequence[Score], columns: Mapping[str, Column]
) -> dict[str, dict[str, float | None]]:
    """What sources only report, such as the objectives of a reward model."""
    names = dict.fromkeys(
        name
        for score in scores
        for name, part in score.parts.items()
        if part.scaled is None and name not in columns
    )
    raw = {n: [s.parts[n].raw if n in s.parts else None for s in scores] for n in names}
    return {name: _moments(values) for name, values in raw.items()}


def _remarks(parts: Sequence[MixPart], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A part that another one drowns, or that says the same of all rows."""
    said = []
    for part in parts:
        facts = found[part.name]
        if facts["scored"] > 1 and facts["std"] <= TINY:
            said.append(f"{part.name} gives every row the same score, so it decides nothing here.")
        elif facts["share"] is not None and facts["share"] < DROWNED * facts["weight"]:
            loud = max(parts, key=lambda p: found[p.name]["share"] or 0.0).name
            said.append(
                f"{part.name} is drowned: it makes {facts['share']:.0%} of the spread, its weight "
                f"says {facts['weight']:.0%}. Set the scaling of {loud} to zscore or affine."
            )
    return said


def together(xs: Values, ys: Values) -> float | None:
    """Correlation over the rows that both have; None where one of them does not vary."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]
    return correlation([x for x, _ in pairs], [y for _, y in pairs])


def _known(values: Values) -> list[float]:
    return [v for v in values if v is not None]
