"""Drift of a judge: how much more its scores have risen than those of people or another scorer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from ppo_cli.config.mixture import Watched, judges_of
from ppo_cli.config.schema.reward import Reward, parse_scale_bounds
from ppo_cli.errors import DataError
from ppo_cli.planning.findings.rewards import scale_labels
from ppo_cli.records import HELD_OUT, TRAINED
from ppo_cli.report.labels import read_labels_with_scores
from ppo_cli.report.validation import MIN_PROMPTS, read_prompt_scores
from ppo_cli.run_folder.lines import rollout_steps

History = Sequence[Mapping[str, Any]]
# Scores of the judge and of its watcher (people, a second judge or a rule), for the same response
# or step.
Pair = tuple[float, float]

DRIFT_STEPS = 10  # at most, at each end of a run, between which a judge's drift is measured
MIN_DRIFT_STEPS = 4  # the same at least
DRIFTED = 0.1  # gap from which an exploited judge is recognised (arXiv 2606.04923)


class Opinion(NamedTuple):
    """Scores of the judge and a person for the same response of a step, on [0, 1]."""

    step: int
    judge: float
    label: float


class Drift(NamedTuple):
    """How much more a judge's scores have risen than its watcher's.

    `amount` is that difference, `rise` the watcher's own change, `noise` the standard error of
    `amount`, and `watcher` a description for messages.
    """

    amount: float
    rise: float
    noise: float
    watcher: str

    @property
    def movement(self) -> str:
        """What the watcher did meanwhile, in words."""
        moved = f"fell by {-self.rise:.2f}" if self.rise < 0 else f"rose by only {self.rise:.2f}"
        return f"{self.watcher} {moved}"

    @property
    def alarming(self) -> bool:
        """Whether the drift is large, beyond chance, and more than half of the judge's gain."""
        return self.amount > max(DRIFTED, 3 * self.noise) and self.rise < self.amount

    @property
    def falling(self) -> bool:
        """Whether the watcher has fallen beyond chance."""
        return self.rise < -max(DRIFTED, 2 * self.noise)

    @property
    def confirming(self) -> bool:
        """Whether the watcher has risen too, beyond chance, and by more than the drift."""
        return self.rise > max(DRIFTED, 2 * self.noise, self.amount)


def measure_judge_drift(
    history: History, watched: Watched | None = None, people: Sequence[Opinion] = ()
) -> Drift | None:
    """Return the judge's drift up to the last step; None if too little was scored twice.

    People's labels are used if there are ten in each half of the labelled steps. Else the first
    ten steps are compared with the last ten that a second judge has scored, or a rule of the same
    mixture.
    """
    steps = [line for line in history if line["step"] > 0]
    # Labels of the future do not count, so that old steps can be checked again.
    labelled = [opinion for opinion in people if steps and opinion.step <= steps[-1]["step"]]
    if labelled:
        numbers = [opinion.step for opinion in labelled]
        middle = (min(numbers) + max(numbers)) / 2
        early = [(opinion.judge, opinion.label) for opinion in labelled if opinion.step <= middle]
        late = [(opinion.judge, opinion.label) for opinion in labelled if opinion.step > middle]
        if min(len(early), len(late)) >= DRIFT_STEPS:
            return _measure_drift(early, late, "the labels that people gave")
    # Without enough labels: a second judge or a rule.
    pairs = [pair for _, pair in pair_scores(steps, watched)]
    few = min(len(pairs) // 2, DRIFT_STEPS)
    if few < MIN_DRIFT_STEPS:
        return None
    noise = math.sqrt(fmean((b[0] - b[1] - a[0] + a[1]) ** 2 for a, b in pairwise(pairs)) / few)
    second = any(key.endswith("/monitor_gap") for line in steps for key in line)
    watcher = f"the rule '{watched.rule}'" if watched and not second else "its second judge"
    return _measure_drift(pairs[:few], pairs[-few:], watcher)._replace(noise=noise)


def measure_held_out(folder: Path | None, last: int) -> Drift | None:
    """Return the drift from a judge's held-out criteria, from the first validation to the last one.

    A criterion that was met by nearly all from the start cannot rise: the gain of those that are
    trained on counts at most as far as the held-out ones could have risen. The noise is the
    standard error over the prompts. None without two validations on the disk.
    """
    steps = [step for step in rollout_steps(folder, "val") if step <= last] if folder else []
    if folder is None or len(steps) < 2:
        return None
    ends = (steps[0], steps[-1])
    trained, trained_last = (read_prompt_scores(folder, step, TRAINED) for step in ends)
    held_out, held_out_last = (read_prompt_scores(folder, step, HELD_OUT) for step in ends)
    uids = held_out.keys() & held_out_last.keys()
    if len(uids) < MIN_PROMPTS:
        return None
    gains = [trained_last[uid] - trained[uid] for uid in uids]
    rises = [held_out_last[uid] - held_out[uid] for uid in uids]
    rise, room = fmean(rises), 1 - fmean(held_out[uid] for uid in uids)
    gaps = [gain - other for gain, other in zip(gains, rises, strict=True)]
    noise = math.sqrt(pvariance(gaps) / len(gaps))
    return Drift(min(fmean(gains), room) - rise, rise, noise, "its held-out criteria")


def read_opinions(run_dir: Path, reward: Reward) -> tuple[Opinion, ...]:
    """Return people's labels from the page, with the judge's scores of the same responses.

    Empty without a judge, if its scores only order the responses to one prompt, or if labels are
    on a scale that is not in the settings.
    """
    judges = judges_of(reward)
    if not judges or judges[0].settings.within_group:
        return ()
    api, part, opinions = judges[0].settings, judges[0].part, list[Opinion]()
    try:
        lines = read_labels_with_scores(run_dir)
    except DataError:  # people may edit the file, which must not end a run
        return ()
    for line in lines:
        # In a mixture the judge's part counts, not the total.
        if part is not None:
            parts = line.get("parts")
            part_score = parts.get(part) if isinstance(parts, dict) else None
            line["score"] = part_score.get("raw") if isinstance(part_score, dict) else None
        step, score, label = (
            _finite_or_none(line.get(name)) for name in ("step", "score", "label")
        )
        if step and score is not None and label is not None:
            opinions.append(Opinion(int(step), score, label))
    labels = [opinion.label for opinion in opinions]
    own_prompt = api.prompt_file is not None or api.scoring_prompt is not None
    if api.scale is None and own_prompt and any(not 0 <= label <= 1 for label in labels):
        return ()  # labels are on the scale in that prompt's text, which is unknown here
    labels = scale_labels(labels, *parse_scale_bounds(api.scale or "1-10"))
    return tuple(
        opinion._replace(label=label) for opinion, label in zip(opinions, labels, strict=True)
    )


def _finite_or_none(value: Any) -> float | None:
    """Return a value as a finite float; None for anything else, as people may edit the file."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of many digits
        return None
    return number if math.isfinite(number) else None


def pair_scores(steps: History, watched: Watched | None) -> list[tuple[int, Pair]]:
    """Return the mean scores of the judge and of a second judge or a rule by step, where both are.

    A reward model or a function has a scale of its own: it counts in units of the rule, by the
    spreads of the first step in which both have one.
    """
    scale = 1.0
    if watched and not watched.is_judge:
        spreads = [[line.get(f"reward/{n}/std") for n in watched[:2]] for line in steps]
        scale = next((rule / part for part, rule in spreads if part and rule), 1.0)
    pairs = [(int(line["step"]), _pair_step(line, watched, scale)) for line in steps]
    return [(step, pair) for step, pair in pairs if pair]


def _pair_step(line: Mapping[str, Any], watched: Watched | None, scale: float) -> Pair | None:
    """Return both mean scores of a step; None without."""
    stage = next((k[:-12] for k in line if k.endswith("/monitor_gap")), None)
    if stage is not None:
        # `monitor_gap` is the judge's mean minus the monitor's.
        gap, second = line[f"{stage}/monitor_gap"], line.get(f"{stage}/monitor_mean")
        return None if gap is None or second is None else (second + gap, second)
    if watched is None:
        return None
    judge, rule = (line.get(f"reward/{name}") for name in watched[:2])
    return None if judge is None or rule is None else (scale * judge, rule)


def _measure_drift(first: Sequence[Pair], last: Sequence[Pair], watcher: str) -> Drift:
    """Return the change of the gap between judge and watcher from `first` to `last`."""
    before, now = ([judge - other for judge, other in part] for part in (first, last))
    rise = fmean(other for _, other in last) - fmean(other for _, other in first)
    noise = math.sqrt(pvariance(before) / len(before) + pvariance(now) / len(now))
    return Drift(fmean(now) - fmean(before), rise, noise, watcher)
