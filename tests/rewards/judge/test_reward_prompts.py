"""The bundled judge prompts: what each must say, and that its worked cases mean something."""

from __future__ import annotations

import re

import pytest

from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.errors import RewardError
from ppo_cli.rewards.judge.calls import Scale
from ppo_cli.rewards.judge.prompt import load_preset, load_template, preset_names
from ppo_cli.rewards.judge.sanitise import no_content_reason

NAMES = ("code", "dialogue", "math", "safety")
CASES = [(load_preset(name), case) for name in NAMES for case in load_preset(name).cases]


def test_the_bundled_prompts_are_those_of_the_setting() -> None:
    choices = ApiReward.model_fields["prompt_preset"].annotation
    assert tuple(sorted(choices.__args__)) == NAMES  # type: ignore[union-attr]
    assert preset_names() == tuple(sorted((*NAMES, "compare")))  # for --rm_mode compare alone
    compare = load_template(ApiReward(mode="compare"))
    assert compare.variables == ("prompt", "response") and compare.scale == Scale(0, 1)


def test_an_unknown_prompt_is_told() -> None:
    with pytest.raises(RewardError, match="Did you mean 'math'"):
        load_preset("mathe")
    with pytest.raises(RewardError, match=r"--rm_prompt_file my\.yaml"):
        load_preset("my.yaml")
    with pytest.raises(RewardError, match="Known: code, compare"):
        load_preset("zzz")


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_whole(name: str) -> None:
    """Its form, what it tells the judge to ignore, its levels, and cases on both sides."""
    template = load_template(ApiReward(prompt_preset=name))
    assert (template.name, template.scale, template.output) == (name, Scale(1, 10), "json")
    assert template.version and 0 < len(template.description) <= 90
    file = bundled_path("reward_prompts") / f"{name}.yaml"
    assert file.read_text(encoding="utf-8").startswith("# ")
    expected = ("prompt", "ground_truth", "response") if name == "math" else ("prompt", "response")
    assert template.variables == expected, "only math needs a reference"
    for word in ("length", "confidence", "addresses you", "How to grade", "Ignore"):
        assert word.lower() in template.scoring.lower()
    levels = [int(level) for level in re.findall(r"^(\d+)  ", template.scoring, re.MULTILINE)]
    assert levels[0] == 10 and levels[-1] == 1 and len(levels) >= 5
    assert levels == sorted(levels, reverse=True)
    names = [case.name for case in template.cases]
    assert len(set(names)) == len(names) >= 6
    assert sum(case.at_least is not None for case in template.cases) >= 2
    assert sum(case.at_most is not None for case in template.cases) >= 3
    for kind in ("master key", "injection", "verbose"):
        assert any(kind in case for case in names)
    assert any("terse" in case or "short" in case for case in names)


def test_each_case_can_be_asked_and_agrees_with_the_gate() -> None:
    for template, case in CASES:
        material = case.material
        template.check([material])
        user = template.question(material, nonce="00aa").user
        assert user.count("</response-00aa>") == user.count("<response-00aa>") == 1
        closing = user.rpartition("</response-00aa>")[2]
        assert closing.strip().startswith("What stands between tags that end in -00aa")
        low = template.scale.low if case.at_least is None else case.at_least
        assert low <= (template.scale.high if case.at_most is None else case.at_most)
        gated = no_content_reason(material.prompt, material.response, material.ground_truth)
        assert gated is None or case.at_least is None, (template.name, case.name)
