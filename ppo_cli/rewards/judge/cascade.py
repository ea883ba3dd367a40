"""A cascade of two judges: one is only asked about responses of which a cheaper one is unsure.

The cheaper judge is unsure if its votes or probabilities spread, or if its score is in a band. A
cheaper judge that gives no verdict on a response counts as unsure of it. A response on which the
judge then fails has no score: the cheaper verdict is kept as information only.

Training corrects the offset and the scale of the cheaper judge, whose scores would otherwise differ
from those of the judge beside them: see `fit_correction`. The correction changes during a run, so
a validation, which is compared with earlier ones, keeps the scores as the judges gave them. What a
round is shows at its end: until then scores that may be corrected wait.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import LinearRegression, fmean, linear_regression
from typing import Any

from ppo_cli.config.mixture import cheaper_judge
from ppo_cli.config.schema.reward import ApiReward, Cascade, parse_band
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import RoundKind
from ppo_cli.rewards.judge.calls import JudgeError, Question
from ppo_cli.rewards.judge.client import Counters, judge_label
from ppo_cli.rewards.judge.placing import place_score
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.judge.rounds import PendingScore

_DIGITS = 9  # of scores and spreads: what is behind them is rounding
MIN_PAIRS = 50  # responses that both judges have scored, before the cheaper one is corrected
RECENT_PAIRS = 500  # the last ones, from which the correction follows
SLOPE_SD = 0.1  # by how much slopes of judges differ from 1, before there are pairs
UNCORRECTED = LinearRegression(slope=1.0, intercept=0.0)


def fit_correction(pairs: Sequence[tuple[float, float]]) -> LinearRegression:
    """Return how the cheaper judge's score x becomes the judge's: intercept + slope x.

    Least squares over pairs (x, y) gives b = cov(x, y) / var(x), with a standard error e. Few pairs
    of similar x say little about the slope, which decides what becomes of a sure 0 or 1. So it is
    the posterior mean with a prior of mean 1 and standard deviation SLOPE_SD, written t:
    slope = (t² b + e²) / (t² + e²), and intercept = mean(y) - slope mean(x). With a large e, or
    if all x are equal, that is an offset alone.
    Which responses have both scores depends on x (or on its spread), and a regression on x is not
    biased by that. Unchanged without enough pairs, or where the two do not rise together.
    """
    if len(pairs) < MIN_PAIRS:
        return UNCORRECTED
    xs, ys = zip(*pairs, strict=True)
    slope, mean = 1.0, fmean(xs)
    if spread := round(math.fsum((x - mean) ** 2 for x in xs), _DIGITS):
        fit, offset = linear_regression(xs, ys)
        noise = math.fsum((y - offset - fit * x) ** 2 for x, y in pairs) / (len(pairs) - 2)
        slope += (fit - 1.0) * SLOPE_SD**2 / (SLOPE_SD**2 + noise / spread)
    return LinearRegression(slope, fmean(ys) - slope * mean) if slope > 0 else UNCORRECTED


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
            return spread is None or round(spread, _DIGITS) >= self.spread
        return self.band[0] <= round(score, _DIGITS) <= self.band[1]


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
        # What passages of criteria earn is not corrected, so the whole score is not either.
        if self._api.place != "criterion":
            self._correction = fit_correction(self._pairs)

    def end_round(self, kind: RoundKind = "train") -> None:
        """Correct a round that is no validation; the scores of a training step become pairs."""
        self._entries += self._round.entries if kind == "train" else ()
        if kind != "validation":
            self._round.revise = partial(self._correct, self._correction)
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
                score = None if entry.future.exception() else entry.future.result()
                # An imputed value is no verdict of the judge.
                if score is not None and score.judged:
                    new.append((float(cheap), score.number))
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
            return replace(cheap, info={**cheap.info, **entry.info}), None
        score, error = await self.ask_score(entry.rollout, question)
        if score is None:
            return None, error
        return replace(score, info={**_add_costs(cheap.info, score.info), **entry.info}), None

    def _publish(self, entry: PendingScore, score: Score) -> None:
        """Let a score of the cheaper judge wait for the end of its round, if it is corrected."""
        if entry.info["escalated"] or self._correction == UNCORRECTED:
            super()._publish(entry, score)
        else:
            entry.score = score

    def _correct(self, correction: LinearRegression, score: Score, rollout: Rollout) -> Score:
        value = correction.intercept + correction.slope * score.number
        corrected = replace(score, value=min(max(value, 0.0), 1.0))
        return place_score(corrected, rollout, self._api, None)

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
