"""Chooses when the cheaper judge of a cascade is unsure, from rows that both judges have scored.

The rule is chosen on half of the prompts and measured on the other half. A score agrees with one of
two classes if it is on the right side of 0.5, with another label by 1 - |score - label|, both in
[0, 1]. Without labels the judge's score takes their place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.config.mixture import Judge, cheaper_judge, judges_of
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.extras.lab.statistics import MIN_ROWS, estimate_or_reason, kendall, ordered_share
from ppo_cli.planning.findings.rewards import scale_labels
from ppo_cli.records import Rollout
from ppo_cli.rewards.judge.cascade import Doubt, fit_correction
from ppo_cli.rewards.judge.prompt import load_template
from ppo_cli.scoring.rows import LabelledRows
from ppo_cli.scoring.score import Scoring, judged_value
from ppo_cli.scoring.sources import override_all
from ppo_cli.scoring.statistics import Floats, as_floats

KEPT = 0.95  # share of the judge's agreement that a cascade has to keep
MARGIN = 1.645  # standard errors of a one-sided bound of 95 %
MAX_LEVELS = 20  # scores between which bands are tried
STEPS = 1000  # spreads and ends of bands are rounded to a thousandth


def ask_both(settings: RewardSettings) -> RewardSettings:
    """Return the reward with cascades in which both judges score every row."""
    return override_all(settings, "judge", {"cascade.spread": None, "cascade.band": "0-1"})


def cascade_facts(
    settings: RewardSettings,
    rollouts: Sequence[Rollout],
    scoring: Scoring,
    labelled: LabelledRows | None,
) -> dict[str, Any]:
    """Return the best rule for each cascade, by the name of its judge; {} without a cascade."""
    return {
        judge.part or "judge": _measure(judge, rollouts, scoring, labelled)
        for judge in judges_of(settings)
        if judge.settings.cascade.model is not None
    }


def _measure(
    judge: Judge, rollouts: Sequence[Rollout], scoring: Scoring, labelled: LabelledRows | None
) -> dict[str, Any]:
    """Choose a rule on half of the prompts, and measure it on the others."""
    api, cheap = judge.settings, cheaper_judge(judge.settings)
    assert cheap is not None
    # Rows that both judges have scored.
    scores = [s if judge.part is None else s.mixture.get(judge.part, s) for s in scoring.scores]
    rows = [
        i for i, score in enumerate(scores)
        if judged_value(score) is not None and score.info.get("cheap_score") is not None
    ]  # fmt: skip
    facts: dict[str, Any] = {"cheap": cheap.model, "strong": api.model, "rows": len(rows)}
    # The second half, held out; rows of one prompt stay together.
    prompts, prompt_of_row = np.unique([rollouts[i].prompt.text for i in rows], return_inverse=True)
    place = np.random.default_rng(0).permutation(len(prompts))
    held_out = 2 * place[prompt_of_row] >= len(prompts)
    if min(held_out.sum(), (~held_out).sum()) < MIN_ROWS:
        why = f"{len(rows)} rows that both judges have scored; {2 * MIN_ROWS} are needed"
        return facts | {"why": why}
    # The cheaper judge's scores and spreads (2, rows), and the judge's scores.
    pairs = [(scores[i].info["cheap_score"], scores[i].info["cheap_spread"]) for i in rows]
    first = as_floats([[score, math.inf if s is None else s] for score, s in pairs]).T
    strong = as_floats([scores[i].number for i in rows])
    if labelled is not None and labelled.positive is not None:
        truth = as_floats(labelled.positive[rows])
        agreements = [as_floats((x >= 0.5) == truth) for x in (first[0], strong)]
    else:
        scale, truth = load_template(api).scale, strong
        if labelled is not None:
            labels = list(labelled.values[rows])
            truth = as_floats(scale_labels(labels, scale.low, scale.high))
        agreements = [1 - np.abs(x - truth) for x in (first[0], strong)]
    # Choose on one half, so that the figures of the other half are not too good.
    alone, judged = (a[~held_out] for a in agreements)
    chosen = _choose(first[:, ~held_out], alone, judged, by_spread=cheap.has_spread)
    unsure = _unsure(chosen, first)
    both = zip(first[0][~held_out & unsure], strong[~held_out & unsure], strict=True)
    correction = fit_correction([(float(x), float(y)) for x, y in both])
    corrected = np.clip(correction.intercept + correction.slope * first[0], 0, 1)
    escalated = unsure[held_out]
    alone, judged = (a[held_out] for a in agreements)
    mixed = np.where(escalated, judged, alone)
    share = float(escalated.mean())

    def mean(values: NDArray[Any]) -> dict[str, Any]:
        return estimate_or_reason(len(escalated), lambda rows: float(values[rows].mean()), "")

    agreement_kept = estimate_or_reason(
        len(escalated), lambda rows: float(mixed[rows].sum() / max(judged[rows].sum(), 1e-9)), ""
    )
    # Dollars for 1,000 responses; unknown without a price, or if verdicts came from the cache.
    stage = "judge" if judge.part in (None, "judge") else f"judge_{judge.part}"
    cheap_usd, strong_usd = (
        1000 * scoring.metrics.get(f"{stage}/{who}_cost_usd", 0.0) / len(rows)
        for who in ("cheap", "strong")
    )
    cost = {"judge_usd": strong_usd, "cascade_usd": cheap_usd + share * strong_usd}
    is_known = cheap_usd and strong_usd and not scoring.metrics.get(f"{stage}/cached")
    rule = f"--rm_cascade_band {chosen.band[0]:g}-{chosen.band[1]:g}"
    if chosen.spread is not None:
        rule = f"--rm_cascade_spread {chosen.spread:g}"
    return facts | {
        "flags": f"{rule} --rm_cascade_share {max(share, 0.01):.2g}",
        "measured_on": len(escalated),
        "figures": {
            f"{cheap.model} alone": mean(alone), f"{api.model} alone": mean(judged),
            "the cascade": mean(mixed), f"share of {api.model} alone": agreement_kept,
            f"responses sent to {api.model}": mean(escalated.astype(np.float64)),
        },
        # Training learns from the order of scores.
        "ranks": {
            name: {"Kendall's tau-b": kendall(scores, truth[held_out]),
                   "pairs in order": ordered_share(scores, truth[held_out])}
            for name, scores in (
                (f"{cheap.model} alone", first[0][held_out]),
                ("the cascade", np.where(escalated, strong[held_out], first[0][held_out])),
                ("the cascade, corrected",
                 np.where(escalated, strong[held_out], corrected[held_out])),
                (f"{api.model} alone", strong[held_out]),
            )
        },
        "cost": cost if is_known else None,
    }  # fmt: skip


def _choose(first: Floats, alone: Floats, judged: Floats, *, by_spread: bool) -> Doubt:
    """Return the rule with the fewest calls that keeps KEPT of the judge's agreement.

    The rows are a sample: it has to keep that with a confidence of 95 %.
    """
    best, fewest = Doubt(spread=0.0) if by_spread else Doubt(band=(0.0, 1.0)), math.inf
    for doubt in _rules(first, by_spread):
        escalated = _unsure(doubt, first)
        surplus = np.where(escalated, judged, alone) - KEPT * judged
        enough = surplus.mean() >= MARGIN * surplus.std() / math.sqrt(len(surplus))
        if enough and escalated.mean() < fewest:
            best, fewest = doubt, float(escalated.mean())
    return best


def _rules(first: Floats, by_spread: bool) -> Iterator[Doubt]:
    """Yield rules to try: each spread that occurs, or bands between scores that occur."""
    if by_spread:
        spreads = np.unique(np.floor(first[1][np.isfinite(first[1])] * STEPS) / STEPS)
        yield from (Doubt(spread=float(spread)) for spread in (*spreads, 0.5))
        return
    levels = np.unique(np.quantile(first[0], np.linspace(0, 1, MAX_LEVELS), method="nearest"))
    for i, low in enumerate(levels):
        for high in levels[i:]:
            yield Doubt(band=(math.floor(low * STEPS) / STEPS, math.ceil(high * STEPS) / STEPS))


def _unsure(doubt: Doubt, first: Floats) -> NDArray[np.bool_]:
    return np.asarray([doubt.applies(score, spread) for score, spread in first.T], dtype=bool)
