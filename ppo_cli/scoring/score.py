"""Score rollouts outside training with the code that training uses, and summarise the scores.

When scoring stops early (budget, judge unavailable, Ctrl-C), the verdicts so far are returned and
the others fail with "not asked"; the judge's cache lets the same command resume. The summary has
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
from ppo_cli.errors import Interrupted, RewardError, plural
from ppo_cli.moments import TINY, Moments, correlation
from ppo_cli.records import Prompt, Rollout, Score, data_sources
from ppo_cli.rewards.base import Reward, RoundKind, submit_rollout
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run_folder.lines import plain
from ppo_cli.scoring.rows import ResponseRow
from ppo_cli.scoring.sources import override_all, reward_kind
from ppo_cli.secrets.redact import redact

NOT_ASKED = "not asked"
SPENDING_METRICS = ("calls", "cost_usd", "tokens_in", "tokens_out")  # by each judge
STOPPED_BY_CTRL_C = "Stopped by Ctrl-C."
POLL_S = 0.2  # how often a waiting reward is asked for the reason
SHORT_CHARS = 100  # of a text in a table
MANY_ROWS = 64  # from this size the two calls of a format check are negligible
# Monitors watch a judge over a run. The failure rate is defined per step, and a file has no steps.
MONITORS_OFF = {
    "canary_every": 0, "noise_responses": 0, "monitor.model": None, "max_failure_rate": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Callbacks:
    """Callbacks for progress, for notes on why scoring waits, and for each finished score.

    `scored` is called on the thread that finishes the score.
    """

    advance: Callable[[int], None] = lambda count: None
    note: Callable[[str], None] = lambda text: None
    scored: Callable[[Rollout, Score], None] = lambda rollout, score: None


@dataclass(frozen=True)
class Scoring:
    """Scores in the order of the rollouts; `stopped` is the reason why some are missing."""

    scores: tuple[Score, ...]
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


@contextmanager
def open_reward(
    settings: RewardSettings, prompts: Sequence[Prompt], watch: Callbacks,
    folder: Path | None = None, *, check_format: bool = False,
) -> Iterator[Reward]:  # fmt: skip
    """Build and start the reward as training does before its first rollout; close it at the end.

    Spending adds to what earlier starts in `folder` have spent.

    Monitors of a judge (canary replies, a second judge) stay off, in parts of a mixture too. A
    reward model that fails its self-test only gives a warning, since the scores themselves are
    shown. With `check_format` a judge of many rows first answers questions with known answers,
    unless `canary_every` is 0.
    """
    if any(judge.settings.of_the_run for judge in judges_of(settings)):
        raise RewardError(
            "--rm_mode compare with pairs, list or base compares with other responses of a run, "
            "but these rows are not from a run. Use --rm_compare ground_truth, or --rm_mode text."
        )
    # Turn the monitors off in every judge, then build the reward.
    # The self-test only warns here: a bad model shows in the scores.
    quiet = override_all(settings, "judge", MONITORS_OFF)
    if settings.model.self_test == "strict":
        quiet = override_all(quiet, "model", {"self_test": "warn"})
    reward = build_reward(quiet, sources=data_sources(prompts))
    try:
        if folder is not None:
            reward.attach(folder)
        reward.start(prompts, tell=watch.note)
        # The format check costs calls, so it is only worth them for many rows.
        allowed = any(judge.settings.canary_every for judge in judges_of(settings))
        if check_format and allowed and len(prompts) >= MANY_ROWS:
            reward.check_format(watch.note)
        yield reward
    finally:
        reward.close()


def score_all(
    reward: Reward, rollouts: Iterable[Rollout], watch: Callbacks, kind: RoundKind = "train"
) -> Scoring:
    """Submit all rollouts as one step and wait for their scores.

    `rollouts` may be a generator that is still sampling. After a stop, the rollouts of a sequence
    that were not submitted get a failed score.
    """
    started = time.monotonic()
    arrived: SimpleQueue[Future[Score]] = SimpleQueue()
    futures: list[Future[Score]] = []
    stopped = ""
    try:
        # Step 0 is not a training step: per-step state of judges starts empty.
        reward.begin_step(0)
        for rollout in rollouts:
            futures.append(submit_rollout(reward, rollout))
            # Callbacks run on the thread that finishes a score; the queue brings the futures back
            # to this one.
            futures[-1].add_done_callback(partial(_deliver, watch, rollout, arrived))
        reward.end_round(kind)
        _wait_for_all(reward, len(futures), arrived, watch)
    except Interrupted as reason:
        stopped = str(reason)
    except KeyboardInterrupt:
        stopped = STOPPED_BY_CTRL_C
    # Read the metrics after a stop too: finished and cancelled calls are billed.
    metrics = final_metrics(reward, stopped)
    # Each reward model reports its own count of shortened prompts.
    cut = sum(int(value) for name, value in metrics.items() if name.endswith("/prompts_cut"))
    if cut:
        watch.note(f"Cut to fit the reward model, from the left: {plural(cut, 'prompt')}.")
    scores = [_score_if_done(future) for future in futures]
    if isinstance(rollouts, Sequence):
        scores += [Score.failed(NOT_ASKED)] * (len(rollouts) - len(futures))
    return Scoring(tuple(scores), time.monotonic() - started, metrics, stopped)


def final_metrics(reward: Reward, stopped: str) -> dict[str, float]:
    """The reward's metrics; after a stop, first wait for calls in progress: they are billed too.

    Closing also makes a mixture release scores that waited for the rest of the step.
    """
    if stopped:
        with suppress(KeyboardInterrupt):
            reward.close()
    return reward.pop_metrics()


def _deliver(
    watch: Callbacks, rollout: Rollout, arrived: SimpleQueue[Future[Score]], future: Future[Score]
) -> None:
    """Call `scored`, then queue the future; an OSError of the callback replaces its result."""
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
    """Wait for `pending` futures; raises the exception of a future."""
    # Show the reason for a pause once, until it changes.
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
    """The score of a finished future; otherwise cancel it and return a failed score."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        future.cancel()
        return Score.failed(NOT_ASKED)
    return future.result()


def resume_advice(settings: RewardSettings) -> str:
    """Advice to show after an early stop."""
    if any(judge.settings.cache != "off" for judge in judges_of(settings)):
        return "Run the same command again: finished verdicts come from the cache."
    return "Run the same command again."


def scored_row(row: ResponseRow, score: Score) -> dict[str, Any]:
    """The row of the file, with the columns of its score added."""
    # A score's columns in the form that JSON and tables can hold.
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
    """The value of a score; None if it failed or was imputed."""
    return score.value if score.judged else None


def failure_cause(score: Score) -> str:
    """The short name of a failure: the start of its text, up to the first colon."""
    cause = score.failure or score.imputed
    first, _, rest = cause.partition(":")
    if first in score.parts and rest:  # in a mixture: the part, then the cause
        first = f"{first}: {rest.partition(':')[0].strip()}"
    return redact(first.strip()) or "unknown"


def shorten(text: str, max_chars: int = SHORT_CHARS) -> str:
    """The text on one line, redacted; a long text loses its middle."""
    line = " ".join(redact(text).split())
    # Half of the space for each end, minus the ellipsis between them.
    half = (max_chars - 3) // 2
    return line if len(line) <= max_chars else f"{line[:half]} … {line[-half:]}"


def total_spending(metrics: Mapping[str, float]) -> dict[str, float]:
    """Calls, tokens and cost summed over all judges; no cost if one judge's price is unknown."""
    judges = spending_by_judge(metrics).values()
    # Only metrics that a judge has reported: local judges have no cost.
    names = [name for name in SPENDING_METRICS if any(name in judge for judge in judges)]
    totals = {name: sum(judge.get(name, 0.0) for judge in judges) for name in names}
    # Tokens without a cost mean an unknown price: report no cost rather than a wrong one.
    if any(judge.get("tokens_in") and not judge.get("cost_usd") for judge in judges):
        totals.pop("cost_usd", None)
    return totals


def spending_by_judge(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Calls, tokens and cost of each judge, by metric group: `judge` or `judge_NAME`."""
    by_judge: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        stage, _, name = key.partition("/")
        if name in SPENDING_METRICS and (stage == "judge" or stage.startswith("judge_")):
            by_judge.setdefault(stage, {})[name] = value
    return by_judge


def scoring_spending(scores: Sequence[Score], scoring: Scoring) -> dict[str, Any]:
    """Seconds, cached verdicts, calls, tokens and cost, summed over all judges."""
    facts: dict[str, Any] = {"seconds": round(scoring.seconds, 3)}
    cached = sum(sum(cached_verdicts(score)) for score in scores)
    if cached:
        facts["cached"] = cached
    return facts | total_spending(scoring.metrics)


def cached_verdicts(score: Score) -> list[bool]:
    """For each judge of a score, whether its verdict came from the cache."""
    # A mixture has a verdict per judge, a single judge its own.
    verdicts = score.mixture.values() or [score]
    return [bool(verdict.info["cached"]) for verdict in verdicts if "cached" in verdict.info]


Values = Sequence[float | None]
DOMINATED = 1 / 3  # share of the spread divided by the weight, below which a part hardly counts


@dataclass(frozen=True)
class PartColumn:
    """The scores of one part for all rows: None where it failed or was not asked."""

    raw: tuple[float | None, ...]
    scaled: tuple[float | None, ...]
    failed: int = 0
    gated: int = 0


def part_column(scores: Sequence[Score], name: str | None) -> PartColumn:
    """The scores of the part `name`; with None, those of the whole reward."""
    if name is None:
        raw = tuple(judged_value(score) for score in scores)
        lost = sum(v is None and s.failure != NOT_ASKED for v, s in zip(raw, scores, strict=True))
        return PartColumn(raw, raw, lost)
    values = [score.parts.get(name) for score in scores]
    # An imputed value of a mixture part is a failure here, although training uses it.
    imputed = [name in s.mixture and bool(s.mixture[name].imputed) for s in scores]
    raw = tuple(
        None if p is None or lost else p.raw for p, lost in zip(values, imputed, strict=True)
    )
    scaled = tuple(None if p is None else p.scaled for p in values)
    # No scaled value: the part failed. No raw one, but a scaled one: its gate decided.
    failed = sum(p is not None and p.scaled is None for p in values) + sum(imputed)
    gated = sum(p is not None and p.raw is None and p.scaled is not None for p in values)
    return PartColumn(raw, scaled, failed, gated)


def part_facts(
    settings: RewardSettings, rollouts: Sequence[Rollout], scores: Sequence[Score]
) -> dict[str, Any]:
    """Figures of each part, reported values, and correlations between parts and with length."""
    lengths = [float(rollout.policy_chars) for rollout in rollouts]
    parts = mixture_of(settings)
    # Figures of each part alone, then how they add up in the mixture.
    columns = part_columns(settings, scores)
    facts_by_part: dict[str, dict[str, Any]] = {
        name: {
            "scored": Moments.from_values(column.raw).count,
            "failed": column.failed,
            **({"gated": column.gated} if column.gated else {}),
            **_moments(column.raw),
            "length": correlation(column.raw, lengths),
            "affine": affine_line(column.raw),
        }
        for name, column in columns.items()
    }
    for name, facts in _weights_and_shares(parts, columns).items():
        facts_by_part[name] |= facts
    total = [judged_value(score) for score in scores]
    # Values without a scaling, such as the objectives of a reward model, are only reported.
    reported: dict[str, list[float | None]] = {
        name: [s.parts[name].raw if name in s.parts else None for s in scores]
        for score in scores
        for name, part in score.parts.items()
        if part.scaled is None and name not in columns
    }
    return {
        "parts": facts_by_part,
        "reported": {name: _moments(values) for name, values in reported.items()},
        "length": correlation(total, lengths),
        "correlations": [
            {"parts": [first, other], "value": value}
            for first, other in combinations(columns, 2)
            if (value := correlation(columns[first].raw, columns[other].raw)) is not None
        ],
        "remarks": _mixture_warnings(parts, facts_by_part),
    }


def part_columns(settings: RewardSettings, scores: Sequence[Score]) -> dict[str, PartColumn]:
    """The columns of a mixture by part; without parts, one column named by the reward's kind."""
    parts = mixture_of(settings)
    if not parts:
        return {reward_kind(settings): part_column(scores, None)}
    return {part.name: part_column(scores, part.name) for part in parts}


def _moments(values: Values) -> dict[str, float | None]:
    """Return mean, deviation, lowest and highest value."""
    valid = [v for v in values if v is not None]
    moments = Moments.from_values(valid)
    return {
        "mean": moments.mean if valid else None,
        "std": moments.std if valid else None,
        "min": min(valid, default=None),
        "max": max(valid, default=None),
    }


def affine_line(values: Values) -> str | None:
    """Affine settings that standardise a part on this file; None if all scores are equal."""
    moments = Moments.from_values(values)
    if moments.std <= TINY:
        return None
    # The mean gets as many digits as the spread needs: a spread of 0.01 around 20 keeps its centre.
    digits = max(0, 2 - math.floor(math.log10(moments.std)))
    mean = round(moments.mean, digits) + 0.0
    std = float(f"{moments.std:.3g}")
    return f"scaling: affine, mean: {_yaml_number(mean)}, std: {_yaml_number(std)}"


def _yaml_number(number: float) -> str:
    """A number in YAML syntax: YAML needs a decimal point before an exponent."""
    text = f"{number:.12g}"
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def _weights_and_shares(
    parts: Sequence[MixPart], columns: Mapping[str, PartColumn]
) -> dict[str, dict[str, Any]]:
    """Each part's configured weight and its actual share of the spread, as in a run's metrics."""
    # A part's pull is its weight times the spread of its scaled scores.
    spreads = {
        p.name: abs(p.weight) * Moments.from_values(columns[p.name].scaled).std for p in parts
    }
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


def _mixture_warnings(
    parts: Sequence[MixPart], facts_by_part: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Warnings about parts that another part dominates, or that give every row the same score."""
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
                f"weight is {facts['weight']:.0%}. Set the scaling of {loud} to zscore or affine."
            )
    return warnings


MAX_LEVELS = 12  # lines of a histogram
EXAMPLES = 3  # best and worst rows that are shown


def summarise_scores(
    rows: Sequence[ResponseRow], scoring: Scoring, settings: RewardSettings
) -> dict[str, Any]:
    """The summary of a scored file, as shown on the screen and by `--json`."""
    scores = scoring.scores
    # Failed and imputed scores are counted, but are not in the figures.
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
    """The number of failed scores by cause, most frequent first."""
    return dict(Counter(failure_cause(s) for s in scores if judged_value(s) is None).most_common())


def histogram(values: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by level, highest first; more than MAX_LEVELS levels are put into ten equal bins."""
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
    """Return the rows with the highest and the lowest scores."""
    # Equal scores keep the order of the file.
    order = sorted(
        (i for i, s in enumerate(scores) if judged_value(s) is not None),
        key=lambda i: (scores[i].value, i),
    )
    # Best and worst come from different halves, so that no row is in both.
    half = order[len(order) // 2 :]
    return {
        "best": [_describe_row(rows[i], scores[i]) for i in reversed(half[-EXAMPLES:])],
        "worst": [
            _describe_row(rows[i], scores[i]) for i in order[: min(EXAMPLES, len(order) // 2)]
        ],
    }


def _describe_row(row: ResponseRow, score: Score) -> dict[str, Any]:
    """Return a row as an example for the summary."""
    return {
        "row": str(row.place),
        "score": score.value,
        "response": shorten(row.rollout.text),
        "reason": shorten(score.reason),
    }
