"""How far a reward can be trusted: agreement with labels, with itself, biases and cost.

Each number comes with a sentence that says what it means. Repeats ask again, past every cache, what
may answer otherwise. In a mixture each judge and each function is asked by itself: what the others
say does not change. A judge then keeps to what the first scoring left of its budget.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.extras.trust.criteria import Marks, criteria_advice, criteria_facts
from ppo_cli.records import Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward
from ppo_cli.scoring.rows import Labelled
from ppo_cli.scoring.score import (
    BY_HAND,
    Column,
    Scoring,
    Watch,
    add_spending,
    by_judge,
    column_of,
    columns_of,
    failures,
    final_metrics,
    is_kept,
    judged,
    part_facts,
    score_all,
    spending,
    started,
)
from ppo_cli.scoring.sources import calls_of_criteria, kind_of, unsteady, verdicts_each
from ppo_cli.scoring.statistics import (
    FEWEST,
    Floats,
    Rows,
    accuracy_at,
    agreement,
    as_floats,
    auc,
    best_threshold,
    coded,
    flat_why,
    measured,
    partial_spearman,
    pearson,
    spearman,
)  # fmt: skip

Facts = Mapping[str, Any]
STRONG, FAIR = 0.9, 0.75
BIASED = 0.3
NOISY = 0.1
BETTER = 0.02
STEADY = "Nothing was asked again: reward models and rules say the same every time."
# Advice for a reward that separates good from bad poorly, and for one that rewards length.
STRONGER = {
    "judge": "use another prompt or a stronger judge",
    "model": "use a reward model for such prompts",
    "rule": "use another rule or function",
    "mixture": "look at its parts",
}
SHARPER = {
    "judge": "a sharper criterion in the prompt or more votes may help",
    "mixture": "other weights may help; look at its parts",
}
LENGTH_MEND = {"judge": "say in the prompt to ignore it"}


def advise(result: Facts) -> list[str]:
    """Return one sentence for each finding, the most important first."""
    kind, agreement = result.get("kind", "judge"), result["agreement"]
    auc, rank, found = agreement["AUC"], agreement["Spearman"], []
    if lost := result["rows"] - result["scored"]:
        share = lost / result["rows"]
        found.append(f"{share:.0%} of the rows got no score; the numbers speak of the others.")
    found.append(_auc(auc, kind))
    if rank["value"] is None:
        found.append(f"Spearman: {rank['why']}.")
    elif auc["value"] is None:
        word = "weak" if rank["value"] < 0.4 else "fair" if rank["value"] < 0.7 else "strong"
        order = f"{word} agreement with the order of the labels."
        found.append(f"Spearman {_interval(rank)}: {order}")
    found += _parts(result)
    found += criteria_advice(result.get("criteria", {}))
    half, best = agreement["accuracy at 0.5"], agreement["accuracy at the best threshold"]
    if None not in (half["value"], best["value"]) and best["value"] - half["value"] >= 0.05:
        found.append(
            f"Accuracy is {best['value']:.2f} at {best['at']:.3g} but {half['value']:.2f} at 0.5: "
            f"the {kind} is too kind or too harsh; training minds the order of scores, not their "
            "level."
        )
    found.append(_length(result["bias"], kind))
    for name, facts in result["bias"].items():
        if "pos" in name and facts["value"] is not None and _beyond(facts):
            what = "is the file sorted by quality?"
            if not name.endswith("file"):
                what = "is the better answer always in one place?"
            found.append(f"Scores follow the {name} ({_interval(facts)}): {what}")
    if result["repeated"] is not None:
        found.append(_repeats(result["repeated"], kind))
    found += [
        f"{name}: {_repeats(facts['repeated'], 'judge')}"
        for name, facts in result.get("parts", {}).items()
        if facts.get("repeated") is not None
    ]
    if result.get("steady"):
        found.append(STEADY)
    paid = result.get("per_1000") or {}
    if calls := paid.get("paid_calls"):
        cost = paid.get("cost_usd")
        said = "The cost" if cost is None else f"${cost:.3f}"
        found.append(
            f"{said} for 1,000 responses rests on the {calls:,.0f} calls made here, repeats "
            "included."
        )
    return found


def _parts(result: Facts) -> list[str]:
    """Parts of a mixture that say more, or nothing, of what the labels say."""
    said = list(result.get("remarks", ()))
    whole = result["agreement"]["AUC"]["value"]
    for name, facts in result.get("parts", {}).items():
        auc = facts.get("agreement", {}).get("AUC", {})
        value = auc.get("value")
        if value is None or whole is None or facts["weight_given"] < 0:
            continue
        if value > whole + BETTER:
            said.append(
                f"{name} alone agrees better with the labels (AUC {value:.2f}) than the mixture "
                f"({whole:.2f}): give it more weight."
            )
        elif auc["high"] is not None and auc["high"] < 0.5:
            said.append(f"{name} goes against the labels (AUC {_interval(auc)}).")
    return said


def _interval(facts: Facts) -> str:
    value = f"{facts['value']:.2f}"
    return value if facts["low"] is None else f"{value} [{facts['low']:.2f}, {facts['high']:.2f}]"


def _auc(facts: Facts, kind: str) -> str:
    if facts["value"] is None:
        return f"AUC: {facts['why']}."
    said = f"AUC {_interval(facts)}: "
    if facts["low"] is not None and facts["low"] <= 0.5 <= facts["high"]:
        return said + f"not distinguishable from chance; {STRONGER[kind]}, or more rows."
    if facts["value"] < 0.5:
        return said + "worse than chance; is the label the other way round (--positive)?"
    if facts["value"] < FAIR:
        return said + f"hardly better than chance; {STRONGER[kind]}."
    if facts["value"] < STRONG:
        return said + (f"usable; {SHARPER[kind]}." if kind in SHARPER else "usable.")
    return said + "separates good from bad answers well."


def _length(bias: Facts, kind: str) -> str:
    facts = bias["length, labels held equal"]
    if facts["value"] is None:
        facts = bias["length"]
    if facts["value"] is None:
        return f"Length: {facts['why']}."
    said = f"Length {_interval(facts)}: "
    if _beyond(facts):
        word = "longer" if facts["value"] > 0 else "shorter"
        mend = LENGTH_MEND.get(kind, "reward.shaping has penalties for it")
        return said + f"{word} answers score higher for their length; {mend}."
    return said + "no strong pull to long or short answers."


def _beyond(facts: Facts) -> bool:
    """Large, and its interval clear of zero."""
    clear = facts["low"] is None or facts["low"] > 0 or facts["high"] < 0
    return bool(clear and abs(facts["value"]) >= BIASED)


def _repeats(facts: Facts, kind: str) -> str:
    said = (
        f"Asked again, {facts['same']:.0%} of verdicts are the same; they differ by "
        f"{facts['mean_gap']:.2f} on average: "
    )
    if facts["mean_gap"] <= NOISY:
        return said + "steady enough."
    return said + ("noisy; --rm_votes 3 averages it out." if kind == "judge" else "noisy.")


SAMPLE = 50


@dataclass(frozen=True)
class Columns:
    """The rows that got a score, as columns."""

    scores: Floats
    labels: Floats
    positive: NDArray[np.bool_] | None
    lengths: Floats
    order: Floats
    prompts: tuple[str, ...]


def calibrate(
    reward: Reward,
    settings: RewardSettings,
    labelled: Labelled,
    *,
    repeat: int,
    screen: Screen,
    marks: Marks | None = None,
) -> dict[str, Any]:
    """Score the rows, ask a sample again, and hold everything against the labels.

    `marks` are labels of the criteria of a rubric.
    """
    rollouts = [row.rollout for row in labelled.rows]
    asked_twice = unsteady(settings) if repeat > 1 else {}
    again = rollouts if asked_twice else []
    if len(again) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(rollouts), SAMPLE, replace=False)
        again = [rollouts[i] for i in sorted(chosen)]
    screen.note(_forecast(settings, len(rollouts), len(again), repeat))
    with screen.phase("score", len(rollouts)) as advance:
        scoring = score_all(reward, rollouts, Watch(advance, screen.note))
    repeats, before = Repeats(stopped=scoring.stopped), time.monotonic()
    if again and not repeats.stopped:
        with screen.phase("repeat", len(again) * len(asked_twice)) as advance:
            watch = Watch(advance, screen.note)
            repeats = ask_again(reward, settings, again, repeat, watch, scoring.metrics)
    took = time.monotonic() - before
    spent = add_spending(spending(scoring.scores, scoring), repeats.metrics)
    columns = _columns(labelled, column_of(scoring.scores, None))
    judges = [judge.settings for judge in judges_of(settings)]

    def repeated(name: str) -> dict[str, Any] | None:
        found = agreement(repeats.verdicts.get(name, []))
        return found and {**found, "verdicts": repeat}

    result: dict[str, Any] = {
        "kind": kind_of(settings),
        "rows": len(rollouts),
        "scored": len(columns.scores),
        "failed": failures(scoring.scores),
        "labels": labelled.said,
        "agreement": agreement_of(columns),
        "bias": bias_of(columns),
        **part_facts(settings, rollouts, scoring.scores),
        "criteria": criteria_facts(
            settings, labelled.rows, scoring.scores, list(labelled.values), marks or {}
        ),
        "repeated": repeated(kind_of(settings)),
        "steady": repeat > 1 and not asked_twice,
        "spent": spent,
        "per_1000": per_thousand(
            scoring,
            spent | {"seconds": scoring.seconds + took},
            sum(len(values) for rows in repeats.verdicts.values() for values in rows),
            max(1, sum(judge.votes for judge in judges)),
            min((judge.concurrency for judge in judges), default=1),
        ),
        "stopped": redact(repeats.stopped),
    }
    if result["kind"] == "mixture":
        for name, column in columns_of(settings, scoring.scores).items():
            alone = agreement_of(_columns(labelled, column))
            result["parts"][name] |= {"agreement": alone, "repeated": repeated(name)}
    return {**result, "advice": advise(result)}


def _forecast(settings: RewardSettings, rows: int, again: int, repeat: int) -> str:
    """Say how much will be asked."""
    each, sources = verdicts_each(settings), len(unsteady(settings))
    calls = rows * each + again * repeat * sources
    times = "" if each == 1 else f" x {each} votes"
    if kind_of(settings) == "mixture":
        times = f" x {each} verdicts of {len(columns_of(settings, ()))} parts"
    twice = f", and {again} of them {repeat} times again" if again else ""
    said = f"Asking for at most {calls:,} verdicts: {rows:,} rows{times}{twice}."
    return said + calls_of_criteria(settings)


def _columns(labelled: Labelled, column: Column) -> Columns:
    values = {i: value for i, value in enumerate(column.raw) if value is not None}
    kept = list(values)
    rows = [labelled.rows[i].rollout for i in kept]
    return Columns(
        scores=as_floats(list(values.values())),
        labels=labelled.values[kept],
        positive=None if labelled.positive is None else labelled.positive[kept],
        lengths=as_floats([len(row.text) for row in rows]),
        order=as_floats(kept),
        prompts=tuple(row.prompt.text for row in rows),
    )


def agreement_of(columns: Columns) -> dict[str, dict[str, Any]]:
    """Accuracy, AUC and correlations with the labels, each with its interval."""
    x, y, good = columns.scores, columns.labels, columns.positive
    flags = np.zeros(len(x), dtype=bool) if good is None else good
    level, labels = coded(x), coded(y)
    estimate = partial(measured, len(x))

    def best(rows: Rows) -> float | None:
        chosen = best_threshold(level[rows], flags[rows])
        return None if chosen is None else chosen[1]

    classes = "labels of two classes are needed" if good is None else ""
    same = "" if flags.any() and not flags.all() else "every scored row has the same label"
    unfit = classes or same or flat_why("score", x)
    # A reward model's 20 says nothing of 0.5.
    inside = not len(x) or (x.min() >= 0.0 and x.max() <= 1.0)
    off_scale = "" if inside else "the scores do not lie between 0 and 1"
    flat = flat_why("score", x) or flat_why("label", y)
    threshold = best_threshold(x, flags)
    at = None if unfit or threshold is None else min(threshold[0], 1e9)
    return {
        "accuracy at the best threshold": estimate(best, unfit, share=True) | {"at": at},
        "accuracy at 0.5": estimate(
            lambda rows: accuracy_at(x[rows], flags[rows], 0.5), classes or off_scale, share=True
        ),
        "AUC": estimate(lambda rows: auc(level[rows], flags[rows]), unfit, share=True),
        "Spearman": estimate(lambda rows: spearman(level[rows], labels[rows]), flat),
        "Pearson": estimate(lambda rows: pearson(x[rows], y[rows]), flat),
        **_pair_accuracy(columns),
    }


def _pair_accuracy(columns: Columns) -> dict[str, dict[str, Any]]:
    """How often the better of two answers to one prompt has the higher score, ties as half.

    Reward models are made for this: their scores for two prompts need not compare. Whole
    prompts are drawn for the interval; nothing where no prompt has better and worse answers.
    """
    counts = [_won(columns.scores[rows], columns.labels[rows]) for rows in _groups(columns.prompts)]
    pairs = as_floats([both for both in counts if both[1]])
    if not len(pairs):
        return {}

    def share(rows: Rows) -> float | None:
        won, of = pairs[rows].sum(axis=0)
        return float(won / of)

    few = f"{len(pairs)} prompts with better and worse answers; at least {FEWEST} are needed"
    why = few if len(pairs) < FEWEST else ""
    made = measured(max(FEWEST, len(pairs)), share, why, share=True)
    return {"pairs of one prompt in order": made}


def _won(scores: Floats, labels: Floats) -> tuple[float, float]:
    """Pairs of unlike labels that the scores order rightly, and how many there are."""
    better, worse = np.nonzero(labels[:, None] > labels[None, :])
    gaps = scores[better] - scores[worse]
    return float((gaps > 0).sum() + (gaps == 0).sum() / 2), float(len(gaps))


def bias_of(columns: Columns) -> dict[str, dict[str, Any]]:
    """Rank correlations of the score with what should not matter."""
    x, y = coded(columns.scores), coded(columns.labels)
    size, order = coded(columns.lengths), coded(columns.order)
    same_score = flat_why("score", columns.scores)
    flat = same_score or flat_why("response's length", columns.lengths)
    estimate = partial(measured, len(x))
    found = {
        "length": estimate(lambda rows: spearman(x[rows], size[rows]), flat),
        "length, labels held equal": estimate(
            lambda rows: partial_spearman(x[rows], size[rows], y[rows]),
            flat or flat_why("label", columns.labels),
        ),
    }
    groups = _groups(columns.prompts)
    if not groups:
        found["position in the file"] = estimate(
            lambda rows: spearman(x[rows], order[rows]), same_score
        )
        return found
    # Scores less their group's mean, and places less theirs, of all rows in groups.
    scores = np.concatenate([columns.scores[rows] - columns.scores[rows].mean() for rows in groups])
    places = np.concatenate([np.arange(len(rows)) - (len(rows) - 1) / 2 for rows in groups])
    within, place = coded(np.round(scores, 9)), coded(places)
    found["position among answers to one prompt"] = measured(
        len(scores),
        lambda rows: spearman(within[rows], place[rows]),
        flat_why("score within a prompt", scores),
    )
    return found


def _groups(prompts: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        found[prompt].append(index)
    return [rows for rows in found.values() if len(rows) > 1]


def per_thousand(
    scoring: Scoring,
    spent: Mapping[str, float],
    repeats: int = 0,
    votes: int = 1,
    at_once: int = 1,
) -> Mapping[str, float]:
    """Cost, tokens and seconds for 1,000 responses of `votes` verdicts each.

    They rest on the verdicts that were asked for here, repeats past the cache included; how
    many calls these took is `paid_calls`. Few rows take as long as `at_once` of them would.
    """
    fresh = [s for s in scoring.scores if judged(s) is not None and not is_kept(s)]
    asked = len(fresh) + repeats / votes
    if not asked:
        return {}
    found = {k: v * 1000.0 / asked for k, v in spent.items() if k != "cached"}
    if "seconds" in found:
        found["seconds"] = spent["seconds"] * 1000.0 / max(asked, min(1000.0, at_once / votes))
    return found | ({"paid_calls": spent["calls"]} if "calls" in spent else {})


# --- asking again ---------------------------------------------------------------------------------


@dataclass
class Repeats:
    """Fresh verdicts on each rollout, by part; `stopped` says why some are missing."""

    verdicts: dict[str, list[list[float]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


def ask_again(
    reward: Reward,
    settings: RewardSettings,
    rollouts: Sequence[Rollout],
    times: int,
    watch: Watch,
    before: Mapping[str, float],
) -> Repeats:
    """Ask every part that is not steady; `before` is what the first asking was measured at."""
    found, mixed = Repeats(), kind_of(settings) == "mixture"
    prompts = [rollout.prompt for rollout in rollouts]
    for name, alone in unsteady(settings).items():
        try:
            if mixed and alone.api.enable:
                alone = alone.model_copy(update={"api": _left_of(alone.api, name, before)})
            # A reward alone is asked as it is, a part of a mixture is started anew.
            with started(alone, prompts, watch) if mixed else nullcontext(reward) as one:
                found.stopped, found.verdicts[name] = repeat_all(one, rollouts, times, watch)
                for key, value in final_metrics(one, found.stopped).items():
                    # Each judge is counted separately, so that an unknown price stays unknown.
                    stage, _, rest = key.partition("/")
                    own = f"judge_{name}/{rest}" if stage == "judge" else key
                    found.metrics[own] = found.metrics.get(own, 0.0) + value
        except Interrupted as reason:
            found.stopped = str(reason)
        if found.stopped:
            break
    return found


def _left_of(api: ApiReward, name: str, before: Mapping[str, float]) -> ApiReward:
    """A judge's settings with the budget that is left."""
    judges = by_judge(before)
    spent = judges.get(f"judge_{name}") or judges.get("judge", {})
    tokens = spent.get("tokens_in", 0.0) + spent.get("tokens_out", 0.0)
    left: dict[str, Any] = {}
    if api.budget_usd is not None:
        left["budget_usd"] = api.budget_usd - spent.get("cost_usd", 0.0)
    if api.budget_tokens is not None:
        left["budget_tokens"] = api.budget_tokens - round(tokens)
    if any(most <= 0 for most in left.values()):
        raise Interrupted(f"The budget of the judge '{name}' is used up.")
    return api.model_copy(update=left)


def repeat_all(
    reward: Reward, rollouts: Sequence[Rollout], times: int, watch: Watch
) -> tuple[str, list[list[float]]]:
    """Ask for fresh verdicts on each rollout; returns why it stopped, and the verdicts so far."""
    asked: list[list[Future[Any]]] = []
    found: list[list[float]] = []
    try:
        reward.begin_step(1)
        # A judge is asked past its cache; anything else is simply asked again.
        past_cache = getattr(reward, "repeat", None)
        for rollout in rollouts:
            again = [past_cache(rollout, times)] if past_cache else []
            asked.append(again or [reward.submit(rollout) for _ in range(times)])
        reward.end_round()
        for futures in asked:
            while wait(futures, timeout=1.0).not_done:
                pass
            answers = [future.result() for future in futures]
            scores = [s for a in answers for s in ([a] if isinstance(a, Score) else a)]
            found.append([value for s in scores if (value := judged(s)) is not None])
            watch.advance(1)
    except Interrupted as reason:
        return str(reason), found
    except KeyboardInterrupt:
        return BY_HAND, found
    return "", found
