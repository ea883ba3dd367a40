"""Builds the reward that the settings describe; the only module that knows every kind.

A kind is imported when it is used: judges load HTTP and certificates, reward models torch.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from ppo_cli.config.mixture import (
    MixPart,
    judge_settings,
    mixture_of,
    model_settings,
    rule_settings,
)
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import ModelReward as ModelSettings
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import RewardError
from ppo_cli.rewards.base import HostMaker, InProcess, Reward
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import check_sources, choose_rule


def build_reward(
    settings: RewardSettings, *, sources: Collection[str], host: HostMaker | None = None
) -> Reward:
    """Build the reward, and check that it can score rows of these data_sources.

    `host` creates the process of a reward model; by default models run in this process.
    """
    host = host or InProcess
    parts = mixture_of(settings)
    if parts:
        return _mixture(settings, parts, sources, host)
    if settings.api.enable:
        return _judge(settings.api, "judge")
    if settings.model.path is not None:
        return _model(settings.model, "model", host)
    return _rules(settings, sources)


def _mixture(
    settings: RewardSettings,
    parts: Collection[MixPart],
    sources: Collection[str],
    host: HostMaker,
) -> Reward:
    """Build every part; on an error, close the parts that are already built."""
    from ppo_cli.rewards.mixture import CompositeReward

    # A part may have started threads or processes by now.
    with ExitStack() as built_parts:
        built = []
        for part in parts:
            try:
                reward = _part(settings, part, sources, host)
            except RewardError as error:
                raise RewardError(f"Part '{part.name}' of the mixture: {error}") from error
            built_parts.callback(reward.close)
            built.append((part, reward))
        built_parts.pop_all()
    return CompositeReward(built)


def _part(
    settings: RewardSettings, part: MixPart, sources: Collection[str], host: HostMaker
) -> Reward:
    """Return the reward of one part of a mixture, by its kind."""
    if part.kind == "judge":
        return _judge(judge_settings(settings, part), part.name)
    if part.kind == "model":
        return _model(model_settings(settings, part), part.name, host)
    if part.kind == "environment":
        from ppo_cli.rewards.environment import EnvironmentReward

        return EnvironmentReward()
    return _rules(rule_settings(settings, part), sources)


def _judge(api: ApiReward, name: str) -> Reward:
    from ppo_cli.rewards.judge.cascade import CascadeReward
    from ppo_cli.rewards.judge.compare import CompareReward
    from ppo_cli.rewards.judge.panel import PanelReward
    from ppo_cli.rewards.judge.reward import JudgeReward

    if api.panel.judges:
        return PanelReward(api, name=name)
    kind = CompareReward if api.mode == "compare" else JudgeReward
    return (kind if api.cascade.model is None else CascadeReward)(api, name=name)


def _model(settings: ModelSettings, name: str, host: HostMaker) -> Reward:
    """Return a reward model: a client if the path is a URL, else one in this machine's memory."""
    if (settings.path or "").startswith(("http://", "https://")):
        from ppo_cli.rewards.models.served import ServedModelReward

        return ServedModelReward(settings, name=name)
    from ppo_cli.rewards.models.local import LocalModelReward

    return LocalModelReward(settings, name=name, host=host)


def _rules(settings: RewardSettings, sources: Collection[str]) -> Reward:
    """Return the reward of --reward_function or --rule, by default of the rules by data source.

    Raises RewardError if both are set, or if a data source has no rule.
    """
    if settings.function is not None and settings.rule is not None:
        raise RewardError(
            "--reward_function and --rule are both set; keep the one that should score."
        )
    if settings.function is not None:
        from ppo_cli.rewards.function import FunctionReward

        return FunctionReward(
            settings.function,
            kwargs=settings.function_kwargs,
            timeout=settings.timeout,
            num_workers=settings.num_workers,
        )
    rule = choose_rule(settings)
    if rule is None:
        check_sources(sources)
    return RuleReward(
        rule,
        settings=settings.function_kwargs,
        timeout=settings.timeout,
        num_workers=settings.num_workers,
        code=settings.code,
        place=settings.rule_place,
    )
