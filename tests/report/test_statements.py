"""Every finding is made of numbers: a reader checks its sentence against them and the metrics.

The rules below are what the words say (docs/metrics.md for the metrics), not how the checks decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ppo_cli.report.health import STUCK_STEPS, find_troubles
from ppo_cli.report.limits import Limits

N = r"(-?\d+(?:\.\d+)?(?:e[-+]\d+)?)"
Lines = Sequence[Mapping[str, Any]]
# Words of any sentence, and what their numbers must be to each other.
COMPARISONS: list[tuple[str, Callable[..., bool]]] = [
    (rf"{N}%? is above {N}", lambda a, b: a > b),
    (rf"{N} (?:stays|has stayed) below {N}", lambda a, b: a < b),
    (rf"{N} is outside {N}-{N}", lambda x, low, high: not low <= x <= high),
    (rf"fell from {N} to {N}", lambda a, b: a > b),
    (rf"grew from {N}% to {N}%", lambda a, b: a < b),
    (rf"jumped to {N} \(usually {N}\)", lambda a, b: a > b),
    (rf"risen by {N}", lambda a: a > 0),
    (rf"fell by {N}", lambda a: a >= 0),
    (rf"rose by only {N}", lambda a: a >= 0),
    (rf"\({N} failed in this step\)", lambda a: a > 0),
    (rf"{N}% of the (?:responses|episodes|turns|judge)", lambda a: a > 0),
    (rf"{N} responses have no score", lambda a: a > 0),
    (rf"not finite in {N} of", lambda a: a > 0),
    (rf"makes {N}% of the total's spread, its weight says {N}%", lambda a, b: a < b),
    (rf"was {N} at most in \d+ steps \(the median is {N}\)", lambda a, b: a >= b),
]


def column(steps: Lines, key: str, count: int) -> list[float]:
    return [line[key] for line in steps[-count:] if line.get(key) is not None]


def is_critic_right(steps: Lines, text: str) -> bool:
    """What it explains is compared with the mean; of equal rewards there is nothing to explain."""
    usual = median(column(steps, "explained_variance", STUCK_STEPS))
    word = "worse than the mean" in text
    return word == (usual < -0.05) and max(column(steps, "score/std", 3), default=1.0) > 0


def is_same_right(steps: Lines, text: str) -> bool:
    count = int(re.search(r"the last (\d+) steps", text)[1])  # type: ignore[index]
    value = float(re.search(rf"reward \({N}\)", text)[1])  # type: ignore[index]
    means, spreads = column(steps, "reward_mean", count), column(steps, "score/std", count)
    return max(spreads) < 1e-6 and all(abs(mean - value) < 1e-4 for mean in means)


def is_opposed_right(steps: Lines, text: str) -> bool:
    name = re.search(r"criterion '(\w+)'", text)[1]  # type: ignore[index]
    credits, rewards = (
        column(steps, key, STUCK_STEPS) for key in (f"rubric/{name}", "reward_mean")
    )
    falls, rises = (
        fmean(values[:5]) - fmean(values[-5:]) for values in (credits, [-r for r in rewards])
    )
    return falls > 0 and rises > 0


def is_stuck_right(steps: Lines, text: str) -> bool:
    rare = re.findall(rf"'(\w+)' hardly ever has credit \(mean {N}\)", text)
    usual = re.findall(rf"'(\w+)' had nearly full credit from the start \({N}\)", text)
    shown = [
        abs(fmean(column(steps, f"rubric/{name}", count)) - float(credit)) < 0.005
        and (float(credit) < 0.05 if count == 8 else float(credit) > 0.95)
        for criteria, count in ((rare, 8), (usual, len(steps)))
        for name, credit in criteria
    ]
    return bool(shown) and all(shown)


def is_lost_right(steps: Lines, text: str) -> bool:
    """Each criterion is named with its first and last credit, which fell."""
    texts = re.findall(rf"'(\w+)' \(credit {N} to {N}\)", text)
    return bool(texts) and all(
        abs(fmean(column(steps[:5], f"rubric/{name}", 5)) - float(before)) < 0.006
        and abs(fmean(column(steps, f"rubric/{name}", 5)) - float(now)) < 0.006
        and float(before) > float(now)
        for name, before, now in texts
    )


def is_monitor_right(steps: Lines, text: str) -> bool:
    return not column(steps, "judge/monitor_mean", 2)


def is_flat_right(steps: Lines, text: str) -> bool:
    """A reward that does not move ends within its own noise of where it began."""
    rewards = column(steps, "reward_mean", STUCK_STEPS)
    moved = abs(fmean(rewards[10:]) - fmean(rewards[:10]))
    return moved <= 0.5 * (max(rewards) - min(rewards))


def is_memory_right(steps: Lines, text: str) -> bool:
    """The limits are those of the last step, one sentence for each that was lowered."""
    limits = re.findall(rf"(\w+) micro-batches now hold {N} (rows|tokens)", text)
    last = {k: v for k, v in steps[-1].items() if "/micro_batch_" in k}
    return last == {f"{name}/micro_batch_{unit}": float(n) for name, n, unit in limits}


KINDS: dict[str, Callable[[Lines, str], bool]] = {
    "critic": is_critic_right,
    "reward_same": is_same_right,
    "criterion_against": is_opposed_right,
    "criterion_lost": is_lost_right,
    "criterion_stuck": is_stuck_right,
    "monitor_silent": is_monitor_right,
    "memory": is_memory_right,
    "kl_low": is_flat_right,
    "clip_low": is_flat_right,
}
# Values of a metric near its limits and far from them, and numbers that are equal when rounded.
RANGES: dict[str, list[float]] = {
    "reward_mean": [0.0, 0.3, 0.5, 0.9],
    "score/std": [0.0, 0.4],
    "score/min": [0.0],
    "score/max": [1.0],
    "score/failed": [0.0, 2.0],
    "score/failed_share": [0.0, 0.3],
    "kl_divergence": [1e-5, 0.0009999, 0.05, 0.1000004, 0.3, 2.0],
    "clip_fraction": [0.0, 0.0999, 0.2, 0.3001, 0.8],
    "ppo_ratio": [0.5, 0.7999, 1.0, 1.2001, 3.0],
    "rollout/logprob_diff": [1e-5, 0.001001, 0.5],
    "entropy": [0.01, 0.1, 2.0],
    "explained_variance": [-177.75, -0.2, 0.0, 0.04, 0.8],
    "grad_norm": [0.1, 1.0001, 90.0],
    "response_length/clip_ratio": [0.0, 0.5001, 1.0],
    "thought/unclosed_share": [0.0, 0.9],
    "actor/skipped_steps": [0.0, 3.0],
    "rubric/tone": [0.0, 0.2, 0.8, 1.0],
    "judge/monitor_failed": [0.0, 4.0],
    "judge/monitor_mean": [0.4],
    "judge/canary_max": [0.0, 0.301, 1.0],
    "judge/unread": [0.0, 0.1001, 0.6],
    "judge/unread/form": [0.05, 0.6],
    "judge/label_drift": [0.0, 0.4],
    "exploit/confirmed": [-0.1, 0.0, 0.3],
    "exploit/unconfirmed": [0.0, 0.5],
    "exploit/unconfirmed_error": [0.01],
    "exploit/fit": [0.0, 0.4],
    "exploit/by/length": [0.2],
    "exploit/explained": [0.0, 0.9],
    "exploit/spread": [0.3],
    "actor/micro_batch_rows": [1.0, 4.0],
    "annotate/micro_batch_tokens": [512.0],
}


# A rare draw.
OPPOSED = [{"step": i, "reward_mean": i / 24, "rubric/tone": 1 - i / 24} for i in range(1, 25)]


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, float]]:
    """A run in which each metric keeps a value, drifts, jumps at the end, or is absent."""
    count = draw(st.sampled_from([3, 12, 24]))
    lines: list[dict[str, float]] = [{"step": step} for step in range(1, count + 1)]
    for key, values in RANGES.items():
        form = draw(st.sampled_from(["keeps", "drifts", "drifts", "jumps", "absent"]))
        first, last = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        for i, line in enumerate(lines):
            if form == "drifts":
                line[key] = first + (last - first) * i / (count - 1)
            elif form != "absent":
                line[key] = last if form == "jumps" and i >= count - 3 else first
    return lines


@pytest.mark.slow
def test_a_finding_says_what_its_numbers_say() -> None:
    kinds_met: set[str] = set()
    patterns_met: set[str] = set()

    @settings(max_examples=400, deadline=None, derandomize=True, database=None)
    @given(runs(), st.sampled_from([None, 20]))
    @example(OPPOSED, None)
    def walk(steps: Lines, total: int | None) -> None:
        for kind, text in find_troubles(steps, Limits(total_steps=total)).items():
            kinds_met.add(kind)
            for pattern, holds in COMPARISONS:
                for match in re.finditer(pattern, text):
                    patterns_met.add(pattern)
                    assert holds(*map(float, match.groups())), (kind, text)
            assert kind not in KINDS or KINDS[kind](steps, text), (kind, text)

    walk()
    # Each rule meets a finding: one that none has would check nothing.
    assert set(KINDS) <= kinds_met
    assert len(patterns_met) >= len(COMPARISONS) - 4, {p for p, _ in COMPARISONS} - patterns_met
