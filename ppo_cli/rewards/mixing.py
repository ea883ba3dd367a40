"""From the parts of a round's scores to one score each: scale, clip, weigh, sum.

Pure: a round goes in, scores and the next running statistics come out. A round is seen as a
whole, in a fixed order, so that the same rollouts give the same bits whenever their parts came."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ppo_cli.config.mixture import MixPart
from ppo_cli.moments import Affine, Moments, by_moments, clipped
from ppo_cli.records import Part, PlacedReward, Rollout, Score
from ppo_cli.rewards.base import RoundKind

GROUP_EPS = 1e-6  # as in GRPO, where a group's spread divides too


def fixed(part: MixPart) -> Affine:
    """The scaling that a part's own numbers give: `mean` and `std`, where they are set."""
    return Affine(part.mean or 0.0, 1 / (part.std or 1.0))


def by_group(raws: Sequence[float], groups: Sequence[Hashable]) -> dict[Hashable, Affine]:
    """Mean 0 and spread 1 within each group, divisor n - 1; a group of one comes to 0.

    Parts are normalised before they are summed, so that none vanishes in another's spread
    (GDPO, Liu et al. 2026, arXiv 2601.05242).
    """
    members: dict[Hashable, list[float]] = defaultdict(list)
    for raw, group in zip(raws, groups, strict=True):
        members[group].append(raw)
    return {group: _within(values) for group, values in members.items()}


def _within(values: Sequence[float]) -> Affine:
    m = Moments.of(values)
    if not m.varies:
        return Affine(m.mean, 0.0)
    return Affine(m.mean, 1 / (math.sqrt(m.squares / (m.count - 1)) + GROUP_EPS))


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


CLOSED = Score(None, "its gate is closed")  # the mark of a part that was not asked


@dataclass(frozen=True)
class Memory:
    """What scalings remember, by part: the run so far, and the first validation.

    Validations are scaled by the first one's moments, so that they compare with each other.
    `groups` holds the scalings of the last step's groups, for their greedy baselines.
    """

    running: Mapping[str, Moments] = field(default_factory=dict)
    anchor: Mapping[str, Moments] = field(default_factory=dict)
    groups: Mapping[str, Mapping[Hashable, Affine]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mixed:
    """A round's scores in its order, each part's column, and what to remember."""

    scores: tuple[Score, ...]
    columns: Mapping[str, Column]
    memory: Memory


@dataclass(frozen=True)
class Column:
    """One part over a round: None where it failed or was not asked."""

    part: MixPart
    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    slopes: tuple[float, ...]
    gated: int = 0
    failed: int = 0


def mix(
    parts: Sequence[MixPart],
    rollouts: Sequence[Rollout],
    given: Sequence[Mapping[str, Score]],
    kind: RoundKind,
    memory: Memory,
) -> Mixed:
    """Mix a round; `given` has each rollout's scores by part, CLOSED where a gate was shut."""
    columns: dict[str, Column] = {}
    for part in parts:
        scores = [scores_of[part.name] for scores_of in given]
        columns[part.name], memory = _column(part, rollouts, scores, kind, memory)
    mixed = [_total(parts, columns, i, scores_of) for i, scores_of in enumerate(given)]
    return Mixed(tuple(mixed), columns, memory)


def _column(
    part: MixPart,
    rollouts: Sequence[Rollout],
    scores: Sequence[Score],
    kind: RoundKind,
    memory: Memory,
) -> tuple[Column, Memory]:
    raw = [s.value for s in scores]
    groups = [r.prompt.uid for r in rollouts]
    # An imputed value is scaled like others, but teaches nothing.
    known = [(v, g) for v, g, s in zip(raw, groups, scores, strict=True)
             if v is not None and s.judged]  # fmt: skip
    scale_of, memory = _scales(part, known, kind, memory)
    scaled: list[float | None] = []
    slopes: list[float] = []
    for value, group in zip(raw, groups, strict=True):
        scale = scale_of.get(group, scale_of.get(None, Affine(slope=0.0)))
        x = None if value is None else scale.of(value)
        if x is not None and part.scaling == "sigmoid":
            x = sigmoid(x)
        scaled.append(None if x is None else clipped(x, part.bound))
        slopes.append(_slope(part, scale, x))
    shut = [i for i, s in enumerate(scores) if s is CLOSED]
    least = _least(part, scaled)
    for i in shut:
        scaled[i] = least
    failed = sum(v is None for v in raw) - len(shut)
    return Column(part, tuple(raw), tuple(scaled), tuple(slopes), len(shut), failed), memory


def _scales(
    part: MixPart, known: Sequence[tuple[float, str]], kind: RoundKind, memory: Memory
) -> tuple[dict[Hashable, Affine], Memory]:
    """The scaling of each group; under None, that of all others."""
    name, values = part.name, [value for value, _ in known]
    if part.scaling in ("none", "affine", "sigmoid"):
        return {None: fixed(part)}, memory
    if kind == "validation":
        anchor = memory.anchor.get(name) or Moments.of(values)
        if anchor.count:
            memory = replace(memory, anchor={**memory.anchor, name: anchor})
        # A rule that nothing has fulfilled yet must count as soon as something does.
        return {None: by_moments(anchor, otherwise=1.0)}, memory
    if part.scaling == "group":
        if kind == "baseline":
            return dict(memory.groups.get(name, {})), memory
        found = by_group(values, [group for _, group in known])
        return found, replace(memory, groups={**memory.groups, name: found})
    running = memory.running.get(name, Moments())
    if kind == "train":
        running = running.merge(Moments.of(values))
        memory = replace(memory, running={**memory.running, name: running})
    return {None: by_moments(running)}, memory


def _least(part: MixPart, scaled: Sequence[float | None]) -> float:
    """What a closed gate counts as: whatever adds least to the total, 0 or one of the round."""
    known = [0.0, *(x for x in scaled if x is not None)]
    return min(known) if part.weight >= 0 else max(known)


def _slope(part: MixPart, scale: Affine, x: float | None) -> float:
    """By what a share of the raw score is multiplied: the scaling's slope where the score lies."""
    if part.scaling != "sigmoid" or x is None:
        return scale.slope
    return scale.slope * x * (1 - x)


def _total(
    parts: Sequence[MixPart], columns: Mapping[str, Column], row: int, given: Mapping[str, Score]
) -> Score:
    """The score of one rollout."""
    lost = [p for p in parts if columns[p.name].scaled[row] is None]
    shown = _shown(parts, columns, row, given)
    info = {p.name: _facts(given[p.name]) for p in parts if _facts(given[p.name])}
    details: dict[str, Any] = {"mixture": info} | _imputed(given)
    reason = "; ".join(f"{n}: {s.reason}" for n, s in given.items() if s.reason)
    there = [p for p in parts if p not in lost]
    left = math.fsum(abs(p.weight) for p in there)
    fatal = next((p for p in lost if p.on_failure == "fail" or not left), None)
    if fatal is not None:
        return Score(None, f"{fatal.name}: {given[fatal.name].failure}", reason, shown, details)
    # Those that are left share the weight of the lost ones.
    share = math.fsum(abs(p.weight) for p in parts) / left if lost else 1.0
    total = math.fsum(share * p.weight * (columns[p.name].scaled[row] or 0.0) for p in there)
    steps = tuple(
        PlacedReward(s.end, share * p.weight * columns[p.name].slopes[row] * s.value, s.unit)
        for p in there
        for s in given[p.name].steps
    )
    return Score(total, "", reason, shown, details, steps)


def _facts(score: Score) -> dict[str, Any]:
    """What a part's source said, and why it failed: the sample may go on without it."""
    failed = {"failure": score.failure} if score.failure and score is not CLOSED else {}
    return {**score.info, **failed}


def _shown(
    parts: Sequence[MixPart], columns: Mapping[str, Column], row: int, given: Mapping[str, Score]
) -> dict[str, Part]:
    """Every part, and below it what its source only reports."""
    shown: dict[str, Part] = {}
    for p in parts:
        column = columns[p.name]
        shown[p.name] = Part(column.raw[row], column.scaled[row])
        for name, inner in given[p.name].parts.items():
            if inner.scaled is None:
                own = name.removeprefix(f"{p.name}.")
                shown[f"{p.name}.{own}"] = inner
    return shown


def _imputed(given: Mapping[str, Score]) -> dict[str, Any]:
    found = {n: s.info["imputed"] for n, s in given.items() if "imputed" in s.info}
    return {"imputed": "; ".join(f"{n}: {why}" for n, why in found.items())} if found else {}
