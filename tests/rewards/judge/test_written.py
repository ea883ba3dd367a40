"""Which scale a prompt means: named ones are read, look-alikes are not."""

from __future__ import annotations

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import Scale
from ppo_cli.rewards.judge.prompt import Material, load_template
from ppo_cli.rewards.judge.rubric import Placing
from ppo_cli.rewards.judge.written import named_scale
from tests.rewards.judge.corpora import read_corpus


def test_the_scales_of_the_corpus_are_read() -> None:
    """A text without a scale leaves the default."""
    wrong = []
    for row in read_corpus("scales"):
        if row["scale"] == "unclear":
            with pytest.raises(RewardError, match=r"^here: .*--rm_scale"):
                named_scale(row["text"], "here")
        elif named_scale(row["text"], "here") != Scale(*(row["scale"] or (1, 10))):
            wrong.append(row)
    assert wrong == []


def test_the_setting_wins() -> None:
    api = ApiReward(scoring_prompt="{response} Score 1-10, or score 0-100", scale="0-4")
    assert load_template(api).scale == Scale(0, 4)
    api = ApiReward(scoring_prompt="{response} Score 0-7")
    assert load_template(api).scale == Scale(0, 7)
    assert load_template(ApiReward(scoring_prompt="{response}")).scale == Scale(1, 10)
    scales = {
        "0–100": (0, 100), "1:4": (1, 4), " -5 - -1": (-5, -1), "-2--1": (-2, -1), "0 to 9": (0, 9)
    }  # fmt: skip
    for typed, ends in scales.items():
        assert load_template(ApiReward(scale=typed)).scale == Scale(*ends)


def test_another_scale_than_that_of_the_preset_is_explained() -> None:
    template = load_template(ApiReward(prompt_preset="dialogue", scale="0-5"))
    placing = Placing(2, 0, 5, template.scale.key)
    for user in (template.question(Material("p", "r"), placing=p).user for p in (None, placing)):
        assert "from 1 to 10; spread them evenly over 0 to 5" in user
        assert "from 0 (worst) to 5 (best)" in user
    same = load_template(ApiReward(prompt_preset="dialogue", scale="1-10"))
    assert "spread them" not in same.question(Material("p", "r")).user
