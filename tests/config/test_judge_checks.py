"""A judge's settings: what clashes, which key is missing, what is only remarked on."""

from __future__ import annotations

import datetime

import pytest

from ppo_cli.config.models.known_models import JUDGES, shutdown_date
from ppo_cli.config.schema.keys import table
from ppo_cli.config.schema.run import Config
from ppo_cli.planning.findings.rewards import judge_remarks, missing_keys
from ppo_cli.planning.resolved import Resolved
from tests.config import settling
from tests.config.settling import remarks

TODAY = datetime.date(2026, 11, 21)


def judged(*overrides: str) -> list[str]:
    """Overrides for a judge; `given` are settings below reward.api, or whole keys."""
    full = [g if g.startswith("reward.") else f"reward.api.{g}" for g in overrides]
    return ["reward.api.enable=true", "reward.api.model=m", *full]


def settle(*overrides: str) -> Resolved:
    return settling.settle(*judged(*overrides))


def config(*overrides: str) -> Config:
    return settle(*overrides).config


def test_a_judge_that_is_off_clashes_with_nothing() -> None:
    resolved = settle("enable=false", "price_input=1", "model=null", "reward.rule=exact").config
    assert (resolved.reward.api.enable, resolved.reward.rule) == (False, "exact")


@pytest.mark.parametrize(
    ("overrides", "variables"),
    [
        ("type=dashscope", "DASHSCOPE_API_KEY"),
        ("type=openai", "OPENAI_API_KEY"),
        ("type=gemini", "GEMINI_API_KEY GOOGLE_API_KEY"),
        ("type=claude", "ANTHROPIC_API_KEY CLAUDE_API_KEY"),
        ("type=claude base_url=http://h/v1", "ANTHROPIC_API_KEY CLAUDE_API_KEY"),
        ("type=openai key_env=MINE", "MINE"),
        ("type=openai base_url=http://h/v1 key_env=MINE", "MINE"),
    ],
)
def test_a_missing_key_is_told_by_its_variables(overrides: str, variables: str) -> None:
    settings = config(*overrides.split())
    (message,) = missing_keys(settings.reward, {})
    assert all(name in message for name in variables.split())
    assert missing_keys(settings.reward, dict.fromkeys(variables.split(), "  ")) == [message]
    for name in variables.split():
        assert missing_keys(settings.reward, {name: "k"}) == []


def test_a_server_of_ones_own_needs_no_key() -> None:
    assert missing_keys(config("type=openai", "base_url=http://h/v1").reward, {}) == []
    assert missing_keys(config("type=openai").reward, {"OPENAI_BASE_URL": "http://h/v1"}) == []
    assert missing_keys(config("type=gemini").reward, {"OPENAI_BASE_URL": "http://h/v1"})


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ("place=line", "piece_batch"), ("place=line reward.api.enable=false", "gae"),
        ("place=line rollout.n=4", "piece_group"),
        ("place=criterion rubric=extra_info.r rollout.n=4", "piece_grpo"),
        ("place=turn rollout.n=4 environment.mcp=[x] environment.history=split", "gae"),
    ],
)  # fmt: skip
def test_the_estimator_fits_the_places(overrides: str, name: str) -> None:
    full = [o if "." in o.split("=")[0] else f"reward.api.{o}" for o in overrides.split()]
    settings = settling.settle("reward.api.enable=true", "reward.api.model=m", *full).config
    assert settings.algorithm.adv_estimator == name


def test_the_monitor_needs_its_own_key() -> None:
    settings = config("monitor.model=n", "monitor.type=claude")
    (message,) = missing_keys(settings.reward, {"DASHSCOPE_API_KEY": "k"})
    assert "monitoring judge" in message and "CLAUDE_API_KEY" in message
    assert missing_keys(settings.reward, {"DASHSCOPE_API_KEY": "k", "CLAUDE_API_KEY": "l"}) == []


def judge_remarks_of(overrides: str) -> list[str]:
    settings = config(*overrides.split())
    estimator, plays = settings.algorithm.adv_estimator, settings.environment.is_set
    return judge_remarks(settings.reward, estimator, plays=plays, today=TODAY)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("type=gemini model=gemini-1.5-flash", "has shut gemini-1.5-flash down on 24 Sep 2025"),
        ("type=openai model=gpt-4o-mini", "shuts gpt-4o-mini down on 14 Jan 2027"),
        ("type=claude model=claude-3-haiku-20240307", "20 Apr 2026"),
        ("model=qwen-max", "13 Jul 2026"),
        ("monitor.model=gpt-4o", "14 Jan 2027"),
        ("type=gemini model=gemini-2.5-flash", "1 Dec 2026"),
        ("votes=3 temperature=0", "leave --rm_temperature out"),
        ("place=turn", "use sentence, line or step"),
    ],
)
def test_what_may_surprise_is_remarked_on(overrides: str, message: str) -> None:
    (remark,) = judge_remarks_of(overrides)
    assert message in remark


@pytest.mark.parametrize(
    "overrides",
    [
        "model=qwen-plus", "type=gemini model=gemini-2.5-flash-lite",
        "type=openai model=gpt-4o-mini base_url=http://h/v1", "votes=3", "temperature=0",
    ],
)  # fmt: skip
def test_what_is_fine_is_not(overrides: str) -> None:
    assert judge_remarks_of(overrides) == []


@pytest.mark.parametrize(
    ("provider", "model", "day"),
    [
        ("openai", "gpt-4o-mini-2024-07-18", "2027-01-14"),
        ("openai", "gpt-4o-2024-05-13", "2026-10-23"),
        ("openai", "gpt-5-mini", "2026-12-11"),
        ("openai", "gpt-5.6-luna", None),
        ("openai", "gpt-5.4-mini", None),
        ("gemini", "gemini-2.5-flash-preview", "2026-12-01"),
        ("gemini", "gemini-2.5-flash-lite-001", None),
        ("claude", "claude-opus-4-20250514", "2026-06-15"),
        ("claude", "claude-opus-4-8", None),
        ("claude", "claude-opus-4-5-20251101", "2027-01-22"),
        ("dashscope", "qwen3-max", "2026-10-10"),
        ("dashscope", "qwen3-max-2026-01-23", None),
        ("dashscope", "qwen3.6-plus", None),
        ("dashscope", "gpt-4o", None),
    ],
)
def test_a_name_is_found_with_its_versions(provider: str, model: str, day: str | None) -> None:
    known_day = shutdown_date(provider, model)
    assert (known_day and known_day.isoformat()) == day


def test_remarks_reach_the_screen() -> None:
    (message,) = remarks(settle("type=gemini", "model=gemini-1.5-pro"))
    assert "gemini-1.5-pro" in message


def test_the_tables_know_every_provider_and_no_example_is_retired() -> None:
    providers = set(table()["reward.api.type"].choices)
    assert providers == set(JUDGES)
    assert [name for name, api in JUDGES.items() if shutdown_date(name, api.example)] == []
