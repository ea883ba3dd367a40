"""Monitors the judge during training: worthless replies, and a second judge to compare with.

Neither changes a reward. What goes wrong here is counted and never stops a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ppo_cli.config.checks.rewards import scale_labels
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import PpoError, RewardError
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import LabelledRollouts, Tell
from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.calls import JudgeError, Question, Scale, UnlimitedCost
from ppo_cli.rewards.judge.client import Counters, JudgeClient
from ppo_cli.rewards.judge.costs import Ledger, share_ledger
from ppo_cli.rewards.judge.providers import build_provider, monitor_of
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits


@dataclass
class StepReport:
    """What the client of a judge cannot know of a step: scores, lengths, votes, gated responses."""

    lengths: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    gated: int = 0

    def note(self, rollout: Rollout, score: Score) -> None:
        """Take in one judged response."""
        self.lengths.append(len(rollout.text))
        self.values.append(float(score.value or 0.0))
        if "vote_spread" in score.info:
            self.spreads.append(float(score.info["vote_spread"]))

    def metrics(self, counters: Counters, ledger: Ledger) -> dict[str, float]:
        """All metrics of the step; none at all when nothing was judged."""
        spent = ledger.take()
        if not (self.gated or counters.verdicts or counters.calls or counters.cached):
            return {}
        metrics = {"judge/gated": float(self.gated)} | call_metrics(counters)
        metrics |= {
            "judge/tokens_in": float(spent.usage.input),
            "judge/tokens_out": float(spent.usage.output),
            "judge/cost_usd": spent.usd,
            "judge/cost_usd_total": ledger.total.usd,
        }
        if self.spreads:
            metrics["judge/vote_spread"] = float(np.mean(self.spreads))
        correlation = correlate(self.lengths, self.values)
        if correlation is not None:
            metrics["judge/length_correlation"] = correlation
        return metrics


def call_metrics(counters: Counters) -> dict[str, float]:
    """Rates and latencies of the calls of a step."""
    errors = sum(counters.errors.values())
    unread = sum(counters.unread.values())
    replies = unread + len(counters.latencies)
    requests = counters.cached + counters.shared + counters.verdicts
    metrics = {
        "judge/calls": float(counters.calls),
        "judge/error_rate": errors / counters.calls if counters.calls else 0.0,
        "judge/unread": unread / replies if replies else 0.0,
        "judge/refusals": float(counters.refused),
        "judge/retries": float(counters.retried),
        "judge/cached": float(counters.cached + counters.shared),
        "judge/cache_hits": (counters.cached + counters.shared) / requests if requests else 0.0,
        "judge/concurrency": float(counters.concurrency),
        "judge/outage_s": counters.open_seconds,
    }
    metrics |= {f"judge/errors/{cause}": float(n) for cause, n in counters.errors.items()}
    metrics |= {f"judge/unread/{cause}": n / replies for cause, n in counters.unread.items()}
    if counters.latencies:
        p50, p95 = np.percentile(counters.latencies, [50, 95])
        metrics |= {"judge/latency_p50_s": float(p50), "judge/latency_p95_s": float(p95)}
    return metrics


def correlate(xs: list[int] | list[float], ys: list[float]) -> float | None:
    """Pearson's correlation; None where one of the two does not vary."""
    if len(xs) < 3 or np.ptp(xs) == 0 or np.ptp(ys) == 0:
        return None
    return float(np.corrcoef(xs, ys)[0, 1])


class Canaries:
    """Replies without content, sent past gate and cache: a sound judge gives them nothing."""

    def __init__(self, client: JudgeClient, *, every: int) -> None:
        self.due = False
        self._client = client
        self._every = every
        self._asked_at = -1
        self._values: list[float] = []
        self._failed = 0

    def begin_step(self, step: int) -> None:
        """Mark them due every so many steps; a step that is taken again asks no second time."""
        self.due = self._every > 0 and step % self._every == 0 and step > self._asked_at
        if self.due:
            self._asked_at = step

    async def ask(self, question: Question) -> None:
        """Have one worthless reply judged."""
        try:
            verdict = await self._client.ask(question, fresh=True)
        except (JudgeError, PpoError):
            self._failed += 1
        else:
            self._values.append(verdict.value)

    def take(self, scale: Scale) -> dict[str, float]:
        """Metrics of those that came back since the last call."""
        values, failed = self._values, self._failed
        self._values, self._failed = [], 0
        metrics = {"judge/canary_failed": float(failed)} if failed else {}
        if values:
            metrics["judge/canary_max"] = max(scale.scaled(v) for v in values)
        return metrics


class LabelledCheck:
    """Responses with labels by people, which the judge reads anew, past the cache, now and then.

    They stay the same: where its scores change, the judge behind its name has. `first` has the
    score that each got when it was first read, by the digest of its text.
    """

    def __init__(
        self,
        rows: LabelledRollouts,
        judge: Callable[[Rollout], Awaitable[float]],
        scale: Scale,
        every: int,
    ) -> None:
        labels = scale_labels([label for _, label in rows], scale.low, scale.high)
        self._rows = [(row, label) for (row, _), label in zip(rows, labels, strict=True)]
        self._judge = judge
        self._every = every
        self._asked_at = 0
        self._reading = False
        self._metrics: dict[str, float] = {}
        self.first: dict[str, float] = {}

    def is_due(self, step: int) -> bool:
        """Whether they are to be read in this step; one that is taken again reads no second time.

        They are in the first step that there is, and then every so often.
        """
        begun = bool(self.first or self._asked_at)
        due = step > self._asked_at and (not begun or step % self._every == 0)
        if due:
            self._asked_at = step
        return due and not self._reading

    async def read(self) -> None:
        """Have all of them judged, one by one; what fails is counted."""
        self._reading = True
        found = await asyncio.gather(
            *(self._judge(row) for row, _ in self._rows), return_exceptions=True
        )
        self._reading = False
        judged = [
            (_digest(row), score, label)
            for (row, label), score in zip(self._rows, found, strict=True)
            if isinstance(score, float)
        ]
        self._metrics = {"judge/label_failed": float(len(found) - len(judged))}
        if not judged:
            return
        for name, score, _ in judged:
            self.first.setdefault(name, score)
        scores, labels = [score for _, score, _ in judged], [label for _, _, label in judged]
        moved = [score - self.first[name] for name, score, _ in judged]
        self._metrics["judge/label_gap"] = float(np.mean(scores) - np.mean(labels))
        self._metrics["judge/label_drift"] = float(np.mean(moved))
        self._metrics["judge/label_noise"] = float(np.std(moved) / math.sqrt(len(moved)))
        agreement = correlate(labels, scores)
        if agreement is not None:
            self._metrics["judge/label_correlation"] = agreement

    def take(self) -> dict[str, float]:
        """Metrics of a reading that has come to its end since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics


def _digest(row: Rollout) -> str:
    text = f"{row.prompt.text}\0{row.text}".encode(errors="replace")
    return hashlib.sha256(text).hexdigest()[:16]


MONITOR_PENDING = {"monitor": None, "monitor_gap": None}  # what a rollout has of a second judge


class Monitor:
    """A second judge that reads a share of the responses and rewards none.

    One that is not required, and that cannot be asked, reads nothing.
    """

    def __init__(
        self,
        api: ApiReward,
        *,
        environ: Mapping[str, str],
        limits: Limits,
        ledger: Ledger,
        cache: VerdictCache | None,
    ) -> None:
        judge = monitor_of(api)
        self._shared_ledger = share_ledger(ledger, judge)
        self._required, self._share = api.monitor.required, api.monitor.share
        self._patience = 2 * limits.timeout
        self._watching: set[asyncio.Task[None]] = set()
        self._pairs: list[tuple[float, float]] = []
        self._failed = 0
        self._client: JudgeClient | None = None
        try:
            provider = build_provider(judge, environ=environ, flags="--rm_monitor")
        except RewardError as error:
            if self._required:
                raise
            self._share, self._refused = 0.0, str(error)  # the start tells why there is no client
            return
        # It never gives up for good, and its callers wait no longer than `watch` allows.
        limits = replace(limits, concurrency=min(8, limits.concurrency), outage_wait=math.inf)
        self._client = JudgeClient(provider, limits=limits, ledger=self._shared_ledger, cache=cache)

    def wants(self, rollout: Rollout) -> bool:
        """Choose the share by a hash, so that the same responses are read in every run."""
        key = f"{rollout.prompt.uid}/{rollout.sample}/{rollout.text}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:4]) < self._share * 2**32

    async def try_out(self, question: Question, tell: Tell) -> None:
        """Make one call; raises RewardError when no later one can do better.

        A monitor that is not required then reads nothing from now on.
        """
        if self._client is None:
            tell(f"There is no second judge: {self._refused}")
            return
        try:
            await self._client.probe(question)
        except UnlimitedCost as error:
            raise RewardError(str(error)) from error
        except JudgeError as error:
            if error.kind is Failure.FATAL:
                if self._required:
                    raise RewardError(f"The monitoring judge cannot be used: {error}") from error
                self._share = 0.0
                tell(f"The second judge cannot be used, and training goes on without: {error}")
                return
            tell(f"The monitoring judge gave no verdict yet ({error}); training goes on without.")

    def begin(self, question: Question, value: float, info: dict[str, Any]) -> None:
        """Have the second judge read what the first has scored; nobody waits for it.

        Its verdict goes into `info`, which has the keys of MONITOR_PENDING already: the rollout
        file may be written at any time.
        """
        assert self._client is not None, "without one no response is wanted"
        watching = self._watch(self._client, question, value, info)
        task = asyncio.get_running_loop().create_task(watching)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(
        self, client: JudgeClient, question: Question, first: float, info: dict[str, Any]
    ) -> None:
        try:
            async with asyncio.timeout(self._patience):
                verdict = await client.ask(question)
        except (JudgeError, PpoError, TimeoutError):
            self._failed += 1
        else:
            value = question.scale.scaled(verdict.value)
            self._pairs.append((first, value))
            info |= {"monitor": value, "monitor_gap": abs(first - value)}

    def take(self) -> dict[str, float]:
        """Metrics of the responses that both have scored since the last call."""
        pairs, failed = self._pairs, self._failed
        self._pairs, self._failed = [], 0
        metrics = {"judge/monitor_failed": float(failed)} if failed else {}
        spent = self._shared_ledger.take()
        if spent.calls:
            metrics["judge/monitor_cost_usd"] = spent.usd
        if pairs:
            first, second = [p[0] for p in pairs], [p[1] for p in pairs]
            metrics["judge/monitor_mean"] = float(np.mean(second))
            metrics["judge/monitor_gap"] = float(np.mean(first) - np.mean(second))
            agreement = correlate(first, second)
            if agreement is not None:
                metrics["judge/monitor_correlation"] = agreement
        return metrics

    async def close(self) -> None:
        """Drop what is under way; it rewards nobody."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close(0.0)
