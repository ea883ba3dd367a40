"""Ask again what may answer otherwise, past every cache: how steady is a verdict?

In a mixture each judge and each function is asked by itself: what the others say does not
change. A judge then keeps to what the first asking left of its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.config.reward_schema import Reward as RewardSettings
from ppo_cli.errors import Interrupted
from ppo_cli.records import Rollout, Score
from ppo_cli.rewards.base import Reward
from ppo_cli.trust.score import BY_HAND, Watch, judged, started
from ppo_cli.trust.sources import kind_of, unsteady
from ppo_cli.trust.summary import by_judge


@dataclass
class Repeats:
    """Fresh verdicts on each rollout, by part; `stopped` says why some are missing."""

    verdicts: dict[str, list[list[float]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = ""


def ask_again(
    reward: Reward,
    settings: RewardSettings,
    rollouts: Sequence[Rollout],
    times: int,
    watch: Watch,
    before: Mapping[str, float],
) -> Repeats:
    """Ask every part that is not steady; `before` is what the first asking was measured at."""
    found = Repeats()
    for name, alone in unsteady(settings).items():
        try:
            with _asked(reward, settings, name, alone, rollouts, watch, before) as one:
                found.stopped, found.verdicts[name] = repeat_all(one, rollouts, times, watch)
                _add(found.metrics, name, one.measure())
        except Interrupted as reason:
            found.stopped = str(reason)
        if found.stopped:
            break
    return found


@contextmanager
def _asked(
    reward: Reward,
    settings: RewardSettings,
    name: str,
    alone: RewardSettings,
    rollouts: Sequence[Rollout],
    watch: Watch,
    before: Mapping[str, float],
) -> Iterator[Reward]:
    """The reward itself where it stands alone, else one part of it, started anew."""
    if kind_of(settings) != "mixture":
        yield reward
        return
    left = alone.model_copy(update={"api": _left_of(alone.api, name, before)})
    with started(left, [rollout.prompt for rollout in rollouts], watch) as part:
        yield part


def _left_of(api: ApiReward, name: str, before: Mapping[str, float]) -> ApiReward:
    """A judge's settings with the budget that is left."""
    if not api.enable:
        return api
    judges = by_judge(before)
    spent = judges.get(f"judge_{name}") or judges.get("judge", {})
    tokens = spent.get("tokens_in", 0.0) + spent.get("tokens_out", 0.0)
    left: dict[str, Any] = {}
    if api.budget_usd is not None:
        left["budget_usd"] = api.budget_usd - spent.get("cost_usd", 0.0)
    if api.budget_tokens is not None:
        left["budget_tokens"] = api.budget_tokens - round(tokens)
    if any(most <= 0 for most in left.values()):
        raise Interrupted(f"The budget of the judge '{name}' is used up.")
    return api.model_copy(update=left)


def _add(metrics: dict[str, float], name: str, more: Mapping[str, float]) -> None:
    """Keep each judge's counts apart, so that an unknown price stays unknown."""
    for key, value in more.items():
        stage, _, rest = key.partition("/")
        own = f"judge_{name}/{rest}" if stage == "judge" else key
        metrics[own] = metrics.get(own, 0.0) + value


def repeat_all(
    reward: Reward, rollouts: Sequence[Rollout], times: int, watch: Watch
) -> tuple[str, list[list[float]]]:
    """Ask for fresh verdicts on each rollout; returns why it stopped, and the verdicts so far."""
    asked: list[list[Future[Any]]] = []
    found: list[list[float]] = []
    try:
        reward.begin_step(1)
        asked = [fresh(reward, rollout, times) for rollout in rollouts]
        reward.settle()
        for futures in asked:
            while wait(futures, timeout=1.0).not_done:
                pass
            scores = [score for future in futures for score in as_scores(future.result())]
            found.append([value for s in scores if (value := judged(s)) is not None])
            watch.advance(1)
    except Interrupted as reason:
        return str(reason), found
    except KeyboardInterrupt:
        return BY_HAND, found
    return "", found


def fresh(reward: Reward, rollout: Rollout, times: int) -> list[Future[Any]]:
    """Ask a judge past its cache; anything else is simply asked again."""
    ask: Callable[[Rollout, int], Future[Any]] | None = getattr(reward, "repeat", None)
    if ask is not None:
        return [ask(rollout, times)]
    return [reward.submit(rollout) for _ in range(times)]


def as_scores(answer: Score | Sequence[Score]) -> Sequence[Score]:
    """One score or several, as several."""
    return [answer] if isinstance(answer, Score) else answer
