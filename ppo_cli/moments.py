"""Exact mean and spread of numbers over a whole run.

Sums are exact, so that neither the order in which numbers came nor a stop and a resume can
change a bit of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TINY = 1e-6  # a spread below this share of the mean (or of 1) is rounding


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers seen so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Moments:
        """The moments of some numbers; None is none."""
        known = [v for v in values if v is not None]
        if not known:
            return cls()
        mean = math.fsum(known) / len(known)
        return cls(len(known), mean, math.fsum((v - mean) ** 2 for v in known))

    def merge(self, other: Moments) -> Moments:
        """The moments of both together (Chan et al. 1983, eq. 1.5)."""
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        between = gap * gap * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def std(self) -> float:
        """Spread with divisor n."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def varies(self) -> bool:
        """Whether there is more spread than rounding makes."""
        return self.std > TINY * max(1.0, abs(self.mean))

    def state_dict(self) -> dict[str, Any]:
        """Three numbers, exact in JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Moments:
        """Take back what `state_dict` gave; nothing was seen where it holds nothing."""
        return cls(**state)


@dataclass(frozen=True)
class Affine:
    """A scaling: slope x (raw - centre)."""

    centre: float = 0.0
    slope: float = 1.0

    def of(self, raw: float) -> float:
        """The scaled value."""
        return self.slope * (raw - self.centre)


def by_moments(moments: Moments, otherwise: float = 0.0) -> Affine:
    """To mean 0 and spread 1; without any spread, `otherwise` is the slope."""
    return Affine(moments.mean, 1 / moments.std if moments.varies else otherwise)


def clipped(value: float, most: float | None) -> float:
    """The value between minus and plus `most`."""
    return value if most is None else max(-most, min(most, value))


def correlation(xs: Sequence[float | None], ys: Sequence[float | None]) -> float | None:
    """Pearson's over the pairs that are whole; None where one of the two does not vary."""
    pairs = [(a, b) for a, b in zip(xs, ys, strict=True) if a is not None and b is not None]
    x, y = Moments.of(a for a, _ in pairs), Moments.of(b for _, b in pairs)
    if not (x.varies and y.varies):
        return None
    both = math.fsum((a - x.mean) * (b - y.mean) for a, b in pairs)
    return both / math.sqrt(x.squares * y.squares)
