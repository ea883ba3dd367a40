"""Calibrate a reward: agreement with labels and with its own repeats, biases, and cost.

Each number comes with a sentence that explains it. Repeats bypass all caches and only cover what
may give other scores. In a mixture each judge and function is repeated separately, as the other
parts do not change. A judge's budget covers the first scoring and the repeats together.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import plural
from ppo_cli.extras.lab.cascade import cascade_facts
from ppo_cli.extras.lab.criteria import Marks, criteria_advice, criteria_facts
from ppo_cli.extras.lab.places import Marks as PlaceMarks
from ppo_cli.extras.lab.places import place_advice, place_facts
from ppo_cli.extras.lab.repeats import Repeats, add_spending, repeat_random_sources
from ppo_cli.extras.lab.reward_facts import (
    criteria_calls_note,
    random_sources,
    verdicts_per_response,
)
from ppo_cli.extras.lab.statistics import (
    MIN_ROWS,
    RowNumbers,
    accuracy_at,
    auc,
    best_threshold,
    constant_reason,
    estimate_or_reason,
    kendall,
    ordered_share,
    partial_spearman,
    verdict_agreement,
)
from ppo_cli.records import Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward
from ppo_cli.scoring.rows import LabelledRows, ResponseRow
from ppo_cli.scoring.score import (
    Callbacks,
    PartColumn,
    Scoring,
    cached_verdicts,
    count_failures,
    judged_value,
    part_column,
    part_columns,
    part_facts,
    score_all,
    scoring_spending,
)
from ppo_cli.scoring.sources import reward_kind
from ppo_cli.scoring.statistics import Floats, as_floats, pearson, spearman

Facts = Mapping[str, Any]
STRONG_AUC, FAIR_AUC = 0.9, 0.75  # an AUC from here on "separates well", or is "usable"
MIN_BIAS = 0.3  # rank correlation
MAX_MEAN_GAP = 0.1  # between repeated verdicts that count as steady
MIN_AUC_GAIN = 0.02  # of a part over its mixture, to be worth a sentence
STEADY = "Nothing was repeated: reward models and rules are deterministic."
# Advice by kind of reward: for a poor AUC, for a usable one, and for a bias to length.
STRONGER_ADVICE = {
    "judge": "use another prompt or a stronger judge",
    "model": "use a reward model for such prompts",
    "rule": "use another rule or function",
    "mixture": "look at its parts",
}
SHARPER_ADVICE = {
    "judge": "a sharper criterion in the prompt or more votes may help",
    "mixture": "other weights may help; look at its parts",
}
LENGTH_ADVICE = {"judge": "say in the prompt to ignore it"}


def write_advice(result: Facts) -> list[str]:
    """Return one sentence per finding, the most important first."""
    kind, agreement = result.get("kind", "judge"), result["agreement"]
    auc, rank, sentences = agreement["AUC"], agreement["Spearman"], []
    # First what limits the figures, then agreement, parts and criteria, and last bias and noise.
    if lost := result["rows"] - result["scored"]:
        share = lost / result["rows"]
        sentences.append(f"{share:.0%} of the rows got no score; the figures are about the others.")
    sentences.append(_auc_sentence(auc, kind))
    if rank["value"] is None:
        sentences.append(f"Spearman: {rank['why']}.")
    elif auc["value"] is None:
        word = "weak" if rank["value"] < 0.4 else "fair" if rank["value"] < 0.7 else "strong"
        order = f"{word} agreement with the order of the labels."
        sentences.append(f"Spearman {_format_interval(rank)}: {order}")
    sentences += _part_sentences(result)
    sentences += criteria_advice(result.get("criteria", {}))
    if places := result.get("places"):
        sentences.append(place_advice(places))
    # Training only uses the order of scores, so a shifted threshold is a remark.
    half, best = agreement["accuracy at 0.5"], agreement["accuracy at the best threshold"]
    if None not in (half["value"], best["value"]) and best["value"] - half["value"] >= 0.05:
        sentences.append(
            f"Accuracy is {best['value']:.2f} at {best['at']:.3g} but {half['value']:.2f} at 0.5: "
            f"the {kind} is too kind or too harsh; training uses the order of scores, not their "
            "level."
        )
    sentences.append(_length_sentence(result["bias"], kind))
    for name, facts in result["bias"].items():
        if "pos" in name and facts["value"] is not None and _is_biased(facts):
            what = "is the file sorted by quality?"
            if not name.endswith("file"):
                what = "is the better answer always in one place?"
            sentences.append(f"Scores follow the {name} ({_format_interval(facts)}): {what}")
    if result["repeated"] is not None:
        sentences.append(_repeats_sentence(result["repeated"], kind))
    sentences += [
        f"{name}: {_repeats_sentence(facts['repeated'], 'judge')}"
        for name, facts in result.get("parts", {}).items()
        if facts.get("repeated") is not None
    ]
    if result.get("steady"):
        sentences.append(STEADY)
    # What the cost is based on.
    paid = result.get("per_1000") or {}
    if calls := paid.get("paid_calls"):
        cost = paid.get("cost_usd")
        subject = "The cost" if cost is None else f"${cost:.3f}"
        sentences.append(
            f"{subject} for 1,000 responses is extrapolated from the {calls:,.0f} calls made here, "
            "repeats included."
        )
    return sentences


def _part_sentences(result: Facts) -> list[str]:
    """Sentences about parts of a mixture that agree better than the mixture, or not at all."""
    sentences = list(result.get("remarks", ()))
    mixture_auc = result["agreement"]["AUC"]["value"]
    for name, facts in result.get("parts", {}).items():
        auc = facts.get("agreement", {}).get("AUC", {})
        value = auc.get("value")
        # A part with a negative weight is meant to contradict the labels.
        if value is None or mixture_auc is None or facts["weight_given"] < 0:
            continue
        if value > mixture_auc + MIN_AUC_GAIN:
            sentences.append(
                f"{name} alone agrees better with the labels (AUC {value:.2f}) than the mixture "
                f"({mixture_auc:.2f}): give it more weight."
            )
        elif auc["high"] is not None and auc["high"] < 0.5:
            sentences.append(f"{name} contradicts the labels (AUC {_format_interval(auc)}).")
    return sentences


def _format_interval(facts: Facts) -> str:
    value = f"{facts['value']:.2f}"
    return value if facts["low"] is None else f"{value} [{facts['low']:.2f}, {facts['high']:.2f}]"


def _auc_sentence(facts: Facts, kind: str) -> str:
    """Return what the AUC says about the reward, and what to do."""
    if facts["value"] is None:
        return f"AUC: {facts['why']}."
    start = f"AUC {_format_interval(facts)}: "
    # An interval that includes 0.5 says more than the value, so it is asked first.
    if facts["low"] is not None and facts["low"] <= 0.5 <= facts["high"]:
        return start + f"not distinguishable from chance; {STRONGER_ADVICE[kind]}, or more rows."
    if facts["value"] < 0.5:
        return start + "worse than chance; is the label reversed (--positive)?"
    if facts["value"] < FAIR_AUC:
        return start + f"hardly better than chance; {STRONGER_ADVICE[kind]}."
    if facts["value"] < STRONG_AUC:
        return start + (f"usable; {SHARPER_ADVICE[kind]}." if kind in SHARPER_ADVICE else "usable.")
    return start + "separates good from bad answers well."


def _length_sentence(bias: Facts, kind: str) -> str:
    """Return whether scores follow the length of answers."""
    # Better answers are often longer, so the correlation at equal labels is preferred where it
    # exists.
    facts = bias["length, labels held equal"]
    if facts["value"] is None:
        facts = bias["length"]
    if facts["value"] is None:
        return f"Length: {facts['why']}."
    start = f"Length {_format_interval(facts)}: "
    if _is_biased(facts):
        word = "longer" if facts["value"] > 0 else "shorter"
        mend = LENGTH_ADVICE.get(kind, "reward.shaping has length penalties")
        return start + f"{word} answers score higher for their length; {mend}."
    return start + "no strong pull to long or short answers."


def _is_biased(facts: Facts) -> bool:
    """Whether a correlation is at least MIN_BIAS and its interval excludes zero."""
    clear = facts["low"] is None or facts["low"] > 0 or facts["high"] < 0
    return bool(clear and abs(facts["value"]) >= MIN_BIAS)


def _repeats_sentence(facts: Facts, kind: str) -> str:
    """Return how much repeated verdicts differ."""
    start = (
        f"Repeated, {facts['same']:.0%} of the verdicts are the same; they differ by "
        f"{facts['mean_gap']:.2f} on average: "
    )
    if facts["mean_gap"] <= MAX_MEAN_GAP:
        return start + "steady enough."
    return start + ("noisy; --rm_votes 3 averages it out." if kind == "judge" else "noisy.")


SAMPLE = 50  # rows that are repeated


@dataclass(frozen=True)
class ScoredColumns:
    """The rows with a score, as columns."""

    scores: Floats
    labels: Floats
    positive: NDArray[np.bool_] | None
    lengths: Floats
    order: Floats
    prompts: tuple[str, ...]


def calibrate(
    reward: Reward,
    settings: RewardSettings,
    labelled: LabelledRows,
    *,
    repeat: int,
    screen: Screen,
    marks: Marks,
    place_marks: PlaceMarks,
) -> dict[str, Any]:
    """Score the rows, repeat a sample, and compare everything with the labels.

    `marks` are labels of the criteria of a rubric, `place_marks` of the pieces of responses.
    """
    # Choose what is repeated: a fixed sample, only if something is random.
    rollouts = [row.rollout for row in labelled.rows]
    asked_twice = random_sources(settings) if repeat > 1 else {}
    sample = rollouts if asked_twice else []
    if len(sample) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(rollouts), SAMPLE, replace=False)
        sample = [rollouts[i] for i in sorted(chosen)]
    screen.note(forecast_calls(settings, len(rollouts), len(sample), repeat))
    # Score, then repeat within the rest of the budget.
    with screen.phase("score", len(rollouts)) as advance:
        scoring = score_all(reward, rollouts, Callbacks(advance, screen.note))
    repeats, before = Repeats(stopped=scoring.stopped), time.monotonic()
    if sample and not repeats.stopped:
        with screen.phase("repeat", len(sample) * len(asked_twice)) as advance:
            watch = Callbacks(advance, screen.note)
            repeats = repeat_random_sources(
                reward, settings, sample, repeat, watch, scoring.metrics
            )
    took = time.monotonic() - before
    spent = add_spending(scoring_spending(scoring.scores, scoring), repeats.metrics)
    # Compare with the labels.
    columns = _scored_columns(labelled, part_column(scoring.scores, None))
    judges = [judge.settings for judge in judges_of(settings)]

    def repeated(name: str) -> dict[str, Any] | None:
        agreement = verdict_agreement(repeats.verdicts.get(name, []))
        return agreement and {**agreement, "verdicts": repeat}

    result: dict[str, Any] = {
        "kind": reward_kind(settings),
        "rows": len(rollouts),
        "scored": len(columns.scores),
        "failed": count_failures(scoring.scores),
        "labels": labelled.description,
        "agreement": label_agreement(columns),
        "bias": score_biases(columns),
        **part_facts(settings, rollouts, scoring.scores),
        "cascade": cascade_facts(settings, rollouts, scoring, labelled),
        "criteria": criteria_facts(
            settings, labelled.rows, scoring.scores, list(labelled.values), marks
        ),
        "places": place_facts(labelled.rows, scoring.scores, place_marks),
        "repeated": repeated(reward_kind(settings)),
        "steady": repeat > 1 and not asked_twice,
        "spent": spent,
        "per_1000": per_thousand(
            scoring,
            spent | {"seconds": scoring.seconds + took},
            sum(len(values) for rows in repeats.verdicts.values() for values in rows),
            max(1, sum(judge.votes for judge in judges)),
            min((judge.concurrency for judge in judges), default=1),
        ),
        "stopped": repeats.stopped,
    }
    # For each part of a mixture: its own agreement with the labels, and how steady it is.
    if result["kind"] == "mixture":
        for name, column in part_columns(settings, scoring.scores).items():
            alone = label_agreement(_scored_columns(labelled, column))
            result["parts"][name] |= {"agreement": alone, "repeated": repeated(name)}
    return {**result, "advice": write_advice(result)}


def calibrate_cascade(
    reward: Reward, settings: RewardSettings, rows: Sequence[ResponseRow], *, screen: Screen
) -> dict[str, Any]:
    """Score rows without labels with both judges of a cascade, and choose when to ask the second.

    The judge's own scores take the place of labels.
    """
    rollouts = [row.rollout for row in rows]
    screen.note(forecast_calls(settings, len(rollouts), 0, 0))
    with screen.phase("score", len(rollouts)) as advance:
        scoring = score_all(reward, rollouts, Callbacks(advance, screen.note))
    return {
        "rows": len(rollouts),
        "scored": sum(score.judged for score in scoring.scores),
        "failed": count_failures(scoring.scores),
        "cascade": cascade_facts(settings, rollouts, scoring, None),
        "spent": scoring_spending(scoring.scores, scoring),
        "stopped": scoring.stopped,
    }


def forecast_calls(settings: RewardSettings, rows: int, repeated: int, repeat: int) -> str:
    """Return how many verdicts the calibration takes, as a sentence."""
    each, sources = verdicts_per_response(settings), len(random_sources(settings))
    calls = rows * each + repeated * repeat * sources
    times = "" if each == 1 else f" x {each} votes"
    if reward_kind(settings) == "mixture":
        times = f" x {each} verdicts of {len(part_columns(settings, ()))} parts"
    twice = f", and {repeated} of them {repeat} times more" if repeated else ""
    asked = f"Asking for at most {plural(calls, 'verdict')}"
    return f"{asked}: {plural(rows, 'row')}{times}{twice}." + criteria_calls_note(settings)


def _scored_columns(labelled: LabelledRows, column: PartColumn) -> ScoredColumns:
    """Return the rows of this part that have a score, as columns."""
    values = {i: value for i, value in enumerate(column.raw) if value is not None}
    scored = list(values)
    rows = [labelled.rows[i].rollout for i in scored]
    return ScoredColumns(
        scores=as_floats(list(values.values())),
        labels=labelled.values[scored],
        positive=None if labelled.positive is None else labelled.positive[scored],
        lengths=as_floats([len(row.text) for row in rows]),
        order=as_floats(scored),
        prompts=tuple(row.prompt.text for row in rows),
    )


def label_agreement(columns: ScoredColumns) -> dict[str, dict[str, Any]]:
    """Accuracy, AUC and correlations with the labels, each with its interval."""
    x, y, good = columns.scores, columns.labels, columns.positive
    flags = np.zeros(len(x), dtype=bool) if good is None else good
    estimate = partial(estimate_or_reason, len(x))

    def best(rows: RowNumbers) -> float | None:
        chosen = best_threshold(x[rows], flags[rows])
        return None if chosen is None else chosen[1]

    # Each figure has its reason for being undefined.
    classes = "labels of two classes are needed" if good is None else ""
    same = "" if flags.any() and not flags.all() else "every scored row has the same label"
    unfit = classes or same or constant_reason("score", x)
    # A threshold of 0.5 has no meaning for a reward model's score of 20.
    inside = not len(x) or (x.min() >= 0.0 and x.max() <= 1.0)
    off_scale = "" if inside else "the scores are not between 0 and 1"
    flat = constant_reason("score", x) or constant_reason("label", y)
    threshold = best_threshold(x, flags)
    at = None if unfit or threshold is None else min(threshold[0], 1e9)
    return {
        "accuracy at the best threshold": estimate(best, unfit, share=True) | {"at": at},
        "accuracy at 0.5": estimate(
            lambda rows: accuracy_at(x[rows], flags[rows], 0.5), classes or off_scale, share=True
        ),
        "AUC": estimate(lambda rows: auc(x[rows], flags[rows]), unfit, share=True),
        "Spearman": estimate(lambda rows: spearman(x[rows], y[rows]), flat),
        "Pearson": estimate(lambda rows: pearson(x[rows], y[rows]), flat),
        **{
            name: {"value": None if flat else rank(x, y), "low": None, "high": None, "why": flat}
            for name, rank in (("Kendall's tau-b", kendall), ("pairs in order", ordered_share))
        },
        **_pair_accuracy(columns),
    }


def _pair_accuracy(columns: ScoredColumns) -> dict[str, dict[str, Any]]:
    """How often the better of two answers to one prompt has the higher score; ties count half.

    Reward models are trained for this: their scores of different prompts need not compare. The
    interval resamples whole prompts. Empty if no prompt has better and worse answers.
    """
    # Count per prompt first: whole prompts are resampled below.
    counts = []
    for rows in _group_by_prompt(columns.prompts):
        scores, labels = columns.scores[rows], columns.labels[rows]
        better, worse = np.nonzero(labels[:, None] > labels)
        gaps = scores[better] - scores[worse]
        counts.append(((gaps > 0).sum() + (gaps == 0).sum() / 2, len(gaps)))
    pairs = as_floats([both for both in counts if both[1]])
    if not len(pairs):
        return {}

    def share(rows: RowNumbers) -> float | None:
        won, of = pairs[rows].sum(axis=0)
        return float(won / of)

    usable = plural(len(pairs), "prompt")
    few = f"{usable} with better and worse answers; at least {MIN_ROWS} are needed"
    why = few if len(pairs) < MIN_ROWS else ""
    estimate = estimate_or_reason(max(MIN_ROWS, len(pairs)), share, why, share=True)
    return {"pairs of one prompt in order": estimate}


def score_biases(columns: ScoredColumns) -> dict[str, dict[str, Any]]:
    """Rank correlations of the score with length and position, which should not matter."""
    x, y, size, order = columns.scores, columns.labels, columns.lengths, columns.order
    same_score = constant_reason("score", columns.scores)
    flat = same_score or constant_reason("response's length", columns.lengths)
    estimate = partial(estimate_or_reason, len(x))
    correlations = {
        "length": estimate(lambda rows: spearman(x[rows], size[rows]), flat),
        "length, labels held equal": estimate(
            lambda rows: partial_spearman(x[rows], size[rows], y[rows]),
            flat or constant_reason("label", columns.labels),
        ),
    }
    # With several answers per prompt, position is measured among them instead of in the file.
    groups = _group_by_prompt(columns.prompts)
    if not groups:
        correlations["position in the file"] = estimate(
            lambda rows: spearman(x[rows], order[rows]), same_score
        )
        return correlations
    # Centre scores and positions within each group, then pool all groups.
    scores = np.concatenate([columns.scores[rows] - columns.scores[rows].mean() for rows in groups])
    places = np.concatenate([np.arange(len(rows)) - (len(rows) - 1) / 2 for rows in groups])
    within = np.round(scores, 9)
    correlations["position among answers to one prompt"] = estimate_or_reason(
        len(scores),
        lambda rows: spearman(within[rows], places[rows]),
        constant_reason("score within a prompt", scores),
    )
    return correlations


def _group_by_prompt(prompts: Sequence[str]) -> list[list[int]]:
    rows_by_prompt: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        rows_by_prompt[prompt].append(index)
    return [rows for rows in rows_by_prompt.values() if len(rows) > 1]


def is_cached(score: Score) -> bool:
    """Whether all verdicts of a score came from the cache."""
    cached = cached_verdicts(score)
    return bool(cached) and all(cached)


def per_thousand(
    scoring: Scoring,
    spent: Mapping[str, float],
    repeats: int = 0,
    votes: int = 1,
    at_once: int = 1,
) -> Mapping[str, float]:
    """Cost, tokens and seconds for 1,000 responses with `votes` verdicts each.

    Extrapolated from the new verdicts of this command, repeats included; `paid_calls` is the
    number of their calls. Fewer rows than `at_once` take as long as `at_once` rows.
    """
    # Cached verdicts cost nothing now, so they are not part of the extrapolation.
    fresh = [s for s in scoring.scores if judged_value(s) is not None and not is_cached(s)]
    responses = len(fresh) + repeats / votes
    if not responses:
        return {}
    facts = {k: v * 1000.0 / responses for k, v in spent.items() if k != "cached"}
    if "seconds" in facts:
        facts["seconds"] = spent["seconds"] * 1000.0 / max(responses, min(1000.0, at_once / votes))
    return facts | ({"paid_calls": spent["calls"]} if "calls" in spent else {})
