"""A cascade of two judges: one is only asked about responses of which a cheaper one is unsure.

The cheaper judge is unsure if its votes or probabilities spread, or if its score is in a band. A
cheaper judge that gives no verdict on a response counts as unsure of it. A response on which the
judge then fails has no score: the cheaper verdict is kept as information only.

Training corrects the offset and the scale of the cheaper judge, whose scores would otherwise differ
from those of the judge beside them: see `fit_correction`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import LinearRegression, StatisticsError, linear_regression
from typing import Any

from ppo_cli.config.mixture import cheaper_judge
from ppo_cli.config.schema.reward import ApiReward, Cascade, parse_band
from ppo_cli.records import Score
from ppo_cli.rewards.base import RoundKind
from ppo_cli.rewards.judge.calls import JudgeError, Question
from ppo_cli.rewards.judge.client import Counters, judge_label
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.judge.rounds import PendingScore

_ROUNDING = 1e-9
MIN_PAIRS = 50  # responses that both judges have scored, before the cheaper one is corrected
RECENT_PAIRS = 500  # the last ones, from which the correction follows
UNCORRECTED = LinearRegression(slope=1.0, intercept=0.0)


def fit_correction(pairs: Sequence[tuple[float, float]]) -> LinearRegression:
    """Return how the cheaper judge's score x becomes the judge's: intercept + slope x.

    Least squares over pairs (x, y): slope = cov(x, y) / var(x) and
    intercept = mean(y) - slope mean(x).
    Which responses have both scores depends on x (or on its spread), and a regression on x is not
    biased by that. Unchanged without enough pairs, or where the two do not rise together.
    """
    if len(pairs) < MIN_PAIRS:
        return UNCORRECTED
    try:
        correction = linear_regression(*zip(*pairs, strict=True))
    except StatisticsError:  # all scores of the cheaper judge are equal
        return UNCORRECTED
    return correction if correction.slope > 0 else UNCORRECTED


@dataclass(frozen=True)
class Doubt:
    """When a judge is unsure: from this spread of its verdict on, or at scores in this band."""

    spread: float | None = None
    band: tuple[float, float] = (0.0, 1.0)

    @classmethod
    def of(cls, cascade: Cascade) -> Doubt:
        """Read when the cheaper judge is unsure."""
        if cascade.band is not None:
            return cls(band=parse_band(cascade.band))
        return cls(cascade.spread)

    def applies(self, score: float | None, spread: float | None) -> bool:
        """Return whether a judge is unsure: also without a score, or without a known spread."""
        if score is None:
            return True
        if self.spread is not None:
            return spread is None or spread >= self.spread - _ROUNDING
        return self.band[0] - _ROUNDING <= score <= self.band[1] + _ROUNDING


class CascadeReward(JudgeReward):
    """Scores by a cheaper judge where that one is sure, else by the judge itself."""

    def __init__(
        self, api: ApiReward, *, name: str = "judge", environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__(api, name=name, environ=environ)
        cheap = cheaper_judge(api)
        assert cheap is not None, "a cascade has a cheaper judge"
        self._doubt = Doubt.of(api.cascade)
        self._labels = {False: judge_label(cheap), True: judge_label(api)}
        self._begin_counts()
        self._cheap = self._add_judge(cheap, environ)
        # Pairs of earlier steps, what follows from them, and the responses of this step.
        self._pairs: list[tuple[float, float]] = []
        self._correction = UNCORRECTED
        self._entries: list[PendingScore] = []

    def begin_step(self, step: int) -> None:
        """Correct the cheaper judge from now on by the pairs of the steps before."""
        super().begin_step(step)
        self._pairs, self._entries = self._list_pairs(), []
        self._correction = fit_correction(self._pairs)

    def end_round(self, kind: RoundKind = "train") -> None:
        """Note the responses of a training step, whose scores become pairs."""
        self._entries += self._round.entries if kind == "train" else ()
        super().end_round(kind)

    def state_dict(self) -> dict[str, Any]:
        """Return the pairs up to now, and the correction of this step."""
        correction = self._correction.slope, self._correction.intercept
        return super().state_dict() | {"pairs": self._list_pairs(), "correction": correction}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a run of an older version has no pairs."""
        super().load_state_dict(state)
        self._pairs, self._entries = [(x, y) for x, y in state.get("pairs", ())], []
        self._correction = LinearRegression(*state.get("correction", UNCORRECTED))

    def _list_pairs(self) -> list[tuple[float, float]]:
        """Return the recent pairs, in an order that does not depend on who answered first."""
        new = []
        for entry in sorted(self._entries, key=lambda e: (e.rollout.prompt.uid, e.rollout.sample)):
            cheap, escalated = entry.info.get("cheap_score"), entry.info.get("escalated")
            if escalated and cheap is not None and entry.future.done():
                score = None if entry.future.exception() else entry.future.result().value
                new += [] if score is None else [(float(cheap), float(score))]
        return [*self._pairs, *new][-RECENT_PAIRS:]

    async def _ask_judges(
        self, entry: PendingScore, question: Question
    ) -> tuple[Score | None, JudgeError | None]:
        """Return the score of the cheaper judge where it is sure, else that of the judge."""
        # When the judge is asked again after a failure, the cheaper verdict is there already.
        if (cheap := entry.cheap) is None:
            verdict, error = await self._cheap.ask_score(entry.rollout)
            cheap = verdict or Score.failed(f"{error}")
            spread = cheap.info.get("spread", cheap.info.get("vote_spread"))
            escalated = self._doubt.applies(cheap.value, spread)
            entry.cheap = cheap
            entry.info = {
                "decided_by": self._labels[escalated], "escalated": escalated,
                "cheap_score": cheap.value, "cheap_spread": spread,
            }  # fmt: skip
            if escalated:  # otherwise it is the reason of the score
                entry.info["cheap_reason"] = cheap.failure or cheap.reason
            self._first_calls += 1
            self._escalated += escalated
            self._failed += verdict is None
        if not entry.info["escalated"]:
            slope, offset = self._correction
            value = min(max(offset + slope * float(cheap.value or 0.0), 0.0), 1.0)
            return replace(cheap, value=value, info={**cheap.info, **entry.info}), None
        score, error = await self.ask_score(entry.rollout, question)
        if score is None:
            return None, error
        return replace(score, info={**_add_costs(cheap.info, score.info), **entry.info}), None

    def _pop_extra_metrics(
        self, metrics: Mapping[str, float], counters: Sequence[Counters]
    ) -> dict[str, float]:
        """Return the share that went on to the judge, and calls and cost of both judges."""
        strong, cheap = counters
        assert self._cheap.connection.shared is not None
        usd = self._cheap.connection.shared.pop_spending().usd
        first, escalated, failed = self._first_calls, self._escalated, self._failed
        self._begin_counts()
        if not metrics:
            return {}
        others_usd = usd + metrics.get("judge/monitor_cost_usd", 0.0)
        return {
            "judge/escalated": escalated / first if first else 0.0,
            "judge/cheap_failed": float(failed),
            "judge/cheap_calls": float(cheap.calls),
            "judge/strong_calls": float(strong.calls),
            "judge/cheap_cost_usd": usd,
            "judge/strong_cost_usd": metrics["judge/cost_usd"] - others_usd,
            "judge/cheap_scale": self._correction.slope,
            "judge/cheap_offset": self._correction.intercept,
        }

    def _begin_counts(self) -> None:
        self._first_calls = self._escalated = self._failed = 0


def _add_costs(cheap: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a verdict of both judges: the later one's, with the cost of both."""
    if "cached" not in cheap:  # there was no cheaper verdict
        return dict(strong)
    names = ("judge_tokens", "judge_calls", "latency_s", "cost_usd")
    total = {name: cheap[name] + strong[name] for name in names}
    return {**strong, **total, "cached": cheap["cached"] and strong["cached"]}
