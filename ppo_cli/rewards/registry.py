"""From the reward settings to a reward: the one place that knows every kind.

A new kind (reward model, mixture) gets its branch in `build_reward`.
"""

from __future__ import annotations

from collections.abc import Collection

from ppo_cli.config.rewarding import Reward as RewardSettings
from ppo_cli.errors import MissingPart, RewardError
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.function import FunctionReward
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import check_sources, rule_named


def build_reward(settings: RewardSettings, *, sources: Collection[str]) -> Reward:
    """Build the reward, and make sure that it can score rows of these data_sources."""
    _refuse_missing(settings)
    if settings.api.enable:
        return JudgeReward(settings.api)
    if settings.function is not None and settings.rule is not None:
        raise RewardError(
            "--reward_function and --rule are both set; keep the one that is to score."
        )
    if settings.function is not None:
        return FunctionReward(
            settings.function,
            kwargs=settings.function_kwargs,
            timeout=settings.timeout,
            num_workers=settings.num_workers,
        )
    rule = None if settings.rule is None else rule_named(settings.rule)
    if rule is None:
        check_sources(sources)
    return RuleReward(
        rule,
        settings=settings.function_kwargs,
        timeout=settings.timeout,
        num_workers=settings.num_workers,
    )


def _refuse_missing(settings: RewardSettings) -> None:
    missing = (
        (settings.model.path is not None, "A reward model (--reward_model)"),
        (bool(settings.parts), "A mixture of rewards (--reward)"),
    )
    for asked, part in missing:
        if asked:
            raise MissingPart(
                f"{part} is not part of this version; use --reward_function FILE:NAME or a "
                "built-in rule (--rule NAME)."
            )
