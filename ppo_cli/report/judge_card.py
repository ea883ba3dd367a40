"""The card of a run's judges: noise, biases, agreement, cost and latency, as rows of text.

Summary, `ppo show` and page all print what `describe_judges` returns.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ppo_cli.config.mixture import Judge, find_watched, judges_of, mixture_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import plural
from ppo_cli.estimates import correlate
from ppo_cli.report.drift import measure_judge_drift, read_opinions
from ppo_cli.report.health import UNREAD_ADVICE
from ppo_cli.run_folder.folder import paid_calls
from ppo_cli.run_folder.lines import PRETRAINING_FILE, read_lines
from ppo_cli.spending import IN_FLIGHT

Lines = Sequence[Mapping[str, Any]]
Row = tuple[str, str]
_JUDGE_COUNTER = re.compile(r"(?:val/)?judge(?:_[^/]+)?/(retries|cached)")


@dataclass(frozen=True)
class Spent:
    """What a judge has cost in a run, and its budgets; `name` is the prefix of its metrics."""

    name: str
    usd: float
    tokens: int
    max_usd: float | None
    max_tokens: int | None


def list_spent(reward: Reward, lines: Lines) -> list[Spent]:
    """Return what each judge of a run has cost, by the totals in its metrics."""

    def last_total(key: str) -> float:
        totals = (line.get(f"{split}{key}", 0.0) for line in lines for split in ("", "val/"))
        return max(totals, default=0.0)

    return [
        Spent(
            name, last_total(f"{name}/cost_usd_total"), int(last_total(f"{name}/tokens_total")),
            judge.settings.budget_usd, judge.settings.budget_tokens,
        )
        for name, judge in _name_judges(reward).items()
    ]  # fmt: skip


def _name_judges(reward: Reward) -> dict[str, Judge]:
    """Return a run's judges by the prefix of their metrics.

    As the metrics of a mixture: the judge named `judge`, else the first, has no suffix.
    """
    judges = judges_of(reward)
    names = [judge.part for judge in judges]
    first = "judge" if "judge" in names else next(iter(names), None)
    return {"judge" if j.part == first else f"judge_{j.part}": j for j in judges}


def describe_judges(run_dir: Path, reward: Reward, history: Lines) -> list[Row]:
    """Return (measure, value) rows about a run's judges; what was not measured has no row."""
    calls = paid_calls(run_dir)
    totals = describe_judge_totals(run_dir, history)
    rows = [("calls", totals)] if totals else []
    judges = _name_judges(reward)
    for stage, judge in judges.items():
        of_judge = f" ({judge.part})" if len(judges) > 1 else ""
        rows += [
            (name + of_judge, text) for name, text in _describe_judge(judge, reward, stage, history)
        ]
    people = read_opinions(run_dir, reward)
    if judges and (drift := measure_judge_drift(history, find_watched(reward), people)):
        rows.append((
            "drift",
            f"its scores have risen by {drift.amount:+.2f} beyond {drift.watcher}, which moved by "
            f"{drift.rise:+.2f} (standard error {drift.noise:.2f})",
        ))  # fmt: skip
    pairs = [opinion.judge for opinion in people], [opinion.label for opinion in people]
    if (agreement := correlate(*pairs)) is not None:
        rows.append(("people", f"correlation {agreement:.2f} with {len(people)} labels"))
    return [*rows, *_describe_models(calls)]


def _describe_judge(judge: Judge, reward: Reward, stage: str, history: Lines) -> Iterator[Row]:
    """Yield what the metrics of one judge say; `stage` is their prefix."""

    def values(key: str) -> list[float]:
        return [float(line[key]) for line in history if line.get(key) is not None]

    if noise := values(f"{stage}/noise"):
        spread, responses = _root_mean_square(noise), sum(values(f"{stage}/noise_responses"))
        text = f"standard deviation {spread:.2g} of repeated verdicts ({responses:,.0f} responses)"
        # The part of the scores' variance that another verdict would not repeat.
        key = "score/std" if judge.part is None else f"reward/{judge.part}/std"
        if (deviation := _root_mean_square(values(key))) > 0:
            share = spread**2 / judge.settings.votes / deviation**2
            text += f", {min(1.0, share):.0%} of the variance of the scores"
        yield "noise", text
    if place_noise := values(f"{stage}/place_noise"):
        spread, pieces = _root_mean_square(place_noise), sum(values(f"{stage}/place_pieces"))
        text = f"standard deviation {spread:.2g} of repeated scores of a piece ({pieces:,.0f})"
        if repeats := values(f"{stage}/place_repeats"):
            text += f"; {fmean(repeats):.0%} of what differs within a response repeats"
        yield "places", text
    if (votes := values(f"{stage}/votes")) and judge.settings.asks_on:
        yield "votes", f"{fmean(votes):.2g} a response"
    if escalated := values(f"{stage}/escalated"):
        models = {"cheap": judge.settings.cascade.model, "strong": judge.settings.model}
        shares = []
        for who, model in models.items():
            calls, usd = (sum(values(f"{stage}/{who}_{what}")) for what in ("calls", "cost_usd"))
            shares.append(f"{model} {plural(round(calls), 'call')}, {format_dollars(usd)}")
        yield "cascade", f"{fmean(escalated):.0%} went on to the judge ({'; '.join(shares)})"
    if spreads := values(f"{stage}/panel_spread"):
        start = "reward/panel/" if judge.part is None else f"reward/{judge.part}.panel/"
        names = ["judge", *judge.settings.panel.judges]
        means = [f"{n} {fmean(measured):.2f}" for n in names if (measured := values(start + n))]
        yield "panel", f"judges differ by {fmean(spreads):.2g} (means {', '.join(means)})"
    if lengths := values(f"{stage}/length_correlation"):
        yield "length", f"correlation {fmean(lengths):.2f} with the score"
    if places := values(f"{stage}/place_followed"):
        yield "position", f"decides {fmean(places):.0%} of the comparisons"
    # Correlations with whatever else has scored the same responses.
    rules = [part.name for part in mixture_of(reward) if part.kind == "rule"]
    others = {f"{stage}/monitor_correlation": "the second judge"}
    for rule in rules:
        pair = {f"reward/correlation/{a}/{b}" for a, b in ((judge.part, rule), (rule, judge.part))}
        others |= dict.fromkeys(pair, f"the rule {rule}")
    agreements = [
        (fmean(measured), who) for key, who in others.items() if (measured := values(key))
    ]
    if labelled := values(f"{stage}/label_correlation"):
        agreements.append((labelled[-1], "the labelled responses"))
    if agreements:
        texts = [f"{agreement:.2f} with {who}" for agreement, who in agreements]
        yield "agreement", f"correlation {', '.join(texts)}"


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(fmean(value**2 for value in values)) if values else 0.0


def _describe_models(calls: Lines) -> Iterator[Row]:
    """Yield cost, tokens and latency of a verdict for each model that was asked."""
    import numpy as np

    by_model: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for call in calls:
        by_model[str(call.get("model", "unnamed"))].append(call)
    for model, paid in by_model.items():
        answered = [call for call in paid if call.get("outcome") == "ok"]
        if not answered:
            continue
        # Failed calls cost too, so they count for the verdicts that came.
        usd = math.fsum(float(call["usd"]) for call in paid) / len(answered)
        tokens = sum(int(call.get(n) or 0) for call in paid for n in ("input", "output"))
        p50, p95 = np.percentile([float(call.get("latency_s") or 0) for call in answered], [50, 95])
        yield (
            model,
            f"{format_dollars(usd)} and {tokens / len(answered):,.0f} tokens a verdict, "
            f"{p50:.2g} s (95 %: {p95:.2g} s)",
        )


def describe_judge_totals(run_dir: Path, history: Lines) -> str:
    """Return a sentence on the calls and cost of a run's judges; empty without calls.

    Calls and cost come from the record of paid calls, which includes interrupted steps.
    """
    calls = paid_calls(run_dir)
    # Calls in flight when the run stopped are charged at their worst case.
    causes = Counter(str(call["outcome"]) for call in calls if call.get("outcome") != "ok")
    in_flight = causes.pop(IN_FLIGHT, 0)
    sums: Counter[str] = Counter()
    lines = [*read_lines(run_dir / PRETRAINING_FILE), *history]
    for line in lines:
        for key, value in line.items():
            if (match := _JUDGE_COUNTER.fullmatch(key)) and value is not None:
                sums[match[1]] += value
    if not calls and not sums["cached"]:
        return ""
    # Clauses with a count of 0 are left out.
    clauses = [plural(len(calls), "call")]
    if in_flight:
        clauses.append(f"{in_flight:,} in flight (at their worst case)")
    # As in judge/error_rate and judge/unread, a reply that cannot be read is not a failed call.
    unread = Counter({name: n for name, n in causes.items() if name in UNREAD_ADVICE})
    for what, counts in (("failed", causes - unread), ("not read", unread)):
        if counts:
            each = ", ".join(f"{name} {n:,}" for name, n in counts.most_common())
            clauses.append(f"{counts.total():,} {what} ({each})")
    if causes:
        clauses.append(plural(sums["retries"], "retry", "retries"))
    if sums["cached"]:
        clauses.append(f"{plural(sums['cached'], 'verdict')} reused")
    unscored = sum(
        line.get(f"{split}score/failed") or 0.0 for line in lines for split in ("", "val/")
    )
    if unscored:
        clauses.append(f"{plural(unscored, 'response')} without a score")
    return ", ".join([*clauses, format_dollars(sum(float(call["usd"]) for call in calls))])


def format_dollars(amount: float) -> str:
    """Return dollars with at least two significant digits: `$12.50`, `$0.0021`."""
    if amount >= 0.0995:
        return f"${amount:,.2f}"
    return f"${amount:.2g}" if amount >= 1e-4 or not amount else f"${amount:.1e}"
