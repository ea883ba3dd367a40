"""Score rollouts outside training, by the very path that training takes.

Whatever stops it (budget, outage, Ctrl-C), the verdicts that are there are kept; what is
missing then says "not asked", and a judge's cache lets the same command go on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ppo_cli.config.mixture import judges_of
from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.records import Prompt, Rollout, Score
from ppo_cli.redact import redact
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.registry import build_reward
from ppo_cli.run_folder.folder import plain
from ppo_cli.trust.rows import Answered
from ppo_cli.trust.sources import with_judges, with_models

NOT_ASKED = "not asked"
BY_HAND = "Stopped by Ctrl-C."
POLL_S = 0.2
CUT = 100
# A share of failed verdicts is one of a step's responses, and a file is no step.
QUIET = {"canary_every": 0, "monitor.model": None, "max_failure_rate": 1.0}


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

    What only watches a judge during training (canary replies, a second judge) stays off, in the
    parts of a mixture too; and a reward model that fails its self-test is only told, since
    whoever asks for scores sees them.
    """
    sources = {prompt.data_source for prompt in prompts}
    quiet = with_judges(settings, QUIET)
    if settings.model.self_test == "strict":
        quiet = with_models(quiet, {"self_test": "warn"})
    reward = build_reward(quiet, sources=sources)
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
        stopped = BY_HAND
    metrics = reward.measure()
    cut = sum(int(value) for name, value in metrics.items() if name.endswith("/prompts_cut"))
    if cut:
        watch.note(f"{cut} prompts were cut to fit the reward model, from the left.")
    if stopped == BY_HAND:
        # A mixture holds its scores back until all of them are there, or no more will come.
        with suppress(KeyboardInterrupt):
            reward.close()
    scores = [_now(future) for future in futures]
    scores += [Score.failed(NOT_ASKED)] * (len(rollouts) - len(futures))
    return Scoring(tuple(scores), time.monotonic() - started, metrics, stopped)


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
    if any(judge.settings.cache != "off" for judge in judges_of(settings)):
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


def judged(score: Score) -> float | None:
    """A score that was really given; one put in for want of a verdict does not count."""
    return score.value if score.judged else None


def cause_of(score: Score) -> str:
    """The short word for a failure: how its text begins."""
    told = score.failure or str(score.info.get("imputed", ""))
    first, _, rest = told.partition(":")
    if first in score.parts and rest:  # of a mixture: which part, then why
        first = f"{first}: {rest.partition(':')[0].strip()}"
    return redact(first.strip()) or "unknown"


def cut(text: str, most: int = CUT) -> str:
    """The text on one line, its middle left out when it is long."""
    line = " ".join(redact(text).split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]} … {line[-half:]}"
