"""Score rollouts outside training, by the very path that training takes.

Whatever stops it (budget, outage, Ctrl-C), the verdicts that are there are kept; what is
missing then says "not asked", and a judge's cache lets the same command go on from there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from ppo_cli.config.rewarding import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run_log import plain
from ppo_cli.trust.rows import Answered

NOT_ASKED = "not asked"
POLL_S = 0.2
MOST_LEVELS = 12
SHOWN = 3
CUT = 100
COUNTED = ("calls", "cost_usd", "tokens_in", "tokens_out")


@dataclass(frozen=True)
class Watch:
    """Who is told how far the scoring is, and why it does not move."""

    advance: Callable[[int], None] = lambda more: None
    note: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Scoring:
    """Scores in the order of the rollouts; `stopped` says why some were never asked for."""

    scores: tuple[Score, ...]
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


@contextmanager
def started(settings: RewardSettings, prompts: Sequence[Prompt], watch: Watch) -> Iterator[Reward]:
    """Build the reward and try it out, as training does before its first rollout.

    What only watches a judge during training (canary replies, a second judge) stays off.
    """
    api = settings.api
    quiet = {"canary_every": 0, "monitor": api.monitor.model_copy(update={"model": None})}
    quiet["max_failure_rate"] = 1.0  # a share of a step's responses, and a file is no step
    plain_settings = settings.model_copy(update={"api": api.model_copy(update=quiet)})
    reward = build_reward(plain_settings, sources={prompt.data_source for prompt in prompts})
    try:
        reward.start(prompts, tell=watch.note)
        yield reward
    finally:
        reward.close()


def score_all(reward: Reward, rollouts: Sequence[Rollout], watch: Watch) -> Scoring:
    """Submit every rollout as one step and gather the scores as they come."""
    started = time.monotonic()
    arrived: SimpleQueue[int] = SimpleQueue()
    futures: list[Future[Score]] = []
    stopped = ""
    try:
        reward.begin_step(0)
        for index, rollout in enumerate(rollouts):
            futures.append(reward.submit(rollout))
            futures[-1].add_done_callback(partial(_arrive, arrived, index))
        reward.settle()
        _gather(reward, futures, arrived, watch)
    except Interrupted as reason:
        stopped = str(reason)
    except KeyboardInterrupt:
        stopped = "Stopped by Ctrl-C."
    scores = [_now(future) for future in futures]
    scores += [Score.failed(NOT_ASKED)] * (len(rollouts) - len(futures))
    return Scoring(tuple(scores), time.monotonic() - started, reward.measure(), stopped)


def _arrive(arrived: SimpleQueue[int], index: int, future: Future[Score]) -> None:
    arrived.put(index)


def _gather(
    reward: Reward, futures: Sequence[Future[Score]], arrived: SimpleQueue[int], watch: Watch
) -> None:
    """Wait for all of them; raises what a future raises."""
    told: str | None = None
    left = len(futures)
    while left:
        try:
            index = arrived.get(timeout=POLL_S)
        except Empty:
            why = reward.waiting_for()
            if why is not None and why != told:
                watch.note(why)
            told = why
            continue
        futures[index].result()
        left -= 1
        watch.advance(1)


def _now(future: Future[Score]) -> Score:
    """The score as far as it is there."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        future.cancel()
        return Score.failed(NOT_ASKED)
    return future.result()


def to_go_on(settings: RewardSettings) -> str:
    """What to do after an early stop."""
    if settings.api.enable and settings.api.cache != "off":
        return "Run the same command again: the verdicts that are there come from the cache."
    return "Run the same command again."


def scored_row(row: Answered, score: Score) -> dict[str, Any]:
    """The row as it stands in the file, with its score."""
    said: dict[str, Any] = plain(
        {
            "score": score.value,
            "failure": score.failure or None,
            "reason": score.reason,
            "parts": {n: {"raw": p.raw, "scaled": p.scaled} for n, p in score.parts.items()},
            "info": dict(score.info),
        }
    )
    return {**row.record, **said}


def summarise(rows: Sequence[Answered], scoring: Scoring) -> dict[str, Any]:
    """Everything that the screen and `--json` say of a scored file."""
    scores = scoring.scores
    values = [value for s in scores if (value := judged(s)) is not None]
    return {
        "rows": len(rows),
        "scored": len(values),
        "failed": dict(Counter(cause_of(s) for s in scores if judged(s) is None).most_common()),
        "mean": float(np.mean(values)) if values else None,
        "std": float(np.std(values)) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "histogram": histogram(values),
        **spending(scores, scoring),
        **_ends(rows, scores),
        "stopped": redact(scoring.stopped),
    }


def judged(score: Score) -> float | None:
    """A score that was really given; one put in for want of a verdict does not count."""
    return score.value if score.judged else None


def cause_of(score: Score) -> str:
    """The short word for a failure: how its text begins."""
    told = score.failure or str(score.info.get("imputed", ""))
    return redact(told.partition(":")[0].strip()) or "unknown"


def spending(scores: Sequence[Score], scoring: Scoring) -> dict[str, Any]:
    """Seconds, calls, tokens and cost; what nobody counted is left out."""
    found: dict[str, Any] = {"seconds": round(scoring.seconds, 3)}
    cached = sum(bool(s.info.get("cached")) for s in scores)
    if cached:
        found["cached"] = cached
    return found | _counted(scoring.metrics)


def _counted(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {name: metrics[f"judge/{name}"] for name in COUNTED if f"judge/{name}" in metrics}
    # Tokens that cost nothing have no known price: better no figure than a wrong one.
    if found.get("tokens_in") and not found.get("cost_usd"):
        found.pop("cost_usd", None)
    return found


def add_spending(spent: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Add what was counted since."""
    more = _counted(metrics)
    return {k: spent.get(k, 0) + more.get(k, 0) for k in dict.fromkeys([*spent, *more])}


def histogram(values: Sequence[float]) -> list[dict[str, Any]]:
    """Counts by level, highest first; scores of many values fall into ten equal bins."""
    known = [v for v in values if math.isfinite(v)]
    levels = Counter(round(v, 6) for v in known)
    if not known or len(levels) <= MOST_LEVELS:
        return [
            {"from": level, "to": level, "count": levels[level]}
            for level in sorted(levels, reverse=True)
        ]
    counts, edges = np.histogram(known, bins=10)
    return [
        {"from": float(edges[i]), "to": float(edges[i + 1]), "count": int(counts[i])}
        for i in reversed(range(len(counts)))
    ]


def _ends(rows: Sequence[Answered], scores: Sequence[Score]) -> dict[str, Any]:
    order = sorted(
        (i for i, s in enumerate(scores) if judged(s) is not None),
        key=lambda i: (scores[i].value, i),
    )
    half = order[len(order) // 2 :]
    return {
        "best": [_example(rows[i], scores[i]) for i in reversed(half[-SHOWN:])],
        "worst": [_example(rows[i], scores[i]) for i in order[: min(SHOWN, len(order) // 2)]],
    }


def _example(row: Answered, score: Score) -> dict[str, Any]:
    return {
        "row": str(row.place),
        "score": score.value,
        "response": cut(row.rollout.text),
        "reason": cut(score.reason),
    }


def cut(text: str, most: int = CUT) -> str:
    """The text on one line, its middle left out when it is long."""
    line = " ".join(redact(text).split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"
