"""One alarm when a policy seems to exploit its reward, with the evidence in one sentence.

The evidence is a second opinion that does not rise with the reward (a second judge, a rule,
labels), surface features of the texts that a second judge does not pay for or that explain the
rise, or failures that become more frequent.
`ppo_cli.report.health` calls `find_hacking`; benchmarks/hacking.py measures how early it warns,
and how often falsely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ppo_cli.errors import ppo
from ppo_cli.report.drift import History, measure_held_out, measure_judge_drift, pair_scores
from ppo_cli.report.exploits import measure_feature
from ppo_cli.report.features import FEATURES
from ppo_cli.report.limits import Limits

EXPLAINED = 0.5  # share of the reward's rise from which surface features explain it
FIT = 0.15  # share of the scores' variance within a step that they explain at least
SETTLED = 0.6  # share of their worth that the low scores lack at most: above, content decides
RISEN = 0.5  # rise of the reward, in spreads of the first step's scores
UNCONFIRMED = 0.02  # rise of the reward by surface features that a second judge does not confirm
UNCONFIRMED_ERRORS = 3.5  # the same in standard errors, as each step is another chance to err
MORE_FAILURES = 0.1  # rise of the share of responses without a score
MIN_STEPS = 5  # before an alarm
BENT_STEPS = 3  # after a bend at least: a third of level series would bend later, by noise


def find_hacking(steps: History, limits: Limits) -> str:
    """Return the alarm after the last of `steps`, or "" if nothing suggests an exploit.

    Texts alone do not raise it if a second opinion has risen with the reward.
    """
    if not limits.can_be_gamed:
        return ""
    drift = measure_judge_drift(steps, limits.watched, limits.people)
    held_out = measure_held_out(limits.folder, steps[-1]["step"]) if limits.holds_out else None
    # Held-out criteria that do not rise are a finding; an exploit makes them worse.
    if drift is None and held_out is not None and (held_out.confirming or held_out.falling):
        drift = held_out
    watched = f"while {drift.movement}" if drift is not None and drift.alarming else ""
    if not watched and len(steps) < MIN_STEPS:
        return ""
    confirmed = _is_confirmed(steps[-1]) or (drift is not None and drift.confirming)
    texts = "" if confirmed else _describe_texts(steps)
    early = "" if watched else _describe_unconfirmed(steps[-1])
    evidence = [part for part in (watched, early, _describe_failures(steps), texts) if part]
    if not evidence:
        return ""
    since, rise = find_onset(steps, limits), find_rise(steps)[1]
    what = "the reward has"
    if watched and drift is not None and limits.has_judge:
        what, rise = "the judge's scores have", drift.amount + drift.rise
    # Labels may fall under equal scores, and features may earn what the mean does not show yet.
    moved = f"risen by {rise:.2f}" if rise >= 0.005 else f"moved by {rise:+.2f}"
    look = ppo(f"show {limits.run_dir} --step {steps[-1]['step']} --best 5")
    return (
        f"The model {'exploits' if watched else 'may exploit'} its reward, it seems since step "
        f"{since}: {what} {moved}, {', and '.join(evidence)}. Look at these responses: "
        f"`{look}`. `{ppo(f'reward audit --config {limits.run_dir}/config.yaml')}` tests the "
        f"reward; {name_checkpoint_before(since, limits)}."
    )


def name_checkpoint_before(since: int, limits: Limits) -> str:
    """Return in words which checkpoint is from before the exploit, whose onset is `since`."""
    saved = max((step for step in limits.saved if step <= since), default=None)
    if saved is None:
        return f"no checkpoint is from step {since} or before"
    return f"the last checkpoint before is {limits.run_dir}/checkpoints/step_{saved:06d}"


def find_onset(steps: History, limits: Limits) -> int:
    """Return the last step before the exploit that the alarm after the last of `steps` is about.

    It is the bend in the gap between the reward and a second opinion; without one, in how frequent
    the first feature of the alarm is, else in the share of failures or in the reward itself.
    """
    series = [(step, pair[0] - pair[1]) for step, pair in pair_scores(steps, limits.watched)]
    features = _list_features(steps[-1], wished=False) if _describe_texts(steps) else []
    if len(series) < MIN_STEPS and features and limits.folder:
        numbers = [int(line["step"]) for line in steps]
        series = measure_feature(limits.folder, numbers, features[0])
    if len(series) < MIN_STEPS:
        failing = _describe_failures(steps)
        key = "score/failed_share" if failing else "reward_mean"
        series = [(int(x["step"]), float(x[key])) for x in steps if x.get(key) is not None]
    return find_bend(series) if len(series) >= MIN_STEPS else find_rise(steps)[0]


def find_bend(series: Sequence[tuple[int, float]]) -> int:
    """Return the step after which values that were level before begin to rise, or to fall.

    Least squares over the steps c of value = a + b max(0, step - c); the last steps are no c, as
    noise in the newest value looks like a bend before it.
    """
    mean = fmean(value for _, value in series)
    explained: dict[int, float] = {}
    for bend, _ in series[:-BENT_STEPS]:
        xs = [max(0, step - bend) for step, _ in series]
        middle = fmean(xs)
        covariance = sum((x - middle) * (v - mean) for x, (_, v) in zip(xs, series, strict=True))
        explained[bend] = covariance**2 / sum((x - middle) ** 2 for x in xs)
    return max(explained, key=lambda bend: explained[bend])


def find_rise(steps: History) -> tuple[int, float]:
    """Return the last step before the reward rose, and by how much it has risen since.

    That step is the last one with less than a quarter of the rise since the start.
    """
    measured = [line for line in steps if line.get("reward_mean") is not None]
    rewards = [(int(line["step"]), float(line["reward_mean"])) for line in measured]
    if not rewards:
        return int(steps[-1]["step"]), 0.0
    few = min(max(1, len(rewards) // 4), 3)
    first, last = (fmean(value for _, value in part) for part in (rewards[:few], rewards[-few:]))
    low = [step for step, value in rewards if value <= first + (last - first) / 4]
    return (low[-1] if low else rewards[0][0]), last - first


def reward_rises(steps: History) -> bool:
    """Whether the mean reward has risen by half of the spread of the first step's scores."""
    spread = next((line["score/std"] for line in steps if line.get("score/std")), 0.0)
    return find_rise(steps)[1] > max(RISEN * spread, 1e-9)


def _is_confirmed(now: Mapping[str, Any]) -> bool:
    """Whether a second judge pays for at least half of what the features earn."""
    confirmed, unconfirmed = (now.get(f"exploit/{n}") for n in ("confirmed", "unconfirmed"))
    return confirmed is not None and unconfirmed is not None and confirmed >= max(unconfirmed, 0)


def _describe_unconfirmed(now: Mapping[str, Any]) -> str:
    """Return what features of the texts earn without the second judge's consent; "" if little."""
    names = ("confirmed", "unconfirmed", "unconfirmed_error")
    values = [float(now[key]) for name in names if now.get(key := f"exploit/{name}") is not None]
    if len(values) < len(names):
        return ""
    confirmed, unconfirmed, error = values
    chance = UNCONFIRMED_ERRORS * error
    # Features that cost reward are not exploited.
    if confirmed + unconfirmed <= 0 or unconfirmed <= max(UNCONFIRMED, chance, confirmed):
        return ""
    features = _name_features(now, wished=True)
    return (
        f"while responses earn {confirmed + unconfirmed:.2f} more by {features}, of "
        f"which its second judge confirms {max(confirmed, 0):.2f}"
    )


def _describe_texts(steps: History) -> str:
    """Return which features of the texts explain the rise; "" unless they explain most of it."""
    now = steps[-1]
    share, fit, spread = (now.get(f"exploit/{name}") for name in ("explained", "fit", "spread"))
    if share is None or fit is None or spread is None:
        return ""
    if share < EXPLAINED or fit < FIT or spread > SETTLED or not reward_rises(steps):
        return ""
    return (
        f"{min(share, 1):.0%} of the rise follows from {_name_features(now)}, whatever the prompt"
    )


def _name_features(now: Mapping[str, Any], *, wished: bool = False) -> str:
    """Return the features that add the most to the reward, also `wished` ones."""
    names = _list_features(now, wished=wished)
    return " and ".join(name if name in FEATURES else f"the word '{name}'" for name in names)


def _list_features(now: Mapping[str, Any], *, wished: bool) -> list[str]:
    """Return the features that add the most to the reward, also `wished` ones, the first first."""
    gains = {
        key.split("/", 2)[2]: value or 0
        for key, value in now.items()
        if key.startswith(("exploit/by/", "exploit/asked/")[: 1 + wished])
    }
    ordered = sorted(gains.items(), key=lambda item: -item[1])
    return [name for name, gain in ordered if gain > max(gains.values()) / 2]


def _describe_failures(steps: History) -> str:
    """Return how the share of responses without a score has grown; "" unless it clearly has."""
    shares = [float(line.get("score/failed_share") or 0.0) for line in steps]
    few = min(len(shares) // 2, 5)
    if few < 3:
        return ""
    before, now = fmean(shares[:few]), fmean(shares[-few:])
    # Noise of a step, from the differences of neighbours, which a trend hardly changes.
    noise = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(shares)) / 2)
    chance = 4 * noise * math.sqrt(2 / few)
    if now - before <= max(MORE_FAILURES, chance) or not reward_rises(steps):
        return ""
    return f"while the share of responses without a score grew from {before:.0%} to {now:.0%}"
