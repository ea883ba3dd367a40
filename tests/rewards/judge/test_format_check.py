"""Questions with known answers at the start: who passes them, and what is said of who does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.records import Prompt
from ppo_cli.rewards.judge.compare import CompareReward
from ppo_cli.rewards.judge.prompt import load_template
from ppo_cli.rewards.judge.reward import JudgeReward
from tests.judge_server import JudgeServer, verdict_keys
from tests.judge_server.asking import judge_api
from tests.judge_server.wire import fenced

Make = Callable[..., JudgeReward]
PASSED = r"answers {0} of {0} questions with a known answer right\.$"
ROW = Prompt("1", "What is 1 + 1?", (), "", (1,), ground_truth="2")
RUBRIC = "- {text: The response is right.}\n"


def score_right(system: str, user: str) -> int:
    """Knows the worked cases of the prompt."""
    cases = load_template(judge_api("openai", prompt_preset="math")).cases
    response = fenced("response", user)
    known = {case.material.response.strip(): case for case in cases}
    case = known.get((response or "").strip())
    if case is None:
        return 10
    return case.at_least if case.at_least is not None else case.at_most or 1


def grade_right(system: str, user: str) -> str:
    """Decides each criterion by the one that it is known by."""
    answers = {"number": 3, "colour": True, "insults": True, "price": False}
    verdicts: dict[str, Any] = {}
    for key, name in verdict_keys(user).items():
        text = re.search(rf"^{key}: (.*)$", user, re.M)[1]  # type: ignore[index]
        known = next((value for word, value in answers.items() if word in text), True)
        verdicts[key] = {"reason": "So.", name: known}
    return json.dumps(verdicts)


def compare_right(system: str, user: str) -> str:
    """Prefers a 4."""
    first, second = (fenced(f"response-R{i}", user) for i in (1, 2))
    better = "tie" if first == second else "R1" if first == "4" else "R2"
    return json.dumps({"reason": "So.", "better_response": better})


def started(reward: JudgeReward) -> list[str]:
    said: list[str] = []
    reward.start([ROW], tell=said.append)
    return said


def turned(text: str) -> str:
    """The verdicts of a judge that means the opposite of what it writes."""
    swaps = {"true": "false", "false": "true", '"R1"': '"R2"', '"R2"': '"R1"'}
    return re.sub("|".join(swaps), lambda word: swaps[word[0]], text)


def test_a_judge_that_follows_the_form_of_scores_passes(
    judge_of: Make, server: JudgeServer
) -> None:
    server.score = score_right
    reward = judge_of(prompt_preset="math", canary_every=50)
    (said,) = started(reward)
    assert re.search(PASSED.format(2), said)
    assert server.count == 3


def test_a_judge_that_turns_the_scale_round_is_reported(
    judge_of: Make, server: JudgeServer
) -> None:
    server.score = lambda system, user: 11 - score_right(system, user)
    (said,) = started(judge_of(prompt_preset="math", canary_every=50))
    assert said.startswith("Warning: the judge judge-1 (openai) answers only 0 of 2 questions")
    assert "ppo reward calibrate" in said


@pytest.mark.parametrize("follows", [True, False])
def test_faults_and_criteria_are_told_apart(
    judge_of: Make, server: JudgeServer, tmp_path: Any, follows: bool
) -> None:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    server.score = grade_right if follows else lambda s, u: turned(grade_right(s, u))
    reward = judge_of(rubric=str(tmp_path / "rubric.yaml"), canary_every=50)
    (said,) = started(reward)
    assert bool(re.search(PASSED.format(1), said)) is follows
    assert ("answers only 0 of 1" in said) is not follows


@pytest.mark.parametrize("follows", [True, False])
def test_the_better_response_is_told_from_the_worse(
    judge_of: Make, server: JudgeServer, follows: bool
) -> None:
    server.score = compare_right if follows else lambda s, u: turned(compare_right(s, u))
    reward = judge_of(kind=CompareReward, mode="compare", compare="ground_truth", canary_every=50)
    (said,) = started(reward)
    assert bool(re.search(PASSED.format(2), said)) is follows
    assert ("answers only 0 of 2" in said) is not follows


def test_the_answers_are_cached_and_counted_in_the_budget(
    judge_of: Make, server: JudgeServer
) -> None:
    server.score = score_right
    settings = {"prompt_preset": "math", "canary_every": 50}
    started(judge_of(**settings))
    assert server.count == 3
    (said,) = started(judge_of(**settings))
    assert re.search(PASSED.format(2), said)
    assert server.count == 3


def test_a_prompt_without_worked_cases_is_not_checked(judge_of: Make, server: JudgeServer) -> None:
    scoring = "Q {prompt}\nA {response}\nScore 1-10"
    assert started(judge_of(scoring_prompt=scoring, canary_every=50)) == []
    assert server.count == 1
