"""Numbers with their 95 % interval: means by bootstrap, shares by Wilson's formula.

Also correlations and repetition, which training and its reports measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

RESAMPLES = 1000
LEVEL = 0.95
MIN_PAIRS = 3  # of a correlation
SPLITS = 20  # of the rows, half of which choose


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; fields are None where undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None


def bootstrap(
    statistic: Callable[[NDArray[np.intp]], float | None],
    count: int,
    *,
    resamples: int | None = None,
    share: bool = False,
) -> Estimate:
    """Value over all rows, with the percentile interval over resampled rows.

    If all resamples agree, that interval has no width, which 12 of 12 does not justify: a
    `share` of rows then gets Wilson's interval, anything else none.

    `statistic` takes row numbers, so that all columns of a row stay together. Undefined
    resamples are left out; if more than half are, there is no interval.
    """
    import numpy as np

    value = statistic(np.arange(count))
    if value is None:
        return Estimate(None)
    random = np.random.default_rng(0)
    times = RESAMPLES if resamples is None else resamples
    # Resample rows with replacement (Efron & Tibshirani 1993, percentile interval).
    drawn = [statistic(random.integers(0, count, count)) for _ in range(times)]
    defined = [v for v in drawn if v is not None]
    # Too many undefined resamples would bias the interval.
    if len(defined) * 2 < times:
        return Estimate(value)
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if high - low <= 1e-12:
        return wilson(value, count) if share else Estimate(value)
    return Estimate(value, float(low), float(high))


def wilson(share: float, count: int) -> Estimate:
    """Wilson's score interval for a share of `count` rows (Wilson 1927)."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    spread = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    half = spread / (1 + z * z / count)
    return Estimate(share, max(0.0, middle - half), min(1.0, middle + half))


def correlate(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None for fewer than three pairs, or if a side is constant."""
    import numpy as np

    if len(left) < MIN_PAIRS or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def repeated_share(items: Sequence[Any], n: int) -> float:
    """Return the share of n-grams that occurred before in a sequence; 0 if it is shorter than n."""
    # Each n-gram counts once; the others are repetitions.
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def estimate_mean(values: ArrayLike, *, share: bool = False) -> Estimate:
    """Return the mean of values with its interval; `share` as in `bootstrap`.

    A share of rows that are 0 or 1 has Wilson's interval: near 0 and 1 that of a bootstrap holds
    the truth too rarely (0.86 to 0.89 of 0.95).
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if share and len(array) and not set(array.tolist()) - {0.0, 1.0}:
        return wilson(float(array.mean()), len(array))

    def mean(rows: NDArray[np.intp]) -> float | None:
        return float(array[rows].mean()) if len(array) else None

    return bootstrap(mean, len(array), share=share)


def estimate_best(gains: ArrayLike) -> Estimate:
    """Return the gain of the best of several candidates, without what choosing it adds by chance.

    `gains` (candidates, rows) has the gain of each row. The best mean is the best partly by luck:
    of 20 candidates that gain nothing, it is above its 95 % interval in one of five cases. So one
    half of the rows chooses, the other measures, in SPLITS splits, both ways (cross-fitting). The
    interval is Student's, with the deviation of the best candidate's gains: an average over
    splits varies less than what it estimates. In simulations with 1 to 20 candidates and 32 to 256
    rows it held the truth in 0.93 to 0.97 of the cases.
    """
    import numpy as np

    array = np.asarray(gains, dtype=np.float64)
    rows, random = array.shape[1], np.random.default_rng(0)
    measured = np.zeros(rows)
    for _ in range(SPLITS):
        order = random.permutation(rows)
        for choosing, measuring in (
            (order[: rows // 2], order[rows // 2 :]), (order[rows // 2 :], order[: rows // 2]),
        ):  # fmt: skip
            best = array[:, choosing].mean(1).argmax()
            measured[measuring] += array[best, measuring] / SPLITS
    deviation = array[array.mean(1).argmax()].std(ddof=1)
    half = student_quantile((1 + LEVEL) / 2, rows - 1) * float(deviation) / math.sqrt(rows)
    value = float(measured.mean())
    return Estimate(value, value - half, value + half)


def student_quantile(level: float, freedom: int) -> float:
    """Return a quantile of Student's t (Abramowitz and Stegun 26.7.5), to 0.01 from 5 on."""
    z = NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
