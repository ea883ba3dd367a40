"""Reward files: their sections, and no secrets in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.schema.keys import value_of
from ppo_cli.errors import ConfigError
from ppo_cli.planning.resolved import Resolved
from tests.config import settling
from tests.config.settling import written


def settle(text: str, *overrides: str, env: dict[str, str] | None = None) -> Resolved:
    return settling.settle(*overrides, file=written(text), env=env)


def problems(text: str) -> tuple[str, ...]:
    return settling.problems(file=written(text))


@pytest.mark.parametrize(
    "text",
    [
        "api_reward:\n  model: m\n  votes: 3\n", "reward:\n  api:\n    model: m\n    votes: 3\n",
        "reward.api: {model: m, votes: '3'}\n", "api:\n  model: m\n  votes: 3\n",
    ],
)  # fmt: skip
def test_a_judge_in_a_file_is_on(text: str) -> None:
    resolved = settle(text)
    api = resolved.config.reward.api
    assert (api.enable, api.model, api.votes) == (True, "m", 3)
    for key in ("enable", "model", "votes"):
        assert resolved.origins[f"reward.api.{key}"].startswith("r.yaml line ")


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("api_reward: {model: m, scoring_prompt: 'Rate {response}'}", "api.scoring_prompt",
         "Rate {response}"),
        ("api_reward: {model: m, monitor: {model: n}}", "api.monitor.model", "n"),
        ("api_reward: {model: m, local: {engine_kwargs: {Deep: 1}}}", "api.local.engine_kwargs",
         {"Deep": 1}),
        ("api_reward: {model: m, enable: false}", "api.enable", False),
        ("reward_model: {path: rm, max_length: 99}", "model.max_length", 99),
        ("composite_reward: {weights: {rule: 1}}", "composite.weights", {"rule": 1}),
        ("rule: exact\nshaping: {overlong_buffer: 9}", "shaping.overlong_buffer", 9),
        ("rule: exact\ntimeout: 3", "timeout", 3.0),
        ("rule: exact", "api.enable", False),
        ("function_kwargs: {api_key: k, Deep: 1}", "function_kwargs", {"api_key": "k", "Deep": 1}),
    ],
)  # fmt: skip
def test_a_line_reaches_its_setting(text: str, key: str, value: object) -> None:
    assert value_of(settle(text).config, f"reward.{key}") == value


def test_variables_and_overrides_win_over_the_file() -> None:
    text = "api_reward: {model: a, votes: 2, type: openai}\n"
    resolved = settle(text, "reward.api.votes=3", env={"PPO_RM_MODEL": "b"})
    api = resolved.config.reward.api
    assert (api.model, api.votes, api.type) == ("b", 3, "openai")
    assert resolved.origins["reward.api.model"] == "env PPO_RM_MODEL"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml: the file is empty"),
        ("{}\n", "r.yaml: the file holds no setting"),
        ("- model\n", "found a list"),
        ("api_reward:\n", "line 1: api_reward is a group of settings"),
        ("reward: {api: {}}\n", "line 1: reward.api is a group of settings"),
        ("api_reward: {model: m, monitor: n}\n", "monitor is a group of settings"),
        ("api_reward: {modell: m}\n", "Did you mean 'model'?"),
        ("api_reward: {rm_model: m}\n", "Did you mean '"),
        ("api_rewrad: {model: m}\n", "Did you mean 'api_reward'?"),
        ("model: m\n", "write them below it"),
        ("votes: 3\n", "Did you mean 'reward.api.votes'?"),
        ("actor.clip_ratio: 0.1\n", "put it in a --config file"),
        ("config_file: x\n", "there is no setting 'config_file'"),
        ("api_reward: {model: m}\napi: {model: n}\n", "reward.api.model was set on line 1"),
        ("api_reward: {model: m, votes: many}\n", "'many' is not a number"),
        ("api_reward: {type: openai}\n", "r.yaml line 1: the judge has no model"),
        ("composite_reward:\n  judge: {weight: 1}\n", "no setting 'composite_reward.judge.weight'"),
        ("composite_reward: {judge: 0.7}\n", "Known: enable, weights, parts."),
        ("reward_model: {path: rm, colour: red}\n", "Known: path, adapter"),
        ("composite_reward: {enable: true}\n", "the mixture has no parts"),
    ],
)
def test_a_mistake_is_reported_with_its_line(text: str, message: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("r.yaml") and message in problem


def test_all_mistakes_are_reported_at_once() -> None:
    lines = problems("api_reward:\n  modl: m\n  voets: 3\n  api_key: k\n")
    assert [line.split(":")[0] for line in lines] == [f"r.yaml line {n}" for n in (2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("api_reward: {api_key: hush, model: m}\n", "API_KEY or"),
        ("api_reward: {type: claude, api-key: hush}\n", "set ANTHROPIC_API_KEY or CLAUDE_API_KEY"),
        ("OPENAI_API_KEY: hush\n", "--rm_key_env"),
        ("api_reward: {monitor: {token: hush}}\n", "reward.api.key_env"),
        ("api_reward: {api_key: {value: hush}}\n", "environment"),
        ("api_reward: {api_key: '${MINE}'}\n", "key_env: MINE"),
        ("composite: {parts: {judge: {judge: {api_key: hush}}}}\n", "environment"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(text: str, advice: str) -> None:
    (problem,) = problems(text)
    assert "keys are read from the environment only" in problem
    assert advice in problem and "hush" not in problem


def test_a_missing_file_is_reported_with_the_nearest_name() -> None:
    Path("judge.yaml").write_text("api_reward: {model: m}\n")
    with pytest.raises(ConfigError, match=r"jugde\.yaml: .* Did you mean 'judge\.yaml'"):
        settling.settle(file="jugde.yaml")
