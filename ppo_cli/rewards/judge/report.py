"""What a step's judging came to, as `judge/…` metrics."""

from __future__ import annotations

import numpy as np

from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.judge.counters import Counters
from ppo_cli.rewards.judge.ledger import Ledger


class StepReport:
    """Collects what the client cannot know: scores, lengths, votes, gated responses."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._values: list[float] = []
        self._spreads: list[float] = []
        self._gated = 0

    def note(self, rollout: Rollout, score: Score) -> None:
        """Take in one judged response."""
        self._lengths.append(len(rollout.text))
        self._values.append(float(score.value or 0.0))
        if "vote_spread" in score.info:
            self._spreads.append(float(score.info["vote_spread"]))

    def note_gated(self) -> None:
        """Take in one response that was not worth a call."""
        self._gated += 1

    def take(self, counters: Counters, ledger: Ledger) -> dict[str, float]:
        """Everything since the last call; nothing at all when nothing was judged."""
        spent = ledger.take()
        metrics = {"judge/gated": float(self._gated)} | call_metrics(counters)
        metrics |= {
            "judge/tokens_in": float(spent.usage.input),
            "judge/tokens_out": float(spent.usage.output),
            "judge/cost_usd": spent.usd,
            "judge/cost_usd_total": ledger.total.usd,
        }
        if self._spreads:
            metrics["judge/vote_spread"] = float(np.mean(self._spreads))
        correlation = correlate(self._lengths, self._values)
        if correlation is not None:
            metrics["judge/length_correlation"] = correlation
        idle = not self._gated and not counters.verdicts and not counters.calls
        self._lengths, self._values, self._spreads, self._gated = [], [], [], 0
        return {} if idle and not counters.cached else metrics


def call_metrics(counters: Counters) -> dict[str, float]:
    """Rates and latencies of the calls of a step."""
    errors = sum(counters.errors.values())
    unread = sum(counters.unread.values())
    replies = unread + len(counters.latencies)
    asked = counters.cached + counters.shared + counters.verdicts
    metrics = {
        "judge/calls": float(counters.calls),
        "judge/error_rate": errors / counters.calls if counters.calls else 0.0,
        "judge/unread": unread / replies if replies else 0.0,
        "judge/refusals": float(counters.refused),
        "judge/retries": float(counters.retried),
        "judge/cached": float(counters.cached + counters.shared),
        "judge/cache_hits": (counters.cached + counters.shared) / asked if asked else 0.0,
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
