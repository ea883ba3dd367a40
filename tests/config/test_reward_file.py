"""A judge in a file: many spellings of one setting, and none of a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.layers import Resolved
from ppo_cli.config.schema.keys import value_of
from ppo_cli.errors import ConfigError
from tests.config import settling
from tests.config.settling import written


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settle(text: str, *overrides: str, env: dict[str, str] | None = None) -> Resolved:
    return settling.settle(*overrides, file=written(text), env=env)


def problems(text: str) -> tuple[str, ...]:
    return settling.problems(file=written(text))


@pytest.mark.parametrize(
    "text",
    [
        "reward:\n  api:\n    model: m\n    votes: 3\n",
        "reward.api.model: m\nreward.api.votes: 3\n",
        "reward.api: {model: m, votes: 3}\n",
        "api:\n  model: m\n  votes: 3\n",
        "api.model: m\napi.votes: 3\n",
        "api_reward:\n  model: m\n  votes: 3\n",
        "api_reward_config: {model: m, votes: '3'}\n",
        "api_reward: {rm_model: m, num_votes: 3}\n",
        "reward: {api_reward: {rm_model: m, rm_votes: 3}}\n",
        "model: m\nvotes: 3\n",
        "rm_model: m\nrm_votes: 3\n",
        "--rm-model: m\nRM_VOTES: 3\n",
        "reward: {model: m, rm_votes: 3}\n",
        "use_api_reward: true\nmodel_name: m\nvotes: 3\n",
    ],
)
def test_every_spelling_sets_up_the_same_judge(text: str) -> None:
    found = settle(text)
    api = found.config.reward.api
    assert (api.enable, api.model, api.votes) == (True, "m", 3)
    for key in ("enable", "model", "votes"):
        assert found.origins[f"reward.api.{key}"].startswith("r.yaml line ")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("type: openai", "api.type", "openai"),
        ("api_type: gemini", "api.type", "gemini"),
        ("rm_api_type: claude", "api.type", "claude"),
        ("prompt: 'Rate {response}'", "api.scoring_prompt", "Rate {response}"),
        ("rm_scoring_prompt: |\n  a\n  {response}", "api.scoring_prompt", "a\n{response}"),
        ("system_prompt: Be fair.", "api.system_prompt", "Be fair."),
        ("rm_prompt_preset: math", "api.prompt_preset", "math"),
        ("max_rpm: 60", "api.max_rpm", 60),
        ("rpm: 60", "api.max_rpm", 60),
        ("tpm: 6e4", "api.max_tpm", 60_000),
        ("max_tpm: 100", "api.max_tpm", 100),
        ("max_concurrency: 8", "api.concurrency", 8),
        ("api_base: http://h/v1", "api.base_url", "http://h/v1"),
        ("api_key_env: MY_KEY", "api.key_env", "MY_KEY"),
        ("key_env: MY_KEY", "api.key_env", "MY_KEY"),
        ("timeout: 5", "api.timeout", 5.0),
        ("max_tokens: 99", "api.max_tokens", 99),
        ("budget_tokens: 99", "api.budget_tokens", 99),
        ("rm_budget_usd: 2.5", "api.budget_usd", 2.5),
        ("scale: [0, 5]", "api.scale", "0-5"),
        ("scale: 0-5", "api.scale", "0-5"),
        ("monitor: {model: n, type: claude}", "api.monitor.model", "n"),
        ("rm_monitor_model: n", "api.monitor.model", "n"),
        ("reward.timeout: 5", "timeout", 5.0),
        ("reward: {num_workers: 4}", "num_workers", 4),
        ("num_workers: 4", "num_workers", 4),
        ("function_kwargs: {api_key: k, Deep: 1}", "function_kwargs", {"api_key": "k", "Deep": 1}),
        ("api: {local: {engine_kwargs: {Deep: 1}}}", "api.local.engine_kwargs", {"Deep": 1}),
    ],
)
def test_a_line_reaches_its_setting(line: str, key: str, value: object) -> None:
    found = settle(f"rm_model: m\n{line}\n")
    assert value_of(found.config, f"reward.{key}") == value
    assert found.origins[f"reward.{key}"].startswith("r.yaml line ")


def test_a_judge_in_a_file_is_on_unless_the_file_says_no() -> None:
    assert settle("model: m\n").origins["reward.api.enable"] == "r.yaml line 1"
    assert not settle("model: m\nenable: false\n").config.reward.api.enable
    assert not settle("api: {model: m, enabled: no}\n").config.reward.api.enable
    assert not settle("model: m\n", "reward.api.enable=false").config.reward.api.enable
    assert not settle("rule: exact\nreward.timeout: 3\n").config.reward.api.enable


def test_variables_and_overrides_lie_above_the_file() -> None:
    found = settle(
        "model: a\nvotes: 2\ntype: openai\n", "reward.api.votes=3", env={"RM_MODEL": "b"}
    )
    api = found.config.reward.api
    assert (api.model, api.votes, api.type) == ("b", 3, "openai")
    assert found.origins["reward.api.model"] == "env RM_MODEL"


def test_rules_and_functions_may_stand_in_the_file() -> None:
    assert settle("rule: exact\n").config.reward.rule == "exact"
    assert settle("reward_function: f.py\n").config.reward.function == "f.py"
    assert settle("reward: {function: f.py}\n").config.reward.function == "f.py"
    with pytest.raises(ConfigError, match=r"api\.timeout or reward\.timeout"):
        settle("rule: exact\ntimeout: 3\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "r.yaml: the file is empty. Write settings such as 'api:'"),
        ("# nothing yet\n", "r.yaml: the file is empty"),
        ("{}\n", "r.yaml: the file holds no setting"),
        ("- model\n", "r.yaml: expected settings such as 'api:', found a list"),
        ("api:\n", "r.yaml line 1: api is a group of settings"),
        ("reward:\n", "r.yaml line 1: reward is a group of settings"),
        ("reward: {api: {}}\n", "r.yaml line 1: reward.api is a group of settings"),
        ("api_reward: qwen-plus\n", "r.yaml line 1: api_reward is a group of settings"),
        ("model: m\nmonitor: n\n", "r.yaml line 2: monitor is a group of settings"),
        ("model: {name: m}\n", "r.yaml line 1: model.name: reward.api.model is one value, not a"),
        ("model: m\nvoets: 3\n", "r.yaml line 2: there is no setting 'voets' of the reward. Did"),
        ("api: {modell: m}\n", "Did you mean 'model'?"),
        ("rm_modell: m\n", "Did you mean 'rm_model'?"),
        ("api_rewrad: {model: m}\n", "there is no setting 'api_rewrad.model' of the reward."),
        ("model: m\nactor.clip_ratio: 0.1\n", "put it in a --config file"),
        ("model: m\nreward_config: x\n", "there is no setting 'reward_config'"),
        ("model: m\nrm_model: n\n", "r.yaml line 2: reward.api.model was set on line 1 already"),
        ("model: m\nvotes: many\n", "r.yaml line 2: reward.api.votes: 'many' is not a number"),
        ("model: m\nvotes: 0\n", "r.yaml line 2: reward.api.votes must be at least 1"),
        ("model: [m, n]\n", "r.yaml line 1: reward.api.model: is a list, not one text"),
        ("model: m\ntype: opnai\n", "Did you mean 'openai'?"),
        ("model: m\nprompt_preset: maths\n", "Did you mean 'math'?"),
        ("model: m\ngate: maybe\n", "'maybe' is neither true nor false"),
        ("votes: 3\ntype: openai\n", "r.yaml line 1: the judge has no model"),
        ("composite_reward:\n  judge: {weight: 1}\n", "no setting 'judge' in composite_reward"),
        ("composite_reward: {judge: 0.7}\n", "Known: enable, weights, parts."),
        ("composite_reward: {wieghts: {a: 1}}\n", "Did you mean 'weights'?"),
        ("composite_reward:\n", "write them below it, such as weights: {judge: 0.7"),
        (
            "composite_reward: {parts: {}}\n",
            "composite_reward.parts is a group of settings; write them below it, such as weights",
        ),
        ("model: m\nreward: {composite_reward: []}\n", "is a group of settings"),
        ("reward_model:\n", "r.yaml line 1: reward_model is a group of settings"),
        ("shaping:\n", "such as overlong_buffer: 64"),
        ("reward_model: {pth: rm}\n", "no setting 'pth' in reward_model. Did you mean 'path'?"),
        ("reward_model: {path: rm, colour: red}\n", "Known: path, adapter"),
        ("reward_model: {enable: true}\n", "--reward_model PATH"),
        ("reward_model: {enable: false, path: rm}\n", "the reward model is off"),
        ("shaping: {overlong_bufer: 3}\n", "Did you mean 'overlong_buffer'?"),
        ("composite: {enable: true}\n", "the mixture has no parts: add --reward"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, said: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("r.yaml")
    assert said in problem


def test_everything_wrong_is_told_at_once() -> None:
    told = problems("modl: m\nvoets: 3\napi_key: k\n")
    assert [line.split(":")[0] for line in told] == [f"r.yaml line {n}" for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ("api_key: hush\nmodel: m\n", "DASHSCOPE_API_KEY or OPENAI_API_KEY or"),
        ("type: openai\napi_key: hush\n", "set OPENAI_API_KEY there"),
        ("api: {type: claude, api-key: hush}\n", "set ANTHROPIC_API_KEY or CLAUDE_API_KEY there"),
        ("api_reward: {api_type: gemini, apikey: hush}\n", "set GEMINI_API_KEY or GOOGLE_API_KEY"),
        ("OPENAI_API_KEY: hush\n", "--rm_key_env"),
        ("rm_api_key: hush\n", "--rm_key_env"),
        ("model: m\ntoken: hush\n", "reward.api.key_env"),
        ("model: m\nmonitor: {api_key: hush}\n", "reward.api.key_env"),
        ("api_key: {value: hush}\n", "environment"),
        ("model: m\napi_key: ${MINE}\n", "key_env: MINE"),
    ],
)
def test_a_secret_is_refused_and_not_repeated(text: str, mend: str) -> None:
    (problem,) = problems(text)
    assert "keys belong into the environment" in problem
    assert mend in problem
    assert "hush" not in problem


def test_a_missing_file_is_told_with_its_nearest() -> None:
    Path("judge.yaml").write_text("model: m\n")
    with pytest.raises(ConfigError, match=r"jugde\.yaml: .* Did you mean 'judge\.yaml'"):
        settling.settle(file="jugde.yaml")
