"""Under a budget a judge is not asked whose calls may cost anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.errors import EXIT_RESUMABLE, RewardError
from ppo_cli.rewards.judge.calls import UnlimitedCost
from ppo_cli.rewards.judge.reward import JudgeReward
from tests.judge_server import JudgeServer
from tests.rewards.scoring import score_all, sum_prompt, sum_rollout

Build = Callable[..., JudgeReward]
LENGTHS = {
    "openai": ("max_tokens", "max_completion_tokens"),
    "gemini": ("maxOutputTokens",),
    "dashscope": ("max_tokens",),
}


def reject_length(server: JudgeServer, wire: str) -> None:
    for name in LENGTHS[wire]:
        server.fail("reject_param", param=name)


@pytest.mark.parametrize("wire", LENGTHS)
@pytest.mark.parametrize("budget", [{"budget_tokens": 10**6}, {"budget_usd": 5.0}])
def test_a_judge_without_a_token_limit_is_refused_at_the_start(
    server: JudgeServer, judge_of: Build, wire: str, budget: dict[str, Any]
) -> None:
    reject_length(server, wire)
    reward = judge_of(wire, price_input=1.0, price_output=1.0, **budget)
    with pytest.raises(RewardError, match=r"takes no limit.*--rm_model.*without a budget"):
        reward.start([sum_prompt(1)])
    assert server.state.answered == 0


def test_without_a_budget_it_is_asked(server: JudgeServer, judge_of: Build) -> None:
    reject_length(server, "openai")
    reward = judge_of("openai")
    reward.start([sum_prompt(1)])
    assert score_all(reward, [sum_rollout(1)])[0].value is not None


def test_a_limit_that_is_rejected_later_stops_the_run(server: JudgeServer, judge_of: Build) -> None:
    reward = judge_of("openai", budget_tokens=10**6)
    reward.start([sum_prompt(1)])
    score_all(reward, [sum_rollout(1)])
    reject_length(server, "openai")
    answered = server.state.answered
    with pytest.raises(UnlimitedCost) as stopped:
        score_all(reward, [sum_rollout(2)])
    assert stopped.value.exit_code == EXIT_RESUMABLE
    assert server.state.answered == answered


def test_a_refusal_that_names_nothing_costs_the_limit_last(
    server: JudgeServer, judge_of: Build
) -> None:
    server.fail(400, said="'role': 'system'", message="Bad request.")
    reward = judge_of("openai", budget_tokens=10**6)
    reward.start([sum_prompt(1)])
    assert score_all(reward, [sum_rollout(1)])[0].value is not None


def test_a_judge_that_writes_more_than_its_limit_is_refused_at_the_start(
    server: JudgeServer, judge_of: Build
) -> None:
    server.score = lambda *_: '{"reason": "' + "so long " * 200 + '", "score": 7}'
    reward = judge_of("openai", budget_tokens=10**6, max_tokens=100)
    with pytest.raises(RewardError, match=r"does not keep to the limit.*--rm_max_tokens"):
        reward.start([sum_prompt(1)])
    assert server.count == 1
