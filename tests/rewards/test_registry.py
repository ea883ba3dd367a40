"""From settings to a reward, and what is refused before anything runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.config.schema.reward import Composite
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import RewardError, WorkerLost
from ppo_cli.rewards.base import Factory, Host, Reward
from ppo_cli.rewards.mixture import CompositeReward
from ppo_cli.rewards.models.local import LocalModelReward, ModelScorer
from ppo_cli.rewards.registry import build_reward
from tests.rewards.scoring import make_rollout
from tests.settings import complete_reward_model

Build = Callable[..., Reward]


def test_unknown_sources_stop_rules_but_not_one_rule_for_all(build: Build) -> None:
    with pytest.raises(RewardError, match="No rule for data_source 'mine'"):
        build({"mine"})
    assert build({"mine"}, rule="exact").name == "rule"


def test_a_model_is_on_this_machine_or_behind_an_address(build: Build) -> None:
    local = build(model=complete_reward_model(path="some/model"))
    served = build(model=complete_reward_model(path="http://localhost:1/classify"))
    assert [type(r).__name__ for r in (local, served)] == ["LocalModelReward", "ServedModelReward"]


def test_parts_are_built_from_their_own_settings(build: Build) -> None:
    parts = {"short": {"kind": "rule", "rule": "length", "function_kwargs": {"max_chars": 4}}}
    reward = build(
        {"openai/gsm8k"},
        parts=("rule:0.5", "rule:short:0.25"),
        composite=Composite(parts={n: p | {"scaling": "none"} for n, p in parts.items()}),
    )
    futures = [reward.submit(make_rollout(text)) for text in ("#### 72", "#")]
    reward.end_round()
    long, short = (f.result(60).parts for f in futures)
    assert (long["rule"].raw, long["short"].raw) == (1.0, 0.25)
    assert (short["rule"].raw, short["short"].raw) == (0.0, 1.0)


def test_a_part_that_cannot_be_built_is_named(build: Build) -> None:
    with pytest.raises(RewardError, match=r"Part 'exakt' of the mixture: .*Did you mean 'exact'"):
        build({"openai/gsm8k"}, parts=("rule:0.5", "rule:exakt:0.5"))


def test_a_function_and_a_rule_together_are_refused(build: Build) -> None:
    with pytest.raises(RewardError, match="both set"):
        build(function="f.py", rule="exact")


def test_settings_of_a_rule(build: Build) -> None:
    assert build(rule="length", function_kwargs={"max_chars": 10}).name == "rule"
    with pytest.raises(RewardError, match=r"has no such setting. Did you mean 'max_chars'"):
        build(rule="length", function_kwargs={"max_char": 10})
    with pytest.raises(RewardError, match="neither is set"):
        build({"length"}, function_kwargs={"max_chars": 10})


def test_models_are_hosted_where_they_are_told_to() -> None:
    """Also those in a mixture; a judge, a rule and a served model need no place."""
    scorers: dict[str, Any] = {}

    def host(factory: Factory, name: str) -> Host:
        scorers[name] = pickle.loads(pickle.dumps(factory))()
        raise WorkerLost("no place")

    mixture = RewardSettings(
        parts=("rule:0.5", "model:0.25", "model:safe:0.25"),
        model=complete_reward_model(path="some/model"),
        composite=Composite(parts={"safe": {"kind": "model", "model": {"path": "some/other"}}}),
    )
    alone = RewardSettings(model=complete_reward_model(path="a/third"))
    for settings in (mixture, alone):
        reward = build_reward(settings, sources={"openai/gsm8k"}, host=host)
        try:
            parts = reward._rewards.values() if isinstance(reward, CompositeReward) else [reward]
            for part in parts:
                if isinstance(part, LocalModelReward):
                    with pytest.raises(WorkerLost, match="no place"):
                        part.start([])
        finally:
            reward.close()
        assert all(isinstance(scorer, ModelScorer) for scorer in scorers.values())
        paths = {name: scorer._settings.path for name, scorer in scorers.items()}
        expected = {"model": "some/model", "safe": "some/other"}
        assert paths == (expected if settings is mixture else expected | {"model": "a/third"})
