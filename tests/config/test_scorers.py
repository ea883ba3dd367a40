"""What each part of a mixture is scored by: its own settings over the run's, keys, remarks."""

from __future__ import annotations

from ppo_cli.config.mixture import (
    MixPart,
    judge_settings,
    mixture_line,
    mixture_of,
    model_settings,
    rule_settings,
)
from tests.config.settling import problems, refusals, remarks, settle, written

RM = "reward.model.path=rm"
NAMES = ("revision", "tokenizer", "key_env", "model_name")  # of one checkpoint or server
TWO = "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"


def parts(*overrides: str, mix: tuple[str, ...]) -> tuple[MixPart, ...]:
    return mixture_of(settle(*overrides, mix=mix).config.reward)


def test_a_judge_of_a_part_has_the_runs_settings_under_its_own() -> None:
    reward = settle(
        "reward.api.model=m", "reward.api.votes=3", "reward.api.base_url=http://h/v1",
        "reward.api.key_env=MINE", "reward.api.prompt_preset=math",
        "reward.api.price_input=1", "reward.api.price_output=4",
        "reward.composite.parts.b.judge={votes: 5, model: n}",
        "reward.composite.parts.c.judge={type: claude, model: o}",
        mix=("judge:a:1", "judge:b:1", "judge:c:1"),
    ).config.reward  # fmt: skip
    a, b, c = (judge_settings(reward, part) for part in mixture_of(reward))
    assert a == reward.api.model_copy(update={"enable": True})
    assert (b.model, b.votes, b.base_url, b.key_env) == ("n", 5, "http://h/v1", "MINE")
    assert (c.type, c.model, c.votes, c.prompt_preset) == ("claude", "o", 3, "math")
    assert (b.price_input, b.price_output) == (1.0, 4.0)
    # Another provider's address, key, prices and model.
    assert (c.base_url, c.key_env, c.price_input, c.price_output) == (None,) * 4
    (problem,) = problems(
        "reward.api.model=m", "reward.composite.parts.c.judge={type: claude}", mix=("judge:c:1",)
    )
    assert "has no model" in problem


def test_a_budget_of_several_judges_is_remarked_on() -> None:
    overrides = ("reward.api.model=m", "reward.api.budget_usd=3", "reward.api.max_rpm=60")
    (note,) = remarks(settle(*overrides, mix=("judge:a:1", "judge:b:1")))
    assert "reward.api.budget_usd and reward.api.max_rpm hold for each of 2 judges" in note
    assert remarks(settle(*overrides, mix=("judge:a:1", "rule:1"))) == []


def test_a_judge_without_a_model_is_the_default_one() -> None:
    resolved = settle(mix=("judge:1",))
    (part,) = mixture_of(resolved.config.reward)
    assert judge_settings(resolved.config.reward, part).model == "qwen-plus"
    (note,) = remarks(resolved)
    assert note.startswith("The judge is qwen-plus (dashscope)")


def test_a_model_of_a_part_has_the_runs_settings_unless_they_are_of_its_checkpoint() -> None:
    reward = settle(
        RM, "reward.model.adapter=pair", "reward.model.max_length=99", "reward.model.offload=true",
        *(f"reward.model.{name}=x" for name in NAMES), "reward.model.outputs=[1, 2]",
        "reward.model.template='{prompt} {response}'",
        "reward.composite.parts.b.model={path: other, system_prompt: drop}",
        "reward.composite.parts.c.model.max_length=50",
        mix=("model:a:1", "model:b:1", "model:c:1"),
    ).config.reward  # fmt: skip
    a, b, c = (model_settings(reward, part) for part in mixture_of(reward))
    assert a == reward.model
    assert (b.path, b.adapter, b.max_length, b.offload) == ("other", None, None, True)
    assert b.system_prompt == "drop" and (b.template, b.outputs) == (None, ())
    assert [getattr(b, name) for name in NAMES] == [None] * len(NAMES)
    assert [getattr(c, name) for name in NAMES] == ["x"] * len(NAMES) and c.outputs == (1.0, 2.0)
    assert (c.path, c.adapter, c.max_length) == ("rm", "pair", 50)


def test_a_rule_of_a_part_is_its_own_or_the_runs() -> None:
    reward = settle(
        "reward.function=f.py", "reward.function_kwargs.x=1", "reward.timeout=3",
        "reward.composite.parts.rule.function_kwargs.y=2", "reward.function_kwargs.y=1",
        "reward.composite.parts.g={function: g.py, function_kwargs: {z: 3}}",
        mix=("rule:1", "rule:format:1", "rule:g:1", "judge:1"),
    ).config.reward  # fmt: skip
    usual, named, separate = (
        rule_settings(reward, p) for p in mixture_of(reward) if p.kind == "rule"
    )
    assert (usual.function, usual.rule, usual.function_kwargs) == ("f.py", None, {"x": 1, "y": 2})
    assert (named.function, named.rule, named.function_kwargs) == (None, "format", {})
    assert (separate.function, separate.rule, separate.timeout) == ("g.py", None, 3.0)
    assert separate.function_kwargs == {"z": 3}
    assert (usual.parts, usual.api.enable, usual.model.path) == ((), False, None)


def test_each_judge_needs_its_key_and_each_model_its_folder() -> None:
    resolved = settle(
        "reward.api.model=m",
        "reward.composite.parts.b.judge={type: claude, model: n}",
        "reward.composite.parts.c.model={path: ./rm, key_env: RM_KEY}",
        "reward.composite.parts.d.model={path: 'http://h/classify', key_env: RM_KEY}",
        mix=("judge:a:1", "judge:b:1", "model:c:1", "model:d:1"),
    )
    a, b, key, folder = sorted(refusals(resolved, {}), key=lambda line: line[13:])[:4]
    lines = "\n".join((a, b, key, folder))
    assert "the judge 'a' (dashscope)" in lines
    assert "the judge 'b' (claude): set ANTHROPIC_API_KEY" in lines
    assert "reward.composite.parts.b.judge.key_env=NAME" in lines
    assert "the reward model 'd': set RM_KEY" in lines
    assert "no model folder ./rm" in lines


def test_raw_scores_of_a_reward_model_are_remarked_on() -> None:
    raw = ("reward.composite.parts.model.scaling=none", RM)
    (note,) = remarks(settle(*raw, mix=("model:1", "rule:1")))
    assert "may dominate the other parts" in note
    assert remarks(settle(*raw, mix=("model:1",))) == []
    clipped = (*raw, "reward.composite.parts.model.clip=1")
    assert remarks(settle(*clipped, mix=("model:1", "rule:1"))) == []


def test_what_rm_score_means_is_remarked_on() -> None:
    overrides = ("reward.api.enable=true", "reward.api.model=m")
    notes = settle(*overrides, file=written(TWO)).notes
    assert any("rm_score is the judge's score" in note for note in notes)


def test_scaled_values_are_cut_where_the_part_or_its_scaling_says() -> None:
    part = MixPart(name="a", kind="rule")
    bounds = [part.model_copy(update=changes).bound for changes in ({}, {"clip": 2.0})]
    bounds += [part.model_copy(update={"scaling": name}).bound for name in ("none", "group")]
    assert bounds == [5.0, 2.0, None, None]


def test_a_mixture_reads_in_one_line() -> None:
    mixture_parts = parts(
        RM, "reward.composite.parts.model={scaling: sigmoid, only_if: rule >= 1, clip: 3}",
        mix=("model:0.7", "rule:-0.3", "judge:2"),
    )  # fmt: skip
    assert mixture_line(mixture_parts) == (
        "total = 0.7 x clip(sigmoid(model), 3) (if rule >= 1) - 0.3 x zscore(rule) + 2 x "
        "zscore(judge)"
    )
