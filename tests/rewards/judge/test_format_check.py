"""Questions with known answers at the start: who passes them, and what is said of who does not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ppo_cli.config.mixture import MixPart
from ppo_cli.records import Prompt
from ppo_cli.rewards.judge.compare import CompareReward
from ppo_cli.rewards.judge.prompt import load_template
from ppo_cli.rewards.judge.reward import JudgeReward
from ppo_cli.rewards.mixture import CompositeReward
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
    cases_by_text = {case.material.response.strip(): case for case in cases}
    case = cases_by_text.get((response or "").strip())
    if case is None:
        return 10
    return case.at_least if case.at_least is not None else case.at_most or 1


def grade_right(system: str, user: str) -> str:
    """Decides each criterion by the one that it is known by."""
    answers = {"number": 3, "colour": True, "insults": True, "price": False}
    verdicts: dict[str, Any] = {}
    for key, name in verdict_keys(user).items():
        text = re.search(rf"^{key}: (.*)$", user, re.M)[1]  # type: ignore[index]
        value = next((value for word, value in answers.items() if word in text), True)
        verdicts[key] = {"reason": "So.", name: value}
    return json.dumps(verdicts)


def compare_right(system: str, user: str) -> str:
    """Prefers a 4."""
    first, second = (fenced(f"response-R{i}", user) for i in (1, 2))
    better = "tie" if first == second else "R1" if first == "4" else "R2"
    return json.dumps({"reason": "So.", "better_response": better})


def started(reward: JudgeReward) -> list[str]:
    notes: list[str] = []
    reward.start([ROW], tell=notes.append)
    return notes


def turned(text: str) -> str:
    """The verdicts of a judge that means the opposite of what it writes."""
    swaps = {"true": "false", "false": "true", '"R1"': '"R2"', '"R2"': '"R1"'}
    return re.sub("|".join(swaps), lambda word: swaps[word[0]], text)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("kind", ["scores", "criteria", "comparisons"])
def test_a_judge_that_means_its_verdicts_passes_and_any_other_is_reported(
    judge_of: Make, server: JudgeServer, tmp_path: Any, kind: str, follows: bool
) -> None:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    right, settings = {
        "scores": (score_right, {"prompt_preset": "math"}),
        "criteria": (grade_right, {"rubric": str(tmp_path / "rubric.yaml")}),
        "comparisons": (
            compare_right, {"kind": CompareReward, "mode": "compare", "compare": "ground_truth"}
        ),
    }[kind]  # fmt: skip

    def opposite(system: str, user: str) -> Any:
        return 11 - score_right(system, user) if kind == "scores" else turned(right(system, user))

    server.score = right if follows else opposite
    (note,) = started(judge_of(**settings, canary_every=50))
    count = 1 if kind == "criteria" else 2
    assert bool(re.search(PASSED.format(count), note)) is follows
    warning = f"Warning: the judge judge-1 (openai) answers only 0 of {count} questions"
    assert (note.startswith(warning) and "ppo reward calibrate" in note) is not follows


def test_the_answers_are_cached_and_a_prompt_without_cases_is_not_checked(
    judge_of: Make, server: JudgeServer
) -> None:
    server.score = score_right
    for _ in range(2):
        (note,) = started(judge_of(prompt_preset="math", canary_every=50))
        assert re.search(PASSED.format(2), note) and server.count == 3
    scoring = "Q {prompt}\nA {response}\nScore 1-10"
    assert started(judge_of(scoring_prompt=scoring, canary_every=50)) == []
    assert server.count == 4
    server.score = lambda s, u: right if (right := score_right(s, u)) > 5 else "I cannot say."
    (note,) = started(judge_of(prompt_preset="math", canary_every=50, cache="off"))
    assert "only 1 of 2 questions" in note and "I cannot say." in note


@pytest.mark.slow
def test_a_judge_that_goes_away_during_the_checks_is_named_at_once(
    judge_of: Make, server: JudgeServer
) -> None:
    server.score = score_right
    server.fail("cut", times=9, after=1)
    notes = started(judge_of(prompt_preset="math", canary_every=1, cache="off"))
    outages = [note for note in notes if "does not answer" in note]
    assert (
        len(outages) == 1 and "trying again in" in outages[0] and "for up to 30 min" in outages[0]
    )
    assert re.search(PASSED.format(2), notes[-1])


FEATURES = ("length", "emoji", "politeness", "lists", "digits")


@pytest.mark.parametrize(
    ("levels", "wishes"),
    [
        ((0, 1, 2, 1, 1), {"length": -1, "politeness": 1}),
        ((1, 1, 1, 1, 1), {}),
        ((2, 2, 2, 0, 1), None),  # it says yes to everything
        ((2, 3, 1, 1, 1), None),
        ((), None),
    ],
)
def test_a_judge_says_which_features_a_prompt_asks_for(
    judge_of: Make, server: JudgeServer, levels: tuple[int, ...], wishes: dict[str, int] | None
) -> None:
    verdicts = {
        f"c{number}": {"reason": "So.", "level_0_to_2": level}
        for number, level in enumerate(levels, start=1)
    }
    seen: list[str | None] = []

    def answer(system: str, user: str) -> str:
        seen.append(fenced("response", user))
        return json.dumps(verdicts)

    server.score = answer
    # One judge of a mixture is asked, and once: its answer is in the cache.
    others = judge_of(name="quiet", model="m"), judge_of(name="last", model="n", canary_every=1)
    parts = others[0], judge_of(canary_every=1), others[1]
    judge = CompositeReward([(MixPart(name=part.name, kind="judge"), part) for part in parts])
    for _ in range(2):
        notes: list[str] = []
        read = judge.read_wishes("Seid knapp und nett.", FEATURES, notes.append)
        assert read == (wishes or {}) and bool(notes) is (wishes != {})
    judge.close()
    assert set(seen) == {"Seid knapp und nett."} and (wishes is None or len(seen) == 1)
