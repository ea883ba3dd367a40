"""Which scale a prompt means: named ones are read, look-alikes are not."""

from __future__ import annotations

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import Scale
from ppo_cli.rewards.judge.prompt import Material, load_template
from ppo_cli.rewards.judge.written import named_scale

NAMED = {
    (1, 10): [
        "Score 1-10", "Score 1 to 10!",
        "Score 1-10. 1-3 points: bad; 4-6 points: fair; 7-10 points: good",
    ],
    (1, 7): [
        "Score 1–7.", "Rate it on a scale of 1 – 7",
        "Give a score on a scale from 1 to 7, where 7 is best.",
        "Score 1-7. Reply in 1-2 sentences.",
    ],
    (0, 100): ["Score: 0~100", "打分 0~100"],
    (1, 5): [
        "Score (1-5):", "Rate the helpfulness of the response from 1 to 5.", "a 1-5 scale",
        "Give it 1-5 stars", "请打分：1-5", "评分(1-5分)", "Score out of 5",
    ],
    (0, 10): ["Score [0, 10]"],
    (0, 3): ["Score the answer 0 to 3"],
    (0, 1): ["Score 0-1"],
    (1, 6): ["Score 1 (worst) to 6 (best)"],
    (-5, 5): ["Score -5 to 5"],
    (1, 4): ["Score between 1 and 4"],
    (0, 5): [
        "Rate {response} from 0 to 5", "from 0 to 5", "从0到5打分",
        "Rate 0-5. Say again: score 0-5.",
    ],
    (0, 20): ["Grade as an integer in the range 0-20."],
    (1, 100): ["Return a number from 1 to 100", "Write X/100"],
    (1, 9): ["Please give an integer between 1 and 9"],
}  # fmt: skip


def test_a_named_scale_is_read() -> None:
    read = {ends: [named_scale(text, "here") for text in NAMED[ends]] for ends in NAMED}
    assert read == {ends: [Scale(*ends)] * len(NAMED[ends]) for ends in NAMED}


NOT_NAMED = [
    "Score the response.", "Answer in 1-2 sentences.",
    "Score it; give your reason in 2-3 sentences.", "Write 1-2 sentences, then score.",
    "Rate how well it covers chapters 1-3", "Score the essay on pages 10-12",
    "Score 2019-2021 papers", "Rate 2-3 paragraphs at a time",
    "The story takes place from 9 to 5.", "Is the number between 1 and 100?",
    "Score by criteria 1-4 of the list", "In steps 1 to 3 the response explains, then score it",
    "Score: X/10", "Score out of 10", "half (1/2) of the score", "HTTP/2-3", "",
]  # fmt: skip


def test_what_is_no_scale_leaves_the_default() -> None:
    assert [text for text in NOT_NAMED if named_scale(text, "here") != Scale(1, 10)] == []


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


def test_the_setting_wins() -> None:
    api = ApiReward(scoring_prompt="{response} Score 1-10, or score 0-100", scale="0-4")
    assert load_template(api).scale == Scale(0, 4)
    api = ApiReward(scoring_prompt="{response} Score 0-7")
    assert load_template(api).scale == Scale(0, 7)
    assert load_template(ApiReward(scoring_prompt="{response}")).scale == Scale(1, 10)
    for typed, ends in (("0–100", (0, 100)), ("1:4", (1, 4)), (" -5 - -1", (-5, -1))):
        assert load_template(ApiReward(scale=typed)).scale == Scale(*ends)


def test_another_scale_than_that_of_the_preset_is_explained() -> None:
    template = load_template(ApiReward(prompt_preset="dialogue", scale="0-5"))
    user = template.question(Material("p", "r")).user
    assert "from 1 to 10; spread them evenly over 0 to 5" in user
    assert "from 0 (worst) to 5 (best)" in user
    same = load_template(ApiReward(prompt_preset="dialogue", scale="1-10"))
    assert "spread them" not in same.question(Material("p", "r")).user
