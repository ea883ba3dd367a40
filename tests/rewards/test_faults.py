"""Where a response goes wrong: equations that do not hold, and what is placed there."""

from __future__ import annotations

import time

import pytest

from ppo_cli.config.schema.reward import Reward as Settings
from ppo_cli.errors import RewardError
from ppo_cli.records import Score
from ppo_cli.rewards.faults import find_raising_line, find_wrong_equation, place_loss
from ppo_cli.rewards.rule_reward import RuleReward
from ppo_cli.rewards.rules import RULES, check_places
from tests.rewards.scoring import make_rollout

ZERO = Score(0.0)
# A text, and the equation in it that does not hold; "" if none is certainly wrong.
EQUATIONS = [
    ("She has 3*4 = 13 eggs.", "3*4 = 13"),
    ("3 + 4 = 7, so 7 * 2 = 15.", "7 * 2 = 15"),
    ("48/2 = <<48/2=24>>24 clips, 48+24 = <<48+24=71>>71", "48+24=71"),
    ("It costs $5 x 3 = $16.", "$5 x 3 = $16"),
    (r"\(12 \times 3 = 35\)", r"12 \times 3 = 35"),
    ("12 × 3 − 1 = 36", "12 × 3 − 1 = 36"),
    ("(2 + 3) * 4 = 24", "(2 + 3) * 4 = 24"),
    ("(3*4 = 13)", "3*4 = 13"),
    ("1,200 - 200 = 900", "1,200 - 200 = 900"),
    ("Step 1: 2+2 = 5", "2+2 = 5"),
    ("1. 2+2 = 5", "2+2 = 5"),
    ("2) 2+2 = 5", "2+2 = 5"),
    ("- 2+2 = 5", "2+2 = 5"),
    ("x = 2 * 3 = 7", "2 * 3 = 7"),
    ("5 - 8 = 4", "5 - 8 = 4"),
    ("a total of 25+8 = 38", "25+8 = 38"),
    ("0.5 * 3 = 2.6", "0.5 * 3 = 2.6"),
    ("7 / 2 = 4.5", "7 / 2 = 4.5"),
    # They hold, also rounded, or in other units.
    ("3*4 = 12 and 2+2=4", ""),
    ("10 / 3 = 3.33", ""),
    ("10 / 3 = 3.34", ""),
    ("17 / 5 = 3", ""),
    ("0.333 * 3 = 1", ""),
    ("5 - 8 = -3", ""),
    ("25 * 4 = $1", ""),
    ("$1.50 - $1.20 = 30 cents", ""),
    ("2020-2024 = 4 years", ""),
    # Parts of something else, or meant in another way.
    ("√16 + 2 = 6", ""),
    ("45 + 45 = 1.5 hours", ""),
    ("$0.25 * 4 = 100 cents", ""),
    ("12/48 = 25 percent", ""),
    ("2 * 500000 = 1 million", ""),
    ("30 + 30 = 1 小时", ""),
    ("We get 0 + 2 = 5, which is impossible.", ""),
    ("Is 7 * 8 = 54?", ""),
    ("If 2 + 2 = 5, then", ""),
    ("x · 3 + 2 = 8", ""),
    ("3 + 4 = 8\n- 1 = 7", ""),
    ("Step 2 - 3 * 4 = 12", ""),
    ("twice 3 + 1 = 7", ""),
    ("0.1 + 0.2 = 0.30000000000000004", ""),
    ("log 100 + 1 = 3", ""),
    ("1 + 1 = 10 in binary", ""),
    ("12 + 12 = 0 on the clock", ""),
    ("1.000 + 1 = 1.001", ""),
    ("x * 3 * 4 = 13", ""),
    ("2x + 3 = 13", ""),
    ("a3*4 = 13", ""),
    ("n + 3*4 = 13", ""),
    ("2 x + 3*4 = 13", ""),
    ("9:30 + 2 = 9:32", ""),
    ("5^2 - 3 = 21", ""),
    ("3*4 = 13x", ""),
    ("3 + 4 = 7 * 2 = 14", ""),
    ("3 + 4 = 7 x 2 = 14", ""),
    ("3 1/2 + 1 = 4 1/2", ""),
    ("1 and 1/4 + 1 = 2", ""),
    ("20% of 5 + 4 = 5", ""),
    ("60 / 3/4 = 80", ""),
    ("1/2 + 1/2 = 100%", ""),
    ("3/5 = 6/10", ""),
    ("7 + 5 = 2 (mod 10)", ""),
    ("10 + 1 = 11 in base 2, 1 + 1 = 10 in base 2", ""),
    ("3,5 + 1 = 4", ""),
    ("2**3 = 9", ""),
    ("1/0 = 5", ""),
    ("3 * 4 = 13 is wrong", ""),
    ("It isn't 3 * 4 = 13", ""),
    ("3 * 4 != 13", ""),
    ("3 * 4 >= 13", ""),
    ("2020-01-01 is a day", ""),
    ("1 + 1 = " + "9" * 5000, ""),
    ("1 + 1 = 2." + "9" * 5000, ""),
    ("9" * 5000 + " + 1 = 2", ""),
    ("1.5 + 1. = 4", "1.5 + 1. = 4"),
    ("٣ + ٤ = ٨", ""),
]


@pytest.mark.parametrize(("text", "wrong"), EQUATIONS)
def test_only_an_equation_that_is_certainly_wrong_is_found(text: str, wrong: str) -> None:
    span = find_wrong_equation(text, ZERO)
    assert (span and text[slice(*span)]) == (wrong or None)


@pytest.mark.parametrize(
    "text",
    [
        "1 ",
        "1=1",
        "(",
        "(1+1)*",
        "1+1=2 ",
        "1+1=3; not ",
        "1+1=3 km" + " " * 9,
        "$",
        "1/1/",
        ".",
        "=",
        "- 1x",
    ],
)
def test_long_texts_are_read_in_linear_time(text: str) -> None:
    started = time.process_time()
    find_wrong_equation(text * 20_000, ZERO)
    assert time.process_time() - started < 5


def test_a_line_that_occurs_twice_is_no_certain_place() -> None:
    score = Score(0.0, info={"line": "return 1 / n"})
    once = "def f(n):\n    return 1 / n\n"
    assert find_raising_line(once, score) == (10, 26)
    assert find_raising_line(once.replace("\n", "\r\n"), score) == (11, 28)
    assert find_raising_line(once + once, score) is None
    assert find_raising_line(once, ZERO) is None


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        # Of three pieces the second one loses 1 - 0.25.
        ((3, 6), [(3, 1 / 3), (6, 1 / 3 - 0.75), (9, 1 / 3)]),
        ((0, 3), [(3, 0.5 - 0.75), (9, 0.5)]),
        ((6, 9), [(6, 0.5), (9, 0.5 - 0.75)]),
        ((0, 9), [(9, 0.25)]),
    ],
)
def test_a_fault_loses_what_the_response_lost(
    fault: tuple[int, int], places: list[tuple[int, float]]
) -> None:
    score = place_loss(Score(0.25), "aa bb cc.", fault)
    assert [step.end for step in score.steps] == [end for end, _ in places]
    assert [step.value for step in score.steps] == pytest.approx([value for _, value in places])
    assert score.value == 0.25 == pytest.approx(sum(step.value for step in score.steps))


def test_rules_place_what_is_certain_if_they_are_asked_to() -> None:
    text = "<think>2+2 = 5</think>3*4 = 13, so it is\n#### 13"
    rollout = make_rollout(text, "12")
    start, end = text.index("3*4"), text.index(", so")
    placing, plain = RuleReward(RULES["gsm8k"], place=True), RuleReward(RULES["gsm8k"])
    score = placing.submit(rollout).result()
    assert [step.end for step in score.steps] == [start, end, len(text)]
    assert score.info["fault"] == "3*4 = 13"
    assert plain.submit(rollout).result().steps == ()
    # Right, or without a certain fault.
    assert placing.submit(make_rollout("3*4 = 13\n#### 12", "12")).result().steps == ()
    assert placing.submit(make_rollout("#### 13", "12")).result().steps == ()
    # By a rule that knows of none: chosen by a row, or for all.
    exact = make_rollout("3*4 = 13", "12", "exact")
    assert RuleReward(place=True).submit(exact).result().steps == ()
    check_places([Settings(rule="exact"), Settings(rule="gsm8k")])
    check_places([Settings()])
    with pytest.raises(RewardError, match=r"no rule .* gsm8k, number"):
        check_places([Settings(rule="exact"), Settings(rule="length")])
