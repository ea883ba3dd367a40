"""Repeat the verdicts of a reward: new ones that pass by all caches, within the judges' budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.extras.lab.reward_facts import random_sources
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import Reward
from ppo_cli.scoring.score import (
    STOPPED_BY_CTRL_C,
    Callbacks,
    final_metrics,
    judged_value,
    open_reward,
    spending_by_judge,
    total_spending,
)
from ppo_cli.scoring.sources import reward_kind


@dataclass
class Repeats:
    """New verdicts on each rollout, by part; `stopped` is the reason why some are missing."""

    verdicts: dict[str, list[list[float]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


def add_spending(spent: Mapping[str, Any], metrics: Mapping[str, float]) -> dict[str, Any]:
    """Add the spending in `metrics` to `spent`."""
    added = total_spending(metrics)
    return {k: spent.get(k, 0) + added.get(k, 0) for k in dict.fromkeys([*spent, *added])}


def repeat_random_sources(
    reward: Reward,
    settings: RewardSettings,
    rollouts: Sequence[Rollout],
    times: int,
    watch: Callbacks,
    before: Mapping[str, float],
) -> Repeats:
    """Repeat every random part; `before` are the metrics of the first scoring."""
    repeats, mixed = Repeats(), reward_kind(settings) == "mixture"
    prompts = [rollout.prompt for rollout in rollouts]
    for name, alone in random_sources(settings).items():
        try:
            if mixed and alone.api.enable:
                alone = alone.model_copy(update={"api": remaining_budget(alone.api, name, before)})
            # A reward without parts is still open; a part of a mixture is opened separately.
            with open_reward(alone, prompts, watch) if mixed else nullcontext(reward) as source:
                repeats.stopped, repeats.verdicts[name] = repeat_verdicts(
                    source, rollouts, times, watch
                )
                for key, value in final_metrics(source, repeats.stopped).items():
                    # Count each judge separately: one with an unknown price has no cost.
                    stage, _, rest = key.partition("/")
                    metric = f"judge_{name}/{rest}" if stage == "judge" else key
                    repeats.metrics[metric] = repeats.metrics.get(metric, 0.0) + value
        except Interrupted as reason:
            repeats.stopped = str(reason)
        if repeats.stopped:
            break
    return repeats


def remaining_budget(api: ApiReward, name: str, before: Mapping[str, float]) -> ApiReward:
    """A judge's settings with the budget that the first scoring left; Interrupted if none."""
    # A single judge's spending has no name; a judge in a mixture has its own.
    judges = spending_by_judge(before)
    spent = judges.get(f"judge_{name}") or judges.get("judge", {})
    tokens = spent.get("tokens_in", 0.0) + spent.get("tokens_out", 0.0)
    budgets: dict[str, Any] = {}
    if api.budget_usd is not None:
        budgets["budget_usd"] = api.budget_usd - spent.get("cost_usd", 0.0)
    if api.budget_tokens is not None:
        budgets["budget_tokens"] = api.budget_tokens - round(tokens)
    if any(budget <= 0 for budget in budgets.values()):
        raise Interrupted(f"The budget of the judge '{name}' is used up.")
    return api.model_copy(update=budgets)


def repeat_verdicts(
    reward: Reward, rollouts: Sequence[Rollout], times: int, watch: Callbacks
) -> tuple[str, list[list[float]]]:
    """Get `times` new verdicts on each rollout; returns the stop reason and the verdicts so far."""
    pending: list[list[Future[Any]]] = []
    verdicts: list[list[float]] = []
    try:
        reward.begin_step(1)
        # A judge has a method that bypasses its cache; other rewards just score again.
        past_cache = getattr(reward, "repeat", None)
        for rollout in rollouts:
            repeat = [past_cache(rollout, times)] if past_cache else []
            pending.append(repeat or [reward.submit(rollout) for _ in range(times)])
        reward.end_round()
        # Wait in short steps, so that Ctrl-C is noticed.
        for futures in pending:
            while wait(futures, timeout=1.0).not_done:
                pass
            answers = [future.result() for future in futures]
            scores = [s for a in answers for s in ([a] if isinstance(a, Score) else a)]
            verdicts.append([value for s in scores if (value := judged_value(s)) is not None])
            watch.advance(1)
    except Interrupted as reason:
        return str(reason), verdicts
    except KeyboardInterrupt:
        return STOPPED_BY_CTRL_C, verdicts
    return "", verdicts
