"""How well values predict returns, over all tokens that train."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

TENTHS = 10


def explained_variance(returns: np.ndarray, values: np.ndarray) -> float:
    """Return 1 - Var(returns - values) / Var(returns); NaN if the returns do not vary."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / spread if spread > 1e-12 else math.nan


def measure_critic(
    values_BT: np.ndarray, returns_BT: np.ndarray, mask_BT: np.ndarray
) -> dict[str, Any]:
    """Return the sums of a step; empty if no token counts.

    `positions` has [responses, tokens, squares of returns, squares of errors] of the tokens 1, 2,
    3-4, 5-8, 9-16 …: sums of squared deviations from the mean of the bucket, where an error is
    return - value. `tenths` has [tokens, mean value, mean return] of ten equal parts of the tokens,
    ordered by value.
    """
    if not mask_BT.any():
        return {}
    values_BT, returns_BT = values_BT.astype(np.float64), returns_BT.astype(np.float64)
    positions, start = [], 0
    while start < mask_BT.shape[1]:
        end = max(1, 2 * start)
        counts = mask_BT[:, start:end]
        returns = returns_BT[:, start:end][counts]
        errors = returns - values_BT[:, start:end][counts]
        squares = [_round(x.var() * x.size) if x.size else 0.0 for x in (returns, errors)]
        positions.append([int(counts.any(1).sum()), int(counts.sum()), *squares])
        start = end
    values, returns = values_BT[mask_BT], returns_BT[mask_BT]
    parts = np.array_split(values.argsort(kind="stable"), TENTHS)
    tenths = [
        [part.size, _round(values[part].mean()), _round(returns[part].mean())]
        for part in parts
        if part.size
    ]
    return {"positions": positions, "tenths": tenths}


def _round(value: float) -> float:
    return float(f"{value:.5g}")
