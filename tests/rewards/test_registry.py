"""From settings to a reward, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.errors import MissingPart, RewardError
from ppo_cli.rewards.base import Reward

Build = Callable[..., Reward]


def test_rules_are_the_default(build: Build) -> None:
    assert build({"openai/gsm8k"}).name == "rule"


def test_unknown_sources_stop_rules_but_not_one_rule_for_all(build: Build) -> None:
    with pytest.raises(RewardError, match="No rule for data_source 'mine'"):
        build({"mine"})
    assert build({"mine"}, rule="exact").name == "rule"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": {"path": "some/model"}}, "reward model"),
        ({"parts": ("judge:0.5", "rule:0.5")}, "mixture"),
    ],
)
def test_what_is_not_there_yet_says_so(build: Build, settings: Any, words: str) -> None:
    with pytest.raises(MissingPart, match=rf"{words}.* not part of this version; use"):
        build({"openai/gsm8k"}, **settings)


def test_a_function_and_a_rule_together_are_refused(build: Build) -> None:
    with pytest.raises(RewardError, match="both set"):
        build(function="f.py", rule="exact")


def test_an_unknown_rule_is_refused(build: Build) -> None:
    with pytest.raises(RewardError, match="Did you mean 'exact'"):
        build(rule="exakt")


def test_settings_of_a_rule(build: Build) -> None:
    assert build(rule="length", function_kwargs={"max_chars": 10}).name == "rule"
    with pytest.raises(RewardError, match=r"has no such setting. Did you mean 'max_chars'"):
        build(rule="length", function_kwargs={"max_char": 10})
    with pytest.raises(RewardError, match="neither is set"):
        build({"length"}, function_kwargs={"max_chars": 10})
