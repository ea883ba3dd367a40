"""Score rollouts outside training, with the code that training uses, and say what came of it.

Whatever stops it (budget, judge unavailable, Ctrl-C), verdicts so far are kept; missing ones say
"not asked", and a judge's cache lets the same command resume. The summary of a scored file has
counts, scale, parts, cost, best and worst rows.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from ppo_cli.config.mixture import MixPart, judges_of, mixture_of
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted, RewardError
from ppo_cli.moments import TINY, Moments, correlation
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward, RoundKind
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run_folder import plain
from ppo_cli.scoring.rows import ResponseRow
from ppo_cli.scoring.sources import override_all, reward_kind

NOT_ASKED = "not asked"
SPENDING_METRICS = ("calls", "cost_usd", "tokens_in", "tokens_out")  # by each judge
STOPPED_BY_CTRL_C = "Stopped by Ctrl-C."
POLL_S = 0.2
SHORT_CHARS = 100
MANY_ROWS = 64  # from here on two calls more for questions with known answers hardly matter
# A share of failed verdicts is one of a step's responses, and a file is not a step.
MONITORS_OFF = {"canary_every": 0, "monitor.model": None, "max_failure_rate": 1.0}


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for progress, for notes on why scoring waits, and for each score as it comes.

    `scored` is called by whatever thread has the score.
    """

    advance: Callable[[int], None] = lambda count: None
    note: Callable[[str], None] = lambda text: None
    scored: Callable[[Rollout, Score], None] = lambda rollout, score: None


@dataclass(frozen=True)
class Scoring:
    """Scores in the order of the rollouts; `stopped` says why some were never asked for."""

    scores: tuple[Score, ...]
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


@contextmanager
def open_reward(
    settings: RewardSettings, prompts: Sequence[Prompt], watch: Callbacks,
    folder: Path | None = None, *, check_format: bool = False,
) -> Iterator[Reward]:  # fmt: skip
    """Build the reward and try it out, as training does before its first rollout.

    What is spent counts with what earlier starts in `folder` have spent.

    What only watches a judge during training (canary replies, a second judge) stays off, in the
    parts of a mixture too; and a reward model that fails its self-test only gives a warning, since
    the scores themselves are shown. With `check_format` a judge of many rows is asked questions
    with known answers first, unless `canary_every` is 0.
    """
    if any(judge.settings.of_the_run for judge in judges_of(settings)):
        raise RewardError(
            "--rm_mode compare with pairs, list or base compares with other responses of a run, "
            "and there is none here. Use --rm_compare ground_truth, or --rm_mode text."
        )
    sources = {prompt.data_source for prompt in prompts}
    quiet = override_all(settings, "judge", MONITORS_OFF)
    if settings.model.self_test == "strict":
        quiet = override_all(quiet, "model", {"self_test": "warn"})
    reward = build_reward(quiet, sources=sources)
    try:
        if folder is not None:
            reward.attach(folder)
        reward.start(prompts, tell=watch.note)
        allowed = any(judge.settings.canary_every for judge in judges_of(settings))
        if check_format and allowed and len(prompts) >= MANY_ROWS:
            reward.check_format(watch.note)
        yield reward
    finally:
        reward.close()


def score_all(
    reward: Reward, rollouts: Iterable[Rollout], watch: Callbacks, kind: RoundKind = "train"
) -> Scoring:
    """Submit every rollout as one step and gather the scores as they come.

    Rollouts may still be sampled meanwhile; those that never came, as it stopped, have no score.
    """
    started = time.monotonic()
    arrived: SimpleQueue[Future[Score]] = SimpleQueue()
    futures: list[Future[Score]] = []
    stopped = ""
    try:
        reward.begin_step(0)
        for rollout in rollouts:
            futures.append(reward.submit(rollout))
            futures[-1].add_done_callback(partial(_deliver, watch, rollout, arrived))
        reward.end_round(kind)
        _wait_for_all(reward, len(futures), arrived, watch)
    except Interrupted as reason:
        stopped = str(reason)
    except KeyboardInterrupt:
        stopped = STOPPED_BY_CTRL_C
    metrics = final_metrics(reward, stopped)
    cut = sum(int(value) for name, value in metrics.items() if name.endswith("/prompts_cut"))
    if cut:
        watch.note(f"{cut} prompts were cut to fit the reward model, from the left.")
    scores = [_score_if_done(future) for future in futures]
    if isinstance(rollouts, Sequence):
        scores += [Score.failed(NOT_ASKED)] * (len(rollouts) - len(futures))
    return Scoring(tuple(scores), time.monotonic() - started, metrics, stopped)


def final_metrics(reward: Reward, stopped: str) -> dict[str, float]:
    """What was measured; after a stop, once the calls under way are over: they are billed too.

    A mixture then gives the scores that it held back until all of them are there.
    """
    if stopped:
        with suppress(KeyboardInterrupt):
            reward.close()
    return reward.pop_metrics()


def _deliver(
    watch: Callbacks, rollout: Rollout, arrived: SimpleQueue[Future[Score]], future: Future[Score]
) -> None:
    """Hand a score on; an error in that (a full disk) reaches whoever waits for the score."""
    try:
        if not future.cancelled() and future.exception() is None:
            watch.scored(rollout, future.result())
    except OSError as error:
        future = Future()
        future.set_exception(error)
    arrived.put(future)


def _wait_for_all(
    reward: Reward, pending: int, arrived: SimpleQueue[Future[Score]], watch: Callbacks
) -> None:
    """Wait for all that are left; raises what a future raises."""
    noted: str | None = None
    while pending:
        try:
            future = arrived.get(timeout=POLL_S)
        except Empty:
            why = reward.waiting_for()
            if why is not None and why != noted:
                watch.note(why)
            noted = why
            continue
        future.result()
        pending -= 1
        watch.advance(1)


def _score_if_done(future: Future[Score]) -> Score:
    """The score as far as it is there."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        future.cancel()
        return Score.failed(NOT_ASKED)
    return future.result()


def resume_advice(settings: RewardSettings) -> str:
    """What to do after an early stop."""
    if any(judge.settings.cache != "off" for judge in judges_of(settings)):
        return "Run the same command again: the verdicts that are there come from the cache."
    return "Run the same command again."


def scored_row(row: ResponseRow, score: Score) -> dict[str, Any]:
    """The row as it stands in the file, with its score."""
    columns: dict[str, Any] = plain(
        {
            "score": score.value,
            "failure": score.failure or None,
            "reason": score.reason,
            "parts": {n: {"raw": p.raw, "scaled": p.scaled} for n, p in score.parts.items()},
            "info": score.facts,
        }
    )
    return {**row.record, **columns}


def judged_value(score: Score) -> float | None:
    """A score that was really given; an imputed one does not count."""
    return score.value if score.judged else None


def failure_cause(score: Score) -> str:
    """The short word for a failure: how its text begins."""
    cause = score.failure or score.imputed
    first, _, rest = cause.partition(":")
    if first in score.parts and rest:  # of a mixture: which part, then why
        first = f"{first}: {rest.partition(':')[0].strip()}"
    return redact(first.strip()) or "unknown"


def shorten(text: str, max_chars: int = SHORT_CHARS) -> str:
    """The text on one line, its middle left out when it is long."""
    line = " ".join(redact(text).split())
    half = (max_chars - 3) // 2
    return line if len(line) <= max_chars else f"{line[:half]} … {line[-half:]}"


def total_spending(metrics: Mapping[str, float]) -> dict[str, float]:
    """The sums over all judges; without a cost where that of one is not known."""
    judges = spending_by_judge(metrics).values()
    names = [name for name in SPENDING_METRICS if any(name in judge for judge in judges)]
    totals = {name: sum(judge.get(name, 0.0) for judge in judges) for name in names}
    # Tokens that cost nothing have no known price: better no figure than a wrong one.
    if any(judge.get("tokens_in") and not judge.get("cost_usd") for judge in judges):
        totals.pop("cost_usd", None)
    return totals


def spending_by_judge(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Calls, tokens and cost of each judge; `judge`, and `judge_NAME` for a second one."""
    by_judge: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        stage, _, name = key.partition("/")
        if name in SPENDING_METRICS and (stage == "judge" or stage.startswith("judge_")):
            by_judge.setdefault(stage, {})[name] = value
    return by_judge


def scoring_spending(scores: Sequence[Score], scoring: Scoring) -> dict[str, Any]:
    """Seconds, calls, tokens and cost, over all judges of a mixture."""
    facts: dict[str, Any] = {"seconds": round(scoring.seconds, 3)}
    cached = sum(sum(cached_verdicts(score)) for score in scores)
    if cached:
        facts["cached"] = cached
    return facts | total_spending(scoring.metrics)


def cached_verdicts(score: Score) -> list[bool]:
    """For each judge behind a score, whether its verdict came from the cache."""
    verdicts = score.mixture.values() or [score]
    return [bool(verdict.info["cached"]) for verdict in verdicts if "cached" in verdict.info]


def is_cached(score: Score) -> bool:
    """Whether a score took no new verdict, all of its judges' being in the cache."""
    cached = cached_verdicts(score)
    return bool(cached) and all(cached)


def add_spending(spent: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Add what was counted since."""
    added = total_spending(metrics)
    return {k: spent.get(k, 0) + added.get(k, 0) for k in dict.fromkeys([*spent, *added])}


Values = Sequence[float | None]
DOMINATED = 1 / 3  # a share this small against the part's weight is as good as none


@dataclass(frozen=True)
class PartColumn:
    """One part over all rows: None where it failed or was not asked."""

    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    failed: int = 0
    gated: int = 0


def part_column(scores: Sequence[Score], name: str | None) -> PartColumn:
    """The scores of a part by its name; without one, those of the reward itself."""
    if name is None:
        raw = tuple(judged_value(score) for score in scores)
        lost = sum(v is None and s.failure != NOT_ASKED for v, s in zip(raw, scores, strict=True))
        return PartColumn(raw, raw, lost)
    values = [score.parts.get(name) for score in scores]
    imputed = [name in s.mixture and bool(s.mixture[name].imputed) for s in scores]
    raw = tuple(
        None if p is None or lost else p.raw for p, lost in zip(values, imputed, strict=True)
    )
    scaled = tuple(None if p is None else p.scaled for p in values)
    failed = sum(p is not None and p.scaled is None for p in values) + sum(imputed)
    gated = sum(p is not None and p.raw is None and p.scaled is not None for p in values)
    return PartColumn(raw, scaled, failed, gated)


def part_facts(
    settings: RewardSettings, rollouts: Sequence[Rollout], scores: Sequence[Score]
) -> dict[str, Any]:
    """Every part in numbers, what its source only reports, and what goes together."""
    lengths = [float(len(rollout.text)) for rollout in rollouts]
    parts = mixture_of(settings)
    columns = part_columns(settings, scores)
    facts_by_part = {name: _column_facts(column, lengths) for name, column in columns.items()}
    for name, facts in _weights_and_shares(parts, columns).items():
        facts_by_part[name] |= facts
    total = [judged_value(score) for score in scores]
    return {
        "parts": facts_by_part,
        "reported": _reported_moments(scores, columns),
        "length": correlation(total, lengths),
        "correlations": [
            {"parts": [first, other], "value": value}
            for first, other in combinations(columns, 2)
            if (value := correlation(columns[first].raw, columns[other].raw)) is not None
        ],
        "remarks": _mixture_warnings(parts, facts_by_part),
    }


def part_columns(settings: RewardSettings, scores: Sequence[Score]) -> dict[str, PartColumn]:
    """The parts of a mixture by name; one column, under its kind, for a reward alone."""
    parts = mixture_of(settings)
    if not parts:
        return {reward_kind(settings): part_column(scores, None)}
    return {part.name: part_column(scores, part.name) for part in parts}


def _column_facts(column: PartColumn, lengths: Sequence[float]) -> dict[str, Any]:
    return {
        "scored": Moments.of(column.raw).count,
        "failed": column.failed,
        **({"gated": column.gated} if column.gated else {}),
        **_moments(column.raw),
        "length": correlation(column.raw, lengths),
        "affine": affine_line(column.raw),
    }


def _moments(values: Values) -> dict[str, float | None]:
    valid = [v for v in values if v is not None]
    moments = Moments.of(valid)
    return {
        "mean": moments.mean if valid else None,
        "std": moments.std if valid else None,
        "min": min(valid, default=None),
        "max": max(valid, default=None),
    }


def affine_line(values: Values) -> str | None:
    """The settings that bring a part to this file's scale; None without a spread."""
    moments = Moments.of(values)
    if moments.std <= TINY:
        return None
    # The mean is printed as finely as the spread: a scale of 0.01 around 20 keeps its centre.
    digits = max(0, 2 - math.floor(math.log10(moments.std)))
    mean = round(moments.mean, digits) + 0.0
    return f"scaling: affine, mean: {_plain(mean)}, std: {_plain(float(f'{moments.std:.3g}'))}"


def _plain(number: float) -> str:
    """A number as YAML reads it: with a point wherever there is an exponent."""
    text = f"{number:.12g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _weights_and_shares(
    parts: Sequence[MixPart], columns: Mapping[str, PartColumn]
) -> dict[str, dict[str, Any]]:
    """Weight asked for, and share of the spread that came of it, as in a run's metrics."""
    spreads = {p.name: abs(p.weight) * Moments.of(columns[p.name].scaled).std for p in parts}
    total_spread, weights = math.fsum(spreads.values()), math.fsum(abs(p.weight) for p in parts)
    return {
        p.name: {
            "scaling": p.scaling,
            "weight_given": p.weight,
            "weight": abs(p.weight) / weights if weights else None,
            "share": spreads[p.name] / total_spread if total_spread > TINY else None,
        }
        for p in parts
    }


def _reported_moments(
    scores: Sequence[Score], columns: Mapping[str, PartColumn]
) -> dict[str, dict[str, float | None]]:
    """What sources only report, such as the objectives of a reward model."""
    names = dict.fromkeys(
        name
        for score in scores
        for name, part in score.parts.items()
        if part.scaled is None and name not in columns
    )
    raw = {n: [s.parts[n].raw if n in s.parts else None for s in scores] for n in names}
    return {name: _moments(values) for name, values in raw.items()}


def _mixture_warnings(
    parts: Sequence[MixPart], facts_by_part: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A part that another one dominates, or that scores all rows alike."""
    warnings = []
    for part in parts:
        facts = facts_by_part[part.name]
        if facts["scored"] > 1 and facts["std"] <= TINY:
            warnings.append(
                f"{part.name} gives every row the same score, so it decides nothing here."
            )
        elif facts["share"] is not None and facts["share"] < DOMINATED * facts["weight"]:
            loud = max(parts, key=lambda p: facts_by_part[p.name]["share"] or 0.0).name
            warnings.append(
                f"{part.name} is dominated: it makes {facts['share']:.0%} of the spread, its "
                f"weight says {facts['weight']:.0%}. Set the scaling of {loud} to zscore or affine."
            )
    return warnings


MAX_LEVELS = 12
EXAMPLES = 3


def summarise_scores(
    rows: Sequence[ResponseRow], scoring: Scoring, settings: RewardSettings
) -> dict[str, Any]:
    """Everything that the screen and `--json` say of a scored file."""
    scores = scoring.scores
    values = [value for s in scores if (value := judged_value(s)) is not None]
    return {
        "rows": len(rows),
        "scored": len(values),
        "failed": count_failures(scores),
        **_moments(values),
        "histogram": histogram(values),
        **part_facts(settings, [row.rollout for row in rows], scores),
        **scoring_spending(scores, scoring),
        **_best_and_worst(rows, scores),
        "stopped": redact(scoring.stopped),
    }


def count_failures(scores: Sequence[Score]) -> dict[str, int]:
    """How many scores failed for which cause, the most frequent first."""
    return dict(Counter(failure_cause(s) for s in scores if judged_value(s) is None).most_common())


def histogram(values: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by level, highest first; scores of many values fall into ten equal bins."""
    finite = [v for v in values if math.isfinite(v)]
    levels = Counter(round(v, 6) for v in finite)
    if not finite or len(levels) <= MAX_LEVELS:
        return [
            {"from": level, "to": level, "count": levels[level]}
            for level in sorted(levels, reverse=True)
        ]
    counts, edges = np.histogram(finite, bins=10)
    return [
        {"from": float(edges[i]), "to": float(edges[i + 1]), "count": int(counts[i])}
        for i in reversed(range(len(counts)))
    ]


def _best_and_worst(rows: Sequence[ResponseRow], scores: Sequence[Score]) -> dict[str, Any]:
    order = sorted(
        (i for i, s in enumerate(scores) if judged_value(s) is not None),
        key=lambda i: (scores[i].value, i),
    )
    half = order[len(order) // 2 :]
    return {
        "best": [_example(rows[i], scores[i]) for i in reversed(half[-EXAMPLES:])],
        "worst": [_example(rows[i], scores[i]) for i in order[: min(EXAMPLES, len(order) // 2)]],
    }


def _example(row: ResponseRow, score: Score) -> dict[str, Any]:
    return {
        "row": str(row.place),
        "score": score.value,
        "response": shorten(row.rollout.text),
        "reason": shorten(score.reason),
    }
