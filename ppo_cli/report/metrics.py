"""Metrics of a step from scores, sums and counts; and the summary of a finished run."""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ppo_cli.config.mixture import judges_of, rules_of
from ppo_cli.config.schedule import describe_lr_jumps
from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.run import Config, Pretraining
from ppo_cli.errors import ExhaustedBudget, Interrupted, RewardError, plural, ppo, replace_flag
from ppo_cli.planning.batches import batch_arithmetic
from ppo_cli.records import Scored
from ppo_cli.report.drift import read_opinions
from ppo_cli.report.episode_card import describe_episodes
from ppo_cli.report.exploits import exploit_metrics
from ppo_cli.report.health import EXPLOITS, find_troubles, make_limits
from ppo_cli.report.judge_card import describe_judges
from ppo_cli.report.limits import Limits
from ppo_cli.report.tracker import Summary
from ppo_cli.report.validation import (
    ROUNDING,
    compare_validations,
    count_scores,
    list_validations,
    name_measure,
)
from ppo_cli.run_folder.checkpoints import STEP_NAME, CheckpointStore
from ppo_cli.run_folder.lines import PRETRAINING_FILE, read_lines, read_metrics
from ppo_cli.run_folder.restraints import describe_restraints

Lines = Sequence[Mapping[str, Any]]


class StepSums:
    """Adds up sums and counts of optimizer steps; means are computed once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Add (sum, count) pairs of one optimizer step."""
        for name, (total, count) in sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + count)

    def total(self, name: str) -> float:
        """Return the sum of a quantity, 0 if it was never added."""
        return self._sums.get(name, (0.0, 0.0))[0]

    def means(self) -> dict[str, float]:
        """Return the means of all quantities; counters of events stay sums."""
        # Events such as skipped steps are reported as numbers, not as shares.
        counters = (
            "skipped_steps", "empty_minibatches", "stopped_early", "environment/restarts",
            "environment/timeouts", "environment/crashes", "loss_scale_halvings",
        )  # fmt: skip
        return {
            name: total if name.endswith(counters) else total / count
            for name, (total, count) in self._sums.items()
            if count
        }


def staleness_metrics(scored: Sequence[Scored], version: int) -> dict[str, float]:
    """Return how many updates old the weights are with which the responses were started."""
    import numpy as np

    ages = np.array([version - s.rollout.weight_version for s in scored], dtype=float)
    return {
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": float(ages.max()),
        "rollout/carried_share": float(np.mean([s.rollout.carried > 0 for s in scored])),
    }


def score_metrics(scored: Sequence[Scored], prefix: str = "") -> dict[str, float]:
    """Return statistics of rewards and lengths; failed scores are only counted.

    With a prefix (validation) there is also a mean for each data_source, and an accuracy if every
    score is 0 or 1.
    """
    import numpy as np

    # Lengths of all responses; rewards of those with a score.
    values = np.array([s.score.value for s in scored if s.score.judged], dtype=float)
    lengths = np.array([s.rollout.policy_tokens for s in scored], dtype=float)
    cut = [s.rollout.finish_reason == "length" for s in scored]
    metrics = {
        f"{prefix}response_length_mean": float(lengths.mean()),
        f"{prefix}response_length/max": float(lengths.max()),
        f"{prefix}response_length/clip_ratio": float(np.mean(cut)),
        **_compute_thought_metrics(scored, prefix),
        **_compute_episode_metrics(scored, prefix),
        f"{prefix}score/failed": float(len(scored) - len(values)),
        f"{prefix}score/failed_share": 1 - len(values) / len(scored),
    }
    if len(values):
        metrics |= {
            f"{prefix}reward_mean": float(values.mean()),
            f"{prefix}score/std": float(values.std()),
            f"{prefix}score/min": float(values.min()),
            f"{prefix}score/max": float(values.max()),
        }
        if not prefix:
            metrics |= exploit_metrics(scored)
        # A judge's opinion or a weighted sum is not an accuracy.
        opinion = any(s.score.reply or s.score.mixture for s in scored)
        if prefix and not opinion and np.isin(values, (0.0, 1.0)).all():
            metrics[f"{prefix}accuracy"] = float(values.mean())
    groups: dict[str, list[float]] = defaultdict(list)
    for s in scored:
        if s.score.value is not None and s.score.judged:
            for name, part in s.score.parts.items():
                if part.raw is not None:
                    groups[_metric_name(name)].append(part.raw)
            if prefix:
                source = s.rollout.prompt.data_source or "unnamed"
                groups[f"reward_mean/{source}"].append(s.score.value)
    return metrics | {f"{prefix}{name}": float(np.mean(scores)) for name, scores in groups.items()}


def _compute_thought_metrics(scored: Sequence[Scored], prefix: str) -> dict[str, float]:
    """Return lengths of thoughts and answers in tokens; empty if no response has a thought."""
    rollouts = [s.rollout for s in scored]
    thinking = [r for r in rollouts if r.thoughts]
    if not thinking:
        return {}
    import numpy as np

    answers = [r.policy_tokens - r.thought_tokens for r in rollouts if not r.unclosed]
    lengths = {
        "thought/length_mean": float(np.mean([r.thought_tokens for r in thinking])),
        "thought/length_max": float(max(r.thought_tokens for r in thinking)),
        "thought/share": len(thinking) / len(rollouts),
        "thought/unclosed_share": float(np.mean([r.unclosed for r in rollouts])),
    }
    if answers:
        lengths["answer_length/mean"] = float(np.mean(answers))
    return {f"{prefix}{name}": value for name, value in lengths.items()}


def _compute_episode_metrics(scored: Sequence[Scored], prefix: str) -> dict[str, float]:
    """Return figures of episodes: turns, failures, errors, seconds, limits; empty without any.

    Shares are of the episodes, that of tool errors is of the turns.
    """
    played = [s for s in scored if s.rollout.turns or s.rollout.failure]
    if not played:
        return {}
    episodes = [s.rollout for s in played]
    turns = [turn for episode in episodes for turn in episode.turns]
    shares = {
        "failed": [bool(e.failure) for e in episodes],
        "cut_turns": [e.ended == "turns" for e in episodes],
        "cut_episode_tokens": [e.ended == "tokens" for e in episodes],
        "cut_turn_tokens": [any(turn.cut for turn in e.turns) for e in episodes],
        "cut_without_reward": [s.rollout.lacks_reward and s.score.value is None for s in played],
        "tool_error": [bool(turn.error) for turn in turns],
    }
    figures = {f"{name}_share": fmean(flags) for name, flags in shares.items() if flags}
    figures["turns_mean"] = len(turns) / len(episodes)
    figures["seconds_mean"] = sum(turn.seconds for turn in turns) / len(episodes)
    # The last value of an episode counts, over the episodes that have one.
    own = defaultdict[str, list[float]](list)
    for episode in episodes:
        for name, value in dict(item for t in episode.turns for item in t.metrics.items()).items():
            own[name].append(value)
    figures |= {f"metric.{name}": fmean(values) for name, values in own.items()}
    return {f"{prefix}environment/{name}": value for name, value in figures.items()}


def _metric_name(part: str) -> str:
    """Return the metric of a part of a score: `reward/NAME`, or `rubric/NAME` for a criterion."""
    return f"rubric/{part.replace('rubric/', '', 1)}" if "rubric/" in part else f"reward/{part}"


def recent_statistics(lines: Sequence[Mapping[str, Any]], max_steps: int = 100) -> dict[str, float]:
    """Return mean and standard deviation of the main metrics over the last `max_steps` steps.

    Keys are `<metric>_mean` and `<metric>_std`; main metrics are those without a `/`. Values that
    a step did not measure are left out. The deviation divides by n, not n - 1.
    """
    import numpy as np

    # Step 0 is a validation before training.
    steps = [line for line in lines if line["step"] > 0][-max_steps:]
    statistics: dict[str, float] = {}
    for name in sorted({key for line in steps for key in line if "/" not in key} - {"step"}):
        values = [float(line[name]) for line in steps if line.get(name) is not None]
        if values:
            statistics[f"{name}_mean"] = float(np.mean(values))
            statistics[f"{name}_std"] = float(np.std(values))
    return statistics


def mixture_part_means(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the raw mean of each part of a mixture by name; empty if rewards are not mixed."""
    # Only parts of a mixture have a weight.
    start, end = f"{prefix}reward/", "/weight"
    names = [k[len(start) : -len(end)] for k in metrics if k.startswith(start) and k.endswith(end)]
    means = {name: metrics.get(f"{start}{name}") for name in names}
    return {name: float(value) for name, value in means.items() if value is not None}


def is_pretrained(limits: Pretraining, lines: Lines) -> bool:
    """Whether critic pretraining is over after these steps: at its target, or at its last step."""
    return len(lines) >= limits.max_steps or has_reached_target(limits.target, lines)


def has_reached_target(target: float | None, lines: Lines) -> bool:
    """Whether the last of these steps of critic pretraining is at its target."""
    explained = lines[-1].get("explained_variance") if lines else None
    return target is not None and explained is not None and bool(explained >= target)


def read_pretraining(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps of a run's critic pretraining; empty if it had none."""
    return read_lines(run_dir / PRETRAINING_FILE)


def describe_pretraining(limits: Pretraining, lines: Lines) -> str:
    """Return a sentence on critic pretraining; empty if there were no steps of it."""
    if not lines:
        return ""
    first, last = (format_explained(lines[i].get("explained_variance")) for i in (0, -1))
    text = f"explained variance {first} -> {last}"
    max_steps, target = limits
    if not is_pretrained(limits, lines):
        goal = "" if target is None else f" (target {target:g})"
        return f"critic pretraining: step {len(lines)} of {max_steps}, {text}{goal}"
    text = f"critic pretrained in {plural(len(lines), 'step')}: {text}"
    if target is None:
        return text
    if has_reached_target(target, lines):
        return f"{text} (target {target:g})"
    return f"{text}, below the target {target:g} (more steps: --critic_pretrain_steps)"


def format_explained(value: float | None) -> str:
    """Return an explained variance with two digits; `unknown` if all returns were equal."""
    return "unknown" if value is None or math.isnan(value) else f"{value:z.2f}"


MIN_TREND_STEPS = 6  # with fewer, a change cannot be distinguished from noise
DOUBTFUL = "Doubtful"  # the verdict on a run whose reward seems to be exploited
VALIDATION_MEASURES = ("validation accuracy", "validation reward")
TO_DEVIATION = 1.4826  # median absolute value of a normal variable -> its standard deviation
BUDGET_MARGIN = 1.2  # factor on a budget, as later responses may be longer


def summarise(
    history: Lines,
    run_dir: Path,
    config: Config,
    *,
    session: tuple[int, float] = (0, 0.0),
    resume_command: str = "",
) -> Summary:
    """Return the summary of a run, which compares its first tenth of steps with its last.

    `session` has the steps and seconds of this session, if the run is being trained.
    """
    # Rewards and parts of a mixture, as means over a tenth of the steps at each end.
    measured = [line for line in history if line.get("reward_mean") is not None]
    validations = list_validations(history)
    rewards = _step_rewards(measured)
    few = max(1, len(measured) // 10)
    first, last = _compute_part_means(measured[:few]), _compute_part_means(measured[-few:])
    if rewards:
        first = {"reward": fmean(rewards[:few])} | first
        last = {"reward": fmean(rewards[-few:])} | last
    rows = [(first, last, len(measured))]
    ends = (_validation_means(validations[:1]), _validation_means(validations[-1:]))
    rows.append((*ends, len(validations)))
    # Where all rewards are equal, there is nothing to explain.
    explained = [
        x
        for line in measured[-few:]
        if (x := line.get("explained_variance")) is not None and line.get("score/std", 1.0)
    ]
    model_dir = run_dir / "checkpoints" / "latest" / "actor"
    steps = int(history[-1]["step"]) if history else 0
    first_step = next((int(line["step"]) for line in history if line["step"] > 0), 1)
    rose, fell = _find_changes(
        count_scores(config.data, config.rollout), run_dir, rewards, measured, validations, few
    )
    seconds = max(session[1], float(history[-1].get("time/run_s") or 0.0) if history else 0.0)
    troubles = find_troubles(history, read_limits(run_dir, config))
    doubtful = not troubles.keys().isdisjoint(EXPLOITS)
    return Summary(
        steps=steps,
        measures=[
            (name, before.get(name) if count > 1 else None, value)
            for before, after, count in rows
            for name, value in after.items()
        ],
        rewards=rewards,
        model_dir=model_dir if model_dir.exists() else None,
        run_dir=run_dir,
        wall_seconds=seconds,
        averaged=few,
        next_steps=_list_next_steps(config, run_dir, history, resume_command, doubtful=doubtful),
        session=session if session[0] < steps - first_step + 1 else None,
        first_step=first_step,
        judge=tuple(describe_judges(run_dir, config.reward, history)),
        episodes=tuple(describe_episodes(run_dir, history)),
        critic=f"explained variance {format_explained(fmean(explained))}" if explained else "",
        pretraining=describe_pretraining(config.pretraining, read_pretraining(run_dir)),
        restrained=describe_restraints(run_dir),
        declined=fell,
        verdict=DOUBTFUL if doubtful else _judge_change(rose, fell, len(validations) > 1),
        warnings=tuple(troubles.values()),
    )


def read_limits(run_dir: Path, config: Config) -> Limits:
    """Return the limits of the health checks, with a run's checkpoints and labels of people."""
    saved = tuple(CheckpointStore(run_dir / "checkpoints", 1).steps())
    people = read_opinions(run_dir, config.reward)
    return replace(make_limits(config), folder=run_dir, saved=saved, people=people)


def _find_changes(
    scores: int,
    run_dir: Path,
    rewards: Sequence[float],
    measured: Lines,
    validations: Lines,
    few: int,
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the measures that rose, and those that fell, by more than noise.

    Noise is twice the standard error of the difference. That of a step is estimated from the median
    difference of neighbouring steps, which trends and single jumps hardly change. Validations, of
    `scores` scores each, are compared with `compare_validations`.
    """
    changes: dict[str, float] = {}  # beyond noise
    series = {"reward": rewards}
    for name in _compute_part_means(measured):
        means = [_compute_part_means([line]).get(name) for line in measured]
        series[name] = [value for value in means if value is not None]
    for name, values in series.items():
        if len(values) < MIN_TREND_STEPS:
            continue
        # A difference of two steps has twice the variance of one; `few` steps are averaged.
        jumps = median(abs(b - a) for a, b in pairwise(values))
        error = TO_DEVIATION * jumps / math.sqrt(2) * math.sqrt(2 / few)
        change = fmean(values[-few:]) - fmean(values[:few])
        changes[name] = change if abs(change) > 2 * error + ROUNDING else 0.0
    if len(validations) > 1:
        comparison = compare_validations(scores, run_dir, validations[0], validations[-1])
        changes |= dict.fromkeys(VALIDATION_MEASURES, comparison.sign)
    rose = frozenset(name for name, change in changes.items() if change > 0)
    return rose, frozenset(name for name, change in changes.items() if change < 0)


def _judge_change(rose: frozenset[str], fell: frozenset[str], has_validation: bool) -> str:
    """Return what a run achieved in a few words: by its validation, else by the reward."""
    measures = VALIDATION_MEASURES if has_validation else ("reward",)
    if rose.intersection(measures):
        return "Learned"
    if fell.intersection(measures):
        return "Got worse"
    unclear = "The reward rose, validation not clearly"
    return unclear if "reward" in rose else "No clear change"


def refuse_unscored(history: Lines, run_dir: Path, resume_command: str) -> None:
    """Raise RewardError if no response of the entire run got a score: nothing was learned."""
    steps = [line for line in history if line["step"] > 0]
    if not steps or any(line.get("reward_mean") is not None for line in steps):
        return
    look = ppo(f"show {shlex.quote(str(run_dir))} --worst 5")
    raise RewardError(
        f"No response of the {plural(len(steps), 'step')} got a score, so the model "
        f"has learned nothing. `{look}` shows why. Correct the reward, then start from scratch: "
        f"{replace_flag(resume_command, '--resume', 'never')}"
    )


def extend_budget(
    command: str, stop: Interrupted, config: Config, history: Lines, total_steps: int, rows: int
) -> str:
    """Return the resume command; if a budget ended the run, with a budget that finishes it.

    `rows` is the number of rows of a validation.
    """
    if stop.used_up is None:
        return command
    # Replace the flag of the budget that ran out.
    flag = stop.used_up.flag
    key = next(key.name for key in table().values() if key.flag == flag)
    # An override would win over the flag.
    command = re.sub(rf" {re.escape(key)}=[^ ]+", "", command)
    enough = estimate_budget(stop.used_up, config, history, total_steps, rows)
    return replace_flag(command, flag, f"{enough:.12g}")


def estimate_budget(
    used: ExhaustedBudget, config: Config, history: Lines, total_steps: int, rows: int
) -> float:
    """Return the expected use of a budget by the entire run plus a fifth, rounded up to two digits.

    Future responses are assumed to cost the average of past ones. In an interrupted step the
    number of responses is the number of calls divided by the votes per response.
    """
    sums = batch_arithmetic(config, total_steps)
    # Calls per step and per validation, done so far and in total.
    votes = max((judge.settings.max_votes for judge in judges_of(config.reward)), default=1)
    a_step, a_round = sums["reward_calls_per_step"] or 0, rows * config.rollout.val_kwargs.n
    steps = len([line for line in history if line["step"] > 0])
    rounds = sum(any(key.startswith("val/") for key in line) for line in history)
    in_lines = steps * a_step + rounds * a_round
    done = max(in_lines, math.ceil(used.calls / votes), 1)
    pretraining = sums.get("reward_calls_pretraining") or 0
    total_calls = total_steps * a_step + (sums["validation_rounds"] or 0) * a_round
    # Before the first call its worst case is the estimate.
    each = used.spent / done if used.spent else used.next
    # With step 1 critic pretraining is over; it may have ended early, so its calls are unknown.
    over = bool(pretraining and steps)
    calls_left = total_calls - in_lines if over else total_calls + pretraining - done
    expected = used.spent + each * max(0, calls_left)
    need = max(BUDGET_MARGIN * expected, used.spent) + used.next
    # Round up to two digits, so that the flag is readable.
    digit = math.pow(10, math.floor(math.log10(need)) - 1)
    return math.ceil(need / digit) * digit


def _step_rewards(lines: Lines) -> tuple[float, ...]:
    """Return the mean reward of each step; empty for z-scored mixtures, whose mean is always 0."""
    rewards = tuple(float(line["reward_mean"]) for line in lines)
    mixed = any(mixture_part_means(line) for line in lines)
    return () if mixed and max(map(abs, rewards)) < ROUNDING else rewards


def _compute_part_means(lines: Lines) -> dict[str, float]:
    """Return the raw mean of each part of a mixture over some steps."""
    values: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in mixture_part_means(line).items():
            values[f"reward {name}"].append(value)
    return {name: sum(means) / len(means) for name, means in values.items()}


def _validation_means(lines: Lines) -> dict[str, float]:
    """Return the measures of a validation by name; empty without one."""
    statistics: dict[str, float] = {}
    for line in lines:
        parts, mean = mixture_part_means(line, "val/"), float(line["val/reward_mean"])
        if not parts or abs(mean) > ROUNDING:
            statistics[name_measure(line)] = mean
        statistics |= {f"validation {n}": v for n, v in parts.items()}
    return statistics


def find_lr_jumps(actor: Optim, critic: Optim, checkpoint: Path, total_steps: int) -> list[str]:
    """Return notes on jumps of the learning rate if a run of `total_steps` resumes a checkpoint."""
    name = STEP_NAME.match(checkpoint.name)
    lines = read_metrics(checkpoint.parents[1]) if name else []
    last = next((line for line in lines if name and line["step"] == int(name[1])), None)
    return [] if last is None else [*describe_lr_jumps(actor, critic, last, total_steps)]


def _list_next_steps(
    config: Config, run_dir: Path, history: Lines, resume_command: str, *, doubtful: bool
) -> tuple[tuple[str, str], ...]:
    """Return what a user may want next: pairs of a purpose and its command.

    If the verdict is `doubtful`, the responses to read are those that the reward likes.
    """
    folder = shlex.quote(str(run_dir))
    end, flag = ("highest", "--best") if doubtful else ("lowest", "--worst")
    steps = [
        ("the page: curves and all responses", ppo(f"view {folder}")),
        (f"the responses with the {end} scores", ppo(f"show {folder} {flag} 5")),
    ]
    # After the example run: own model and reward. After others: train longer, if that may help.
    if config.model.path == "embedded":
        if config.environment.path is not None:  # an environment opens the episodes, and rewards
            own = ppo("train --model PATH_OR_HUB_NAME --environment FILE.py:CLASS")
            steps.append(("your model, your environment", own))
        else:
            own = ppo("train --model PATH_OR_HUB_NAME --train_files YOUR.jsonl")
            steps.append(("your model, your data", own))
            if not any(rule.function for rule in rules_of(config.reward)):
                steps.append(("your own reward", ppo("train --reward_function FILE.py")))
    elif resume_command and not doubtful:
        total = 2 * int(history[-1]["step"]) if history else 0
        optims = config.actor.optim, config.critic.optim
        jumps = [*describe_lr_jumps(*optims, history[-1], total)] if history else []
        longer = replace_flag(resume_command, "--max_steps", str(total))
        steps += [("go on from here", longer), *(("", jump) for jump in jumps)]
    best = run_dir / "checkpoints" / "best"
    # Worth a line only if a later checkpoint is not the best one.
    if best.exists() and best.resolve() != (run_dir / "checkpoints" / "latest").resolve():
        steps.append(("the best validated model, not the last", str(best / "actor")))
    return tuple(steps)
