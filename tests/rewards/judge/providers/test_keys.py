"""Keys are found, cleaned, and never shown."""

from __future__ import annotations

import pytest

from ppo_cli.config.models.known_models import JUDGES
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.providers import NO_KEY, build_provider, read_api_key
from tests.judge_server.asking import judge_api


@pytest.mark.parametrize(
    ("kind", "variable"),
    [(kind, variable) for kind, api in JUDGES.items() for variable in api.keys],
)
def test_every_variable_is_read(kind: str, variable: str) -> None:
    key = read_api_key(kind, {variable: "secret-key"})
    assert (key.value, key.variable) == ("secret-key", variable)
    assert "secret-key" not in repr(key)


@pytest.mark.parametrize("kind", ["gemini", "claude"])
def test_the_first_variable_wins_and_a_blank_one_is_missing(kind: str) -> None:
    first, second = JUDGES[kind].keys
    assert read_api_key(kind, {second: "b", first: "a"}).value == "a"
    assert read_api_key(kind, {second: "b", first: " \n"}).value == "b"


@pytest.mark.parametrize("kind", [kind for kind, api in JUDGES.items() if api.keys])
def test_a_missing_key_is_asked_for_by_name(kind: str) -> None:
    with pytest.raises(RewardError) as caught:
        read_api_key(kind, {})
    for variable in JUDGES[kind].keys:
        assert variable in str(caught.value)
    assert f"export {JUDGES[kind].keys[0]}=" in str(caught.value)


def test_another_variable_takes_the_place_of_the_usual_ones() -> None:
    environ = {"OPENAI_API_KEY": "usual", "MY_KEY": "mine"}
    assert read_api_key("openai", environ, key_env="MY_KEY").value == "mine"
    with pytest.raises(RewardError, match="OTHER_KEY is not set"):
        read_api_key("openai", environ, key_env="OTHER_KEY", optional=True)


def test_blanks_around_a_key_are_dropped() -> None:
    assert read_api_key("openai", {"OPENAI_API_KEY": "  sk-abc\r\n"}).value == "sk-abc"


@pytest.mark.parametrize("mangled", ["sk-“abc”", "sk-äbc", "sk-abc def", "sk-abc\ndef", "a\x00b"])
def test_a_mangled_key_is_told_without_showing_it(mangled: str) -> None:
    with pytest.raises(RewardError, match="OPENAI_API_KEY") as caught:
        read_api_key("openai", {"OPENAI_API_KEY": mangled})
    assert "abc" not in str(caught.value)


def test_a_server_of_ones_own_needs_no_key() -> None:
    provider = build_provider(judge_api("openai", "m", "http://localhost:8000"), environ={})
    assert provider._key.value == NO_KEY
    with pytest.raises(RewardError, match="OPENAI_API_KEY"):
        build_provider(judge_api("openai", "m"), environ={})
    with pytest.raises(RewardError, match="ANTHROPIC_API_KEY or CLAUDE_API_KEY"):
        build_provider(judge_api("claude", "m", "http://localhost:8000"), environ={})
