"""Compares the validations of a run: the best step, and whether the change is more than chance.

The verdict of the summary and the first lines of the page follow from these comparisons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from ppo_cli.config.schema.run import Data, Rollout
from ppo_cli.estimates import LEVEL, Estimate, estimate_best, estimate_mean
from ppo_cli.planning.batches import val_rows
from ppo_cli.run_folder.lines import file_state, read_lines, rollout_file

Line = Mapping[str, Any]  # of metrics.jsonl
ROUNDING = 1e-6  # means of equal scores, and of z-scores, differ by up to this
MIN_PROMPTS = 6  # five prompts change in the same direction by chance in 1 of 16 cases


@dataclass(frozen=True)
class Comparison:
    """The change of the mean score between two validations, and what its interval is from."""

    change: Estimate
    basis: str

    @property
    def sign(self) -> int:
        """1 or -1 if the interval is on one side of 0; else 0: the change may be chance."""
        low, high = self.change.low, self.change.high
        if low is None or high is None:
            return 0
        return int(low > ROUNDING) - int(high < -ROUNDING)


def list_validations(history: Sequence[Line]) -> list[Line]:
    """Return the lines with a validation, oldest first; with an accuracy only if all have one."""
    lines = [line for line in history if line.get("val/reward_mean") is not None]
    # Any score may happen to be 0 or 1 in all responses of one validation.
    if all(line.get("val/accuracy") is not None for line in lines):
        return lines
    return [{key: line[key] for key in line if key != "val/accuracy"} for line in lines]


def find_best(validations: Sequence[Line]) -> Line:
    """Return the first line with the highest mean score, which the run marks as its best."""
    return max(validations, key=lambda line: float(line["val/reward_mean"]))


def estimate_score(run_dir: Path, line: Line) -> Estimate:
    """Return the mean score of a validation with its interval over the prompts.

    Without the responses on the disk there is no interval.
    """
    scores = list(read_prompt_scores(run_dir, int(line["step"])).values())
    value = float(line["val/reward_mean"])
    if not scores:
        return Estimate(value)
    interval = estimate_mean(scores, share=set(scores) <= {0.0, 1.0})
    return Estimate(value, interval.low, interval.high)


def count_scores(data: Data, rollout: Rollout) -> int:
    """Return how many scores a validation has; 0 if its rows cannot be counted."""
    return (val_rows(data) or 0) * rollout.val_kwargs.n


def compare_validations(count: int, run_dir: Path, first: Line, last: Line) -> Comparison:
    """Return the change between two validations of a run, of `count` scores each; 0: unknown.

    The interval pairs the responses to the same prompt. If they are not on the disk, it follows
    from the spread of the scores in the two lines.
    """
    before, after = (read_prompt_scores(run_dir, int(line["step"])) for line in (first, last))
    both = [uid for uid in before if uid in after]
    if both:
        return _compare_prompts([[after[uid] - before[uid] for uid in both]])
    difference = float(last["val/reward_mean"]) - float(first["val/reward_mean"])
    if not count:
        return Comparison(Estimate(difference), "")
    spread = math.hypot(*(float(line.get("val/score/std") or 0.0) for line in (first, last)))
    half = NormalDist().inv_cdf((1 + LEVEL) / 2) * spread / math.sqrt(count)
    return Comparison(
        Estimate(difference, difference - half, difference + half),
        f"from the spread of {count:,} scores",
    )


def compare_best(count: int, run_dir: Path, validations: Sequence[Line]) -> Comparison:
    """Return the change from the first validation to the best one, without the luck of choosing it.

    `estimate_best` corrects it with the responses on the disk; without those it is not corrected,
    and the basis says so.
    """
    scores = [read_prompt_scores(run_dir, int(line["step"])) for line in validations]
    both = [uid for uid in scores[0] if all(uid in later for later in scores[1:])]
    if both:
        return _compare_prompts([[s[uid] - scores[0][uid] for uid in both] for s in scores[1:]])
    best = find_best(validations)
    comparison = compare_validations(count, run_dir, validations[0], best)
    if len(validations) == 2:
        return comparison
    luck = f", the luck of the best of {len(validations) - 1} included"
    return Comparison(comparison.change, comparison.basis + luck)


def _compare_prompts(gains: Sequence[Sequence[float]]) -> Comparison:
    """Return the comparison of gains by validation and prompt; few prompts have no interval."""
    count = len(gains[0])
    few = count < MIN_PROMPTS
    change = Estimate(max(map(fmean, gains))) if few else estimate_best(gains)
    return Comparison(change, f"on the same {count:,} prompts")


def read_prompt_scores(run_dir: Path, step: int, part: str = "") -> Mapping[str, float]:
    """Return the mean score, or `part` of it, of each prompt of a validation.

    Empty without its responses.
    """
    file = rollout_file(run_dir, step, "val")
    state = file_state(file)
    return {} if state is None else _read_scores(file, part, state)


# A page compares the same validations several times, and again after each step of a live run.
@lru_cache(maxsize=64)
def _read_scores(file: Path, part: str, state: tuple[int, int]) -> Mapping[str, float]:
    """Return the mean score of each prompt in a rollout file; `state` renews the cache."""
    scores: dict[str, list[float]] = defaultdict(list)
    for line in read_lines(file):
        values = {"": line.get("score")}
        # What a judge reports in a mixture has the name of its part in front.
        for name, value in (line.get("parts") or {}).items() if part else ():
            values[name.rpartition(".")[2]] = value["raw"]
        if isinstance(value := values.get(part), int | float):
            scores[str(line.get("uid"))].append(float(value))
    return {uid: fmean(values) for uid, values in scores.items()}


def choose_step(validations: Sequence[Line], saved: Sequence[int]) -> int | None:
    """Return the saved step to keep: that of the best validation, or the nearest to it.

    None without a second validation or a checkpoint.
    """
    if len(validations) < 2 or not saved:
        return None
    best = int(find_best(validations)["step"])
    return min(saved, key=lambda step: (abs(step - best), step))


def describe_choice(
    validations: Sequence[Line], run_dir: Path, data: Data, saved: Sequence[int]
) -> str:
    """Return in words which step to keep: the best validation, and where it is saved."""
    if len(validations) < 2:
        return _advise_validation(validations, data)
    best = find_best(validations)
    step, score = int(best["step"]), estimate_score(run_dir, best)
    text = (
        f"step {step}: {name_measure(best)} {score.value:.3g}{_format_interval(score)}, "
        f"the best of {len(validations)}; "
    )
    nearest = choose_step(validations, saved)
    if nearest is None:
        return f"{text}no checkpoint is saved"
    if nearest == step:
        return f"{text}saved as checkpoint step_{step:06d}"
    return f"{text}not saved, the nearest checkpoint is step_{nearest:06d}"


def describe_gain(validations: Sequence[Line], run_dir: Path, count: int, *, doubtful: bool) -> str:
    """Return in words whether the step to keep is better than the first by more than chance.

    The best of several is corrected for having been chosen. If the first validation is the best,
    the last one is compared. With `doubtful`, the reward that measures it seems to be exploited.
    """
    if len(validations) < 2:
        return "not known without a second validation"
    first, best = validations[0], find_best(validations)
    last = validations[-1] if best is first else best
    comparison = (
        compare_validations(count, run_dir, first, last)
        if best is first
        else compare_best(count, run_dir, validations)
    )
    verdicts = {1: "yes", -1: "no, it fell", 0: "it may be chance"}
    verdict = verdicts[comparison.sign]
    if doubtful and comparison.sign > 0:
        verdict = "doubtful, the same reward measures it"
    interval = _format_interval(comparison.change, signed=True, basis=f", {comparison.basis}")
    return (
        f"{verdict}: {name_measure(last)} {comparison.change.value:+.2g} from step {first['step']} "
        f"to {last['step']}{interval}"
    )


def name_measure(line: Line) -> str:
    """Return what a validation measures: an accuracy if each score was 0 or 1."""
    accurate = line.get("val/accuracy") is not None
    return "validation accuracy" if accurate else "validation reward"


def _format_interval(estimate: Estimate, *, signed: bool = False, basis: str = "") -> str:
    """Return ` (95 % interval 0.9 to 1)`, or nothing without an interval."""
    if estimate.low is None or estimate.high is None:
        return ""
    form = "+.2g" if signed else ".3g"
    return f" (95 % interval {estimate.low:{form}} to {estimate.high:{form}}{basis})"


def _advise_validation(validations: Sequence[Line], data: Data) -> str:
    """Return why no step is best, and the flags that validate a run more often, or at all."""
    missing = "a second validation" if validations else "validation"
    files = "" if data.val_files else "--val_files FILE "
    return f"not known without {missing}: {files}--test_freq 10 validates every 10 steps"
