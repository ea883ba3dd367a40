"""Observes a judge during training: its calls, noise, canaries, labels and a second judge.

Nothing here changes a reward. Failures are counted and never stop a run.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.digests import digest_text
from ppo_cli.errors import PpoError, RewardError
from ppo_cli.estimates import correlate
from ppo_cli.planning.findings.rewards import scale_labels
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import LabelledRollouts, Tell
from ppo_cli.rewards.judge.cache import VerdictCache
from ppo_cli.rewards.judge.calls import JudgeError, Question, Scale, UnlimitedCost
from ppo_cli.rewards.judge.client import Counters, JudgeClient
from ppo_cli.rewards.judge.costs import Ledger, read_lines, share_ledger
from ppo_cli.rewards.judge.providers import build_provider, monitor_settings
from ppo_cli.rewards.remote.failures import Failure
from ppo_cli.rewards.remote.limits import Limits

PlacedVerdict = tuple[float, Sequence[float]]  # the score, and those of pieces, all in [0, 1]
AskAgain = Callable[[], Awaitable[PlacedVerdict]]
NOISE_REPEATS = 2  # further verdicts on each response whose noise is measured
NOISE_WAIT_S = 30.0  # time for them at the end of a step; later ones count in a later step
NOISE_STOP_S = 2.0  # the same for the last step before a stop, which has no later one


@dataclass
class StepReport:
    """What the client does not know of a step: scores, lengths, votes, gated responses.

    `votes` are those that each response gets: later ones were only asked for because these differ.
    """

    votes: int
    lengths: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    verdicts: list[list[float]] = field(default_factory=list)
    gated: int = 0

    def add(self, rollout: Rollout, score: Score) -> None:
        """Add one judged response."""
        self.lengths.append(rollout.policy_chars)
        self.values.append(score.number)
        if "vote_spread" in score.info:
            self.spreads.append(float(score.info["vote_spread"]))

    def metrics(self, counters: Counters, ledger: Ledger) -> dict[str, float]:
        """Return all metrics of the step; none when nothing was judged."""
        spent = ledger.pop_spending()
        if not (self.gated or counters.verdicts or counters.calls or counters.cached):
            return {}
        # Calls, cost and, where there are votes or scores, their spread.
        metrics = {"judge/gated": float(self.gated)} | call_metrics(counters)
        metrics |= {
            "judge/tokens_in": float(spent.usage.input),
            "judge/tokens_out": float(spent.usage.output),
            "judge/cost_usd": spent.usd,
            "judge/cost_usd_total": ledger.total.usd,
            "judge/tokens_total": float(ledger.total.usage.total),
        }
        if self.spreads:
            metrics["judge/vote_spread"] = float(np.mean(self.spreads))
        if self.verdicts:
            metrics["judge/votes"] = fmean(map(len, self.verdicts))
            metrics |= noise_metrics([verdicts[: self.votes] for verdicts in self.verdicts])
        if (correlation := correlate(self.lengths, self.values)) is not None:
            metrics["judge/length_correlation"] = correlation
        return metrics


def call_metrics(counters: Counters) -> dict[str, float]:
    """Return rates and latencies of the calls of a step."""
    # Shares refer to calls, to replies or to questions.
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
    # Latencies of calls that a score was read from.
    if counters.latencies:
        p50, p95 = np.percentile(counters.latencies, [50, 95])
        metrics |= {"judge/latency_p50_s": float(p50), "judge/latency_p95_s": float(p95)}
    return metrics


def noise_metrics(verdicts: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the spread of verdicts on the same response, in units of the score.

    It is the within-subject standard deviation: the root of the mean variance (divided by n - 1)
    of the verdicts on each response (Bland & Altman 1996, BMJ 312:1654). A response with fewer
    than two verdicts does not count.
    """
    variances = [variance(each) for each in verdicts if len(each) > 1]
    if not variances:
        return {}
    return {
        "judge/noise": math.sqrt(fmean(variances)),
        "judge/noise_responses": float(len(variances)),
    }


def place_metrics(verdicts: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    """Return how well the scores of pieces repeat: several verdicts on each response.

    The noise is the standard deviation of the scores of one piece. What repeats is the share of the
    variance between the pieces of a response that is not noise, as an intraclass correlation.
    """
    tables = [np.array(each) for each in verdicts if len({len(p) for p in each}) == 1]
    tables = [table for table in tables if len(table) > 1 and table.shape[1] > 1]
    if not tables:
        return {}
    noise = float(np.concatenate([table.var(0, ddof=1) for table in tables]).mean())
    spread = float(np.mean([table.var(1, ddof=1).mean() for table in tables]))
    return {
        "judge/place_noise": math.sqrt(noise),
        "judge/place_repeats": max(0.0, 1 - noise / spread) if spread else 0.0,
        "judge/place_pieces": float(sum(table.shape[1] for table in tables)),
    }


class NoiseCheck:
    """Asks again about a few responses of one step, to measure how much verdicts differ by chance.

    Each verdict is written to a file of the run folder at once, so that a resumed run asks for
    none of them again. Scores are those of the first verdicts and do not change.
    """

    def __init__(self, responses: int) -> None:
        self._responses = responses
        self._file: Path | None = None
        self._step: int | None = None  # the step whose responses are asked about
        self._due = self._listening = False
        self._first: dict[str, tuple[PlacedVerdict, AskAgain]] = {}
        self._repeated: dict[str, list[PlacedVerdict]] = defaultdict(list)
        self._metrics: dict[str, float] = {}

    def attach(self, file: Path) -> None:
        """Keep verdicts in this file; those of earlier starts of the run are in it already."""
        self._file = file
        for line in read_lines(file):
            self._step = int(line["step"])
            verdict = float(line["verdict"]), line.get("pieces", [])
            self._repeated[line["response"]].append(verdict)

    def begin_step(self, step: int) -> None:
        """Mark the check as due in the run's first step."""
        if self._step is None and self._responses:
            self._step = step
        self._due = self._listening = step == self._step
        self._first = {}

    def pop_due(self) -> bool:
        """Return whether the check is due, and mark it as begun."""
        due, self._due = self._due, False
        return due

    def offer(self, question: Question, verdict: PlacedVerdict, ask_again: AskAgain) -> None:
        """Take note of a first verdict, and of how to ask for another one."""
        if self._listening:
            self._first[digest_text(question.identity, 16)] = verdict, ask_again

    async def measure(self) -> None:
        """Ask again about the responses with the lowest digests, which are the same in every run.

        Failures leave a response with fewer verdicts.
        """
        chosen = {name: self._first[name] for name in sorted(self._first)[: self._responses]}

        async def repeat(name: str) -> None:
            verdict = await chosen[name][1]()
            self._repeated[name].append(verdict)
            if self._file is not None:
                line: dict[str, Any] = {"step": self._step, "response": name, "verdict": verdict[0]}
                line |= {"pieces": list(verdict[1])} if verdict[1] else {}
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(f"{json.dumps(line)}\n")

        missing = [n for n in chosen for _ in range(NOISE_REPEATS - len(self._repeated[n]))]
        answers = await asyncio.gather(*map(repeat, missing), return_exceptions=True)
        failed = sum(isinstance(answer, BaseException) for answer in answers)
        verdicts = [[first, *self._repeated[name]] for name, (first, _) in chosen.items()]
        self._metrics = noise_metrics([[value for value, _ in each] for each in verdicts])
        self._metrics |= place_metrics([[pieces for _, pieces in each] for each in verdicts])
        self._metrics |= {"judge/noise_failed": float(failed)} if failed else {}

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of a check that ended since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics


class Canaries:
    """Replies without content, sent past gate and cache: a good judge gives them no credit."""

    def __init__(self, every: int) -> None:
        self.due = False
        self._every = every
        self._asked_at = -1
        self._values: list[float] = []
        self._failed = 0

    def begin_step(self, step: int) -> None:
        """Mark the canaries due every `every` steps; a repeated step does not ask again."""
        self.due = self._every > 0 and step % self._every == 0 and step > self._asked_at
        if self.due:
            self._asked_at = step

    def pop_due(self) -> bool:
        """Return whether canaries are due, and mark them as sent."""
        due, self.due = self.due, False
        return due

    async def ask(self, question: Question, client: JudgeClient) -> None:
        """Have one empty reply judged."""
        try:
            verdict = await client.ask(question, fresh=True)
        except (JudgeError, PpoError):
            self._failed += 1
        else:
            self._values.append(question.scale.scaled(verdict.value))

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the canaries that were judged since the last call."""
        values, failed = self._values, self._failed
        self._values, self._failed = [], 0
        metrics = {"judge/canary_failed": float(failed)} if failed else {}
        return metrics | ({"judge/canary_max": max(values)} if values else {})


class LabelledCheck:
    """Responses with human labels that the judge scores again every so many steps.

    The responses stay the same, so changed scores mean that the model behind the judge's name has
    changed. `first` maps the digest of a response to its first score.
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
        """Return whether they are read in this step: in the first one, then every `every` steps.

        A repeated step does not read them again.
        """
        # `first` is restored with a checkpoint: a resumed run does not start over.
        begun = bool(self.first or self._asked_at)
        due = step > self._asked_at and (not begun or step % self._every == 0)
        if due:
            self._asked_at = step
        return due and not self._reading

    async def read(self) -> None:
        """Have all responses judged; failures are counted."""
        # A slow reading may overlap the next due step, which then skips it.
        self._reading = True
        answers = await asyncio.gather(
            *(self._judge(row) for row, _ in self._rows), return_exceptions=True
        )
        self._reading = False
        # Only responses that got a score are compared.
        judged = [
            (digest_text(f"{row.prompt.text}\0{row.text}", 16), score, label)
            for (row, label), score in zip(self._rows, answers, strict=True)
            if isinstance(score, float)
        ]
        self._metrics = {"judge/label_failed": float(len(answers) - len(judged))}
        if not judged:
            return
        for name, score, _ in judged:
            self.first.setdefault(name, score)
        scores, labels = [score for _, score, _ in judged], [label for _, _, label in judged]
        # Drift: the change since the first reading; noise: its standard error.
        moved = [score - self.first[name] for name, score, _ in judged]
        self._metrics["judge/label_gap"] = float(np.mean(scores) - np.mean(labels))
        self._metrics["judge/label_drift"] = float(np.mean(moved))
        self._metrics["judge/label_noise"] = float(np.std(moved) / math.sqrt(len(moved)))
        if (agreement := correlate(labels, scores)) is not None:
            self._metrics["judge/label_correlation"] = agreement

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of a reading that ended since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics


# Entries of a rollout's info until the second judge has answered.
MONITOR_PENDING = {"monitor": None, "monitor_gap": None}


class Monitor:
    """A second judge that reads a share of the responses and changes no reward.

    A second judge that nobody asked for by name reads nothing when it cannot be used.
    """

    def __init__(
        self,
        api: ApiReward,
        *,
        environ: Mapping[str, str],
        ledger: Ledger,
        cache: VerdictCache | None,
    ) -> None:
        judge, limits = monitor_settings(api), Limits.of(api)
        self._shared_ledger = share_ledger(ledger, judge)
        self._required, self._share = api.monitor.required, api.monitor.share
        self._patience = 2 * limits.timeout
        self._watching: set[asyncio.Task[None]] = set()
        self._pairs: list[tuple[float, float]] = []
        self._failed = 0
        self._client: JudgeClient | None = None
        try:
            provider = build_provider(judge, environ=environ, flags="--rm_monitor_")
        except RewardError as error:
            if self._required:
                raise
            self._share, self._refused = 0.0, str(error)  # told at the start
            return
        # It never gives up for good; `_watch` limits how long its answers are waited for.
        limits = replace(limits, concurrency=min(8, limits.concurrency), outage_wait=math.inf)
        self._client = JudgeClient(provider, limits=limits, ledger=self._shared_ledger, cache=cache)

    def wants(self, rollout: Rollout) -> bool:
        """Return whether a response is in the share; chosen by a hash, so the same in every run."""
        # The first 32 bits of the digest are a uniform number.
        digest = digest_text(f"{rollout.prompt.uid}/{rollout.sample}/{rollout.text}", 8)
        return int(digest, 16) < self._share * 2**32

    async def try_out(self, question: Question, tell: Tell) -> None:
        """Make one call; RewardError when a required second judge cannot be used.

        A second judge that is not required reads nothing from then on.
        """
        if self._client is None:
            tell(f"There is no second judge: {self._refused}")
            return
        try:
            await self._client.probe(question)
        except UnlimitedCost as error:
            raise RewardError(str(error)) from error
        except JudgeError as error:
            # Other failures may be temporary: training starts anyway.
            if error.kind is Failure.FATAL:
                if self._required:
                    raise RewardError(f"The monitoring judge cannot be used: {error}") from error
                self._share = 0.0
                tell(f"The second judge cannot be used, and training goes on without: {error}")
                return
            tell(f"The monitoring judge gave no verdict yet ({error}); training goes on without.")

    def begin(self, question: Question, value: float, info: dict[str, Any]) -> None:
        """Start the second judge on a response that the first has scored; nobody waits for it.

        Its verdict goes into `info`, which has the keys of MONITOR_PENDING already: the rollout
        file may be written at any time.
        """
        assert self._client is not None, "without one no response is wanted"
        watching = self._watch(self._client, question, value, info)
        # The set keeps the task alive until it is done.
        task = asyncio.get_running_loop().create_task(watching)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(
        self, client: JudgeClient, question: Question, first: float, info: dict[str, Any]
    ) -> None:
        """Ask the second judge, and record its score and the gap to the first score in `info`.

        A failure or a time-out is counted.
        """
        try:
            async with asyncio.timeout(self._patience):
                verdict = await client.ask(question)
        except (JudgeError, PpoError, TimeoutError):
            self._failed += 1
        else:
            value = question.scale.scaled(verdict.value)
            self._pairs.append((first, value))
            info |= {"monitor": value, "monitor_gap": abs(first - value)}

    def pop_metrics(self) -> dict[str, float]:
        """Return the second judge's metrics since the last call, those without data left out.

        Failures and cost, and of the responses that both judges scored: its mean, the first judge's
        mean minus its mean, and the correlation.
        """
        pairs, failed = self._pairs, self._failed
        self._pairs, self._failed = [], 0
        metrics = {"judge/monitor_failed": float(failed)} if failed else {}
        spent = self._shared_ledger.pop_spending()
        # Cost, then the gap between both judges on the same responses.
        if spent.calls:
            metrics["judge/monitor_cost_usd"] = spent.usd
        if pairs:
            first, second = [p[0] for p in pairs], [p[1] for p in pairs]
            metrics["judge/monitor_mean"] = float(np.mean(second))
            metrics["judge/monitor_gap"] = float(np.mean(first) - np.mean(second))
            if (agreement := correlate(first, second)) is not None:
                metrics["judge/monitor_correlation"] = agreement
        return metrics

    async def close(self) -> None:
        """Cancel calls in flight, since no reward depends on them."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close(0.0)
