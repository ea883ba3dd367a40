"""Raw scores of one part of a mixture, brought to a scale: pure arithmetic, no tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from ppo_cli.config.mixture import MixPart
from ppo_cli.moments import Affine, Moments

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
