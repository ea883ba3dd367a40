"""Which scale a prompt means: named ones are read, look-alikes are not."""

from __future__ import annotations

import pytest

from ppo_cli.config.reward_schema import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import Scale
from ppo_cli.rewards.judge.prompt import Material, load_template
from ppo_cli.rewards.judge.scale_words import named_scale, parse_scale


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("Score 1-10", 1, 10),
        ("Score 1–7.", 1, 7),
        ("Score: 0~100", 0, 100),
        ("Score (1-5):", 1, 5),
        ("Score [0, 10]", 0, 10),
        ("Score 1 to 10!", 1, 10),
        ("Score the answer 0 to 3", 0, 3),
        ("Score 0-1", 0, 1),
        ("Score 1 (worst) to 6 (best)", 1, 6),
        ("Score -5 to 5", -5, 5),
        ("Score between 1 and 4", 1, 4),
        ("Rate {response} from 0 to 5", 0, 5),
        ("from 0 to 5", 0, 5),
        ("Rate the helpfulness of the response from 1 to 5.", 1, 5),
        ("Rate it on a scale of 1 – 7", 1, 7),
        ("Give a score on a scale from 1 to 7, where 7 is best.", 1, 7),
        ("a 1-5 scale", 1, 5),
        ("Give it 1-5 stars", 1, 5),
        ("Grade as an integer in the range 0-20.", 0, 20),
        ("Return a number from 1 to 100", 1, 100),
        ("Please give an integer between 1 and 9", 1, 9),
        ("打分 0~100", 0, 100),
        ("请打分：1-5", 1, 5),
        ("从0到5打分", 0, 5),
        ("评分(1-5分)", 1, 5),
        ("Score out of 5", 1, 5),
        ("Write X/100", 1, 100),
        ("Score 1-7. Reply in 1-2 sentences.", 1, 7),
        ("Score 1-10. 1-3 points: bad; 4-6 points: fair; 7-10 points: good", 1, 10),
        ("Rate 0-5. Say again: score 0-5.", 0, 5),
    ],
)
def test_a_named_scale_is_read(text: str, low: int, high: int) -> None:
    assert named_scale(text, "here") == Scale(low, high)


@pytest.mark.parametrize(
    "text",
    [
        "Score the response.",
        "Answer in 1-2 sentences.",
        "Score it; give your reason in 2-3 sentences.",
        "Write 1-2 sentences, then score.",
        "Rate how well it covers chapters 1-3",
        "Score the essay on pages 10-12",
        "Score 2019-2021 papers",
        "Rate 2-3 paragraphs at a time",
        "The story takes place from 9 to 5.",
        "Is the number between 1 and 100?",
        "Score by criteria 1-4 of the list",
        "In steps 1 to 3 the response explains, then score it",
        "Score: X/10",
        "Score out of 10",
        "half (1/2) of the score",
        "HTTP/2-3",
        "",
    ],
)
def test_what_is_no_scale_leaves_the_default(text: str) -> None:
    assert named_scale(text, "here") == Scale(1, 10)


@pytest.mark.parametrize(
    "text",
    [
        "Score clarity: score 1-5. Score truth: score 0-100.",
        "1-3 points if wrong, 4-7 if partly right, 8-10 if right",
        "Score from 0.0 to 1.0",
        "Give a score between 0 and 0.5",
    ],
)
def test_an_unclear_scale_is_asked_for(text: str) -> None:
    with pytest.raises(RewardError, match=r"^here: .*--rm_scale"):
        named_scale(text, "here")


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("1-10", (1, 10)),
        (" 0 - 5 ", (0, 5)),
        ("0–100", (0, 100)),
        ("-2-2", (-2, 2)),
        ("-5--1", (-5, -1)),
        ("1 to 7", (1, 7)),
        ("1:4", (1, 4)),
    ],
)
def test_a_setting_is_read(text: str, scale: tuple[int, int]) -> None:
    assert parse_scale(text, "--rm_scale") == Scale(*scale)


@pytest.mark.parametrize("text", ["", "10", "a-b", "1-10-20", "5-5", "10-1", "0.5-1", "0-99999"])
def test_a_wrong_setting_is_refused(text: str) -> None:
    with pytest.raises(RewardError, match="--rm_scale"):
        load_template(ApiReward(scale=text))


def test_the_setting_wins() -> None:
    api = ApiReward(scoring_prompt="{response} Score 1-10, or score 0-100", scale="0-4")
    assert load_template(api).scale == Scale(0, 4)
    api = ApiReward(scoring_prompt="{response} Score 0-7")
    assert load_template(api).scale == Scale(0, 7)
    assert load_template(ApiReward(scoring_prompt="{response}")).scale == Scale(1, 10)


def test_another_scale_than_that_of_the_preset_is_explained() -> None:
    template = load_template(ApiReward(prompt_preset="dialogue", scale="0-5"))
    user = template.question(Material("p", "r")).user
    assert "from 1 to 10; spread them evenly over 0 to 5" in user
    assert "from 0 (worst) to 5 (best)" in user
    same = load_template(ApiReward(prompt_preset="dialogue", scale="1-10"))
    assert "spread them" not in same.question(Material("p", "r")).user
