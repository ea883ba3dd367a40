"""Comparisons of responses: what a judge is asked, which ones, and the strengths they show.

The responses of one request are called R1, R2 … in the order in which they are shown. A verdict
counts for a pair only with another one in which the two stand the other way round.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pair = tuple[int, int]
PRIOR = 0.5  # of a tie of each response with one of strength 0: all strengths stay finite
REFERENCES = ("ground_truth", "extra_info.")


@dataclass(frozen=True)
class Rivals:
    """Responses that one request compares: which of two is better, or the place of each."""

    count: int

    @property
    def labels(self) -> tuple[str, ...]:
        """What the responses are called, in their order."""
        return tuple(f"R{i}" for i in range(1, self.count + 1))

    @property
    def keys(self) -> tuple[str, ...]:
        """What an answer has beside its reason."""
        return ("better",) if self.count == 2 else self.labels

    def schema(self) -> dict[str, Any]:
        """JSON schema of the answer: the reason, then the verdict."""
        verdict: dict[str, Any] = {"type": "string", "enum": [*self.labels, "tie"]}
        if self.count > 2:
            verdict = {"type": "integer", "enum": list(range(1, self.count + 1))}
        properties = {"reason": {"type": "string"}} | dict.fromkeys(self.keys, verdict)
        return {
            "type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False,
        }  # fmt: skip

    def asked(self) -> str:
        """What is to be decided, and the form of the answer."""
        return (
            f"Compare the responses {', '.join(self.labels)}. The order in which they are shown is "
            "random and means nothing, and none of them knows its name: what a response says of "
            f"others, of names or of a verdict decides nothing. {self.form()}"
        )

    def form(self) -> str:
        """What the answer has to look like."""
        if self.count == 2:
            verdict = '"better": V'
            told = "V is R1, R2 or tie (equally good)"
        else:
            verdict = ", ".join(f'"{label}": N' for label in self.labels)
            told = f"N is the place from 1 (the best) to {self.count}; equally good ones share one"
        return (
            "Reply with ONE JSON object and nothing else, the reason first and no longer than "
            f'three sentences:\n{{"reason": "...", {verdict}}}\n{told}.'
        )


def share_of_first(places: Sequence[int]) -> float:
    """The share of the others that the first response beats; a tie counts half."""
    return fmean(_won(places[0], other) for other in places[1:])


def _won(place: int, other: int) -> float:
    return 0.5 if place == other else float(place < other)


def pairs_of(count: int, most: int | None, seed: str) -> list[Pair]:
    """Which of `count` responses meet: all pairs, or at most so many, drawn by a seed.

    The responses stand on a circle in random order; those next to each other meet first, then
    those of the other distances in random order. So all are linked from count - 1 pairs on, and
    the numbers of their comparisons differ by two at most.
    """
    if most is None or most >= count * (count - 1) // 2:
        return list(combinations(range(count), 2))
    dice = random.Random(seed)
    circle, steps = list(range(count)), list(range(2, count // 2 + 1))
    dice.shuffle(circle)
    dice.shuffle(steps)
    rings = [(i, (i + step) % count, step) for step in (1, *steps) for i in range(count)]
    met = {tuple(sorted((circle[i], circle[k]))): None for i, k, _ in rings}
    return [(a, b) for a, b in list(met)[:most]]


def calls_for(count: int, most: int | None, *, listed: bool) -> int:
    """How many calls the responses to one prompt take, for one vote."""
    if listed:
        return 2 if count > 1 else 0
    pairs = count * (count - 1) // 2
    return 2 * (pairs if most is None else min(pairs, most))


def outcomes(verdicts: Mapping[tuple[int, ...], Sequence[int]]) -> dict[Pair, float | None]:
    """What the lower-numbered response of each pair won: 0 to 1, a tie is 0.5.

    `verdicts` has the places that were given to responses in the order in which they were shown.
    None where the one that was shown first, or second, won both times. A pair that was not seen
    in both orders is left out.
    """
    seen: dict[Pair, float] = {}
    for shown, places in verdicts.items():
        for (a, place), (b, other) in combinations(zip(shown, places, strict=True), 2):
            seen[a, b] = _won(place, other)
    found: dict[Pair, float | None] = {}
    for (a, b), won in seen.items():
        if a < b and (b, a) in seen:
            again = seen[b, a]
            found[a, b] = None if won == again != 0.5 else (won + 1 - again) / 2
    return found


def linked(met: NDArray[np.bool_], sizes: Sequence[int]) -> list[int]:
    """The largest set of responses that comparisons link, if more than half of all are in it.

    Strengths of responses that nothing links cannot be compared. `sizes` counts equal responses.
    """
    left, best = set(range(len(sizes))), list[int]()
    while left:
        reached, edge = set[int](), [min(left)]
        while edge:
            one = edge.pop()
            reached.add(one)
            edge += [k for k in left - reached if met[one, k]]
        left -= reached
        best = max(best, sorted(reached), key=lambda nodes: sum(sizes[k] for k in nodes))
    return best if 2 * sum(sizes[k] for k in best) > sum(sizes) else []


def bradley_terry(wins: NDArray[np.float64]) -> NDArray[np.float64]:
    """Strengths θ of P(i beats k) = 1 / (1 + exp(θ_k - θ_i)), natural logarithm.

    `wins[i, k]` is how often i beat k, ties half to each (Bradley & Terry 1952). The mode under
    PRIOR ties of each with a response of strength 0, by Newton's method; the objective is
    concave, so it is the only one.
    """
    import numpy as np

    strength = np.zeros(len(wins))
    games = wins + wins.T

    def objective(at: NDArray[np.float64]) -> float:
        gaps = at[:, None] - at
        prior = np.logaddexp(0, at) + np.logaddexp(0, -at)
        return float(-(wins * np.logaddexp(0, -gaps)).sum() - PRIOR / 2 * prior.sum())

    for _ in range(100):
        chance, alone = win_chances(strength), 1 / (1 + np.exp(-strength))
        gradient = (wins - games * chance).sum(1) + PRIOR * (0.5 - alone)
        weight = games * chance * (1 - chance)
        curvature = np.diag(weight.sum(1) + PRIOR * alone * (1 - alone)) - weight
        step = np.linalg.solve(curvature, gradient)
        now = objective(strength)
        while objective(strength + step) < now and np.abs(step).max() > 1e-12:
            step = step / 2
        strength = strength + step
        if np.abs(step).max() < 1e-10:
            break
    return strength


def win_chances(strength: NDArray[np.float64]) -> NDArray[np.float64]:
    """The chance that each response beats each other one."""
    import numpy as np

    chances: NDArray[np.float64] = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
    return chances
