"""Mean and standard deviation of numbers over a whole run, in exact sums.

Neither the order of the numbers nor a stop and a resume changes a bit of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TINY = 1e-6  # a deviation below this share of the mean (or of 1) is rounding


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers seen so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Iterable[float | None]) -> Moments:
        """Compute the moments of numbers; None values are ignored."""
        numbers = [v for v in values if v is not None]
        if not numbers:
            return cls()
        # fsum is exact, so the order does not matter.
        mean = math.fsum(numbers) / len(numbers)
        return cls(len(numbers), mean, math.fsum((v - mean) ** 2 for v in numbers))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan et al. 1983, eq. 1.5)."""
        # An empty side has no mean to compare with.
        if not other.count:
            return self
        if not self.count:
            return other
        count = self.count + other.count
        # The formula for two sets, which needs no second pass.
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        between = gap * gap * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def std(self) -> float:
        """Standard deviation with divisor n."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def varies(self) -> bool:
        """Whether the deviation is larger than rounding errors."""
        return self.std > TINY * max(1.0, abs(self.mean))

    def state_dict(self) -> dict[str, Any]:
        """Return the three numbers, exact in JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Moments:
        """Restore what `state_dict` returned; an empty state has no numbers."""
        return cls(**state)


@dataclass(frozen=True)
class Affine:
    """A scaling: slope x (raw - centre)."""

    centre: float = 0.0
    slope: float = 1.0

    def of(self, raw: float) -> float:
        """Scale a value."""
        return self.slope * (raw - self.centre)


def standardise(moments: Moments, otherwise: float = 0.0) -> Affine:
    """Return the scaling to mean 0 and deviation 1; `otherwise`: the slope without deviation."""
    return Affine(moments.mean, 1 / moments.std if moments.varies else otherwise)


def clip(value: float, limit: float | None) -> float:
    """Clip a value to the range from -limit to limit; None: no limit."""
    return value if limit is None else max(-limit, min(limit, value))


def correlation(xs: Sequence[float | None], ys: Sequence[float | None]) -> float | None:
    """Pearson correlation of the complete pairs; None if one of the two does not vary."""
    pairs = [(a, b) for a, b in zip(xs, ys, strict=True) if a is not None and b is not None]
    x, y = Moments.from_values(a for a, _ in pairs), Moments.from_values(b for _, b in pairs)
    if not (x.varies and y.varies):
        return None
    # Covariance, with the sums of squares as its scale.
    both = math.fsum((a - x.mean) * (b - y.mean) for a, b in pairs)
    return both / math.sqrt(x.squares * y.squares)
