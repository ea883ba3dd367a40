"""Mixtures: from flags, weights and parts to one tuple, each mistake with its place and mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.mixture import MixPart, mixture_of
from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import ConfigError
from tests.config.settling import problems, refusals, remarks, settle, unused, written
from tests.settings import config_yaml

RM = "reward.model.path=rm"
TWO = "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"


def parts(*overrides: str, mix: tuple[str, ...] = (), file: str = "") -> dict[str, MixPart]:
    reward = settle(*overrides, mix=mix, file=file).config.reward
    return {part.name: part for part in mixture_of(reward)}


def test_without_parts_there_is_no_mixture() -> None:
    assert mixture_of(Reward()) == ()
    assert mixture_of(settle(RM).config.reward) == ()


def test_flags_become_parts_in_their_order() -> None:
    mixture_parts = parts(RM, mix=("judge:0.5", "model:0.3", "rule:format:-0.2", "rule:1e-1"))
    assert [(p.name, p.kind, p.weight, p.scaling) for p in mixture_parts.values()] == [
        ("judge", "judge", 0.5, "zscore"),
        ("model", "model", 0.3, "zscore"),
        ("format", "rule", -0.2, "zscore"),
        ("rule", "rule", 0.1, "zscore"),
    ]
    assert mixture_parts["format"].rule == "format"
    assert mixture_parts["rule"].rule is None


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (f"{RM}", "model rule"),
        ("reward.api.enable=true reward.api.model=m", "judge rule"),
        ("reward.api.enable=false reward.model.path=rm reward.rule=exact", "model rule"),
        ("reward.model.path=rm reward.function=f.py", "model rule"),
    ],
)
def test_rm_score_is_the_reward_model_or_else_the_judge(overrides: str, kinds: str) -> None:
    mixture_parts = parts(*overrides.split(), file=written(TWO))
    assert [part.kind for part in mixture_parts.values()] == kinds.split()
    assert [part.weight for part in mixture_parts.values()] == [0.7, 0.3]
    assert unused(settle(*overrides.split(), file="r.yaml"))[0] == []


@pytest.mark.parametrize(
    ("extra", "kinds"),
    [
        ("reward_model: {path: rm}\n", "model rule"),
        ("api_reward: {model: m}\n", "judge rule"),
        ("api_reward: {model: m}\nrule: exact\n", "judge rule"),
    ],
)
def test_a_whole_file_sets_up_a_mixture(extra: str, kinds: str) -> None:
    mixture_parts = parts(file=written(TWO + extra))
    assert [part.kind for part in mixture_parts.values()] == kinds.split()


def test_a_settings_file_in_the_older_style_sets_up_a_mixture() -> None:
    file = Path(written(TWO + "reward_model: {path: rm}\n"))
    parts_of_file = mixture_of(settle(files=(file,)).config.reward)
    assert [part.name for part in parts_of_file] == ["model", "rule"]


def test_names_of_scores_stand_for_their_kinds() -> None:
    text = "composite.weights: {judge_score: 0.7, function_score: 0.2, api_score: 0.7}\n"
    assert set(parts(file=written(text))) == {"judge", "rule"}


def test_weights_and_settings_of_a_part_are_merged() -> None:
    mixture_parts = parts(
        "reward.composite.weights.correct=0.6",
        "reward.composite.parts.correct.rule=gsm8k",
        "reward.composite.parts.correct.scaling=none",
        "reward.composite.parts.format.clip=2",
        "reward.composite.parts.kind={judge: {votes: 3}, only_if: format >= 1, weight: 0.1}",
        mix=("rule:format:0.3",),
    )
    assert mixture_parts["correct"] == MixPart(
        name="correct", kind="rule", weight=0.6, scaling="none", rule="gsm8k"
    )
    assert (mixture_parts["format"].weight, mixture_parts["format"].clip) == (0.3, 2.0)
    assert mixture_parts["kind"].judge["votes"] == 3
    assert mixture_parts["kind"].kind == "judge"


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [
        ("helpful={judge: qwen-max}", "judge"),
        ("helpful={model: other/rm}", "model"),
        ("helpful={function: f.py}", "rule"),
        ("helpful={rule: exact}", "rule"),
        ("helpful={kind: judge}", "judge"),
        ("judge=1", "judge"),
        ("rule=null", "rule"),
    ],
)
def test_a_part_says_what_it_is_in_few_words(overrides: str, kind: str) -> None:
    name, _, value = overrides.partition("=")
    (part,) = parts(f"reward.composite.parts.{name}={value}").values()
    assert (part.kind, part.weight) == (kind, 1.0)


def test_a_mixture_may_be_switched_off() -> None:
    text = TWO.replace("true", "false") + "rule: exact\n"
    resolved = settle(file=written(text))
    assert mixture_of(resolved.config.reward) == ()
    assert refusals(resolved) == []
    assert any("the mixture is off" in note for note in remarks(resolved))


@pytest.mark.parametrize(
    ("mix", "gate", "refused"),
    [
        (("judge:1", "rule:format:0"), "judge.only_if=format>=1", False),
        (("judge:1", "rule:format:0"), "", False),  # a second opinion
        (("rule:exact:1", "rule:format:0"), "", True),  # nothing may be exploited
        (("rule:exact:1",), "mine={function: f.py, weight: 0}", True),  # the function pays nothing
        (("judge:1", "rule:format:0", "rule:exact:0"), "", True),  # one opinion is asked
        (("judge:0", "rule:format:1"), "", True),  # paid for in vain
    ],
)
def test_a_part_that_opens_a_gate_or_watches_may_weigh_nothing(
    mix: tuple[str, ...], gate: str, refused: bool
) -> None:
    lines = problems(*[f"reward.composite.parts.{gate}"] * bool(gate), mix=mix)
    assert any("has the weight 0" in line for line in lines) is refused


def test_everything_wrong_is_told_at_once_with_its_line() -> None:
    text = "composite:\n  weights:\n    judge: x\n    rul: 1\n  parts:\n    rule: {clip: -1}\n"
    lines = problems(file=written(text), mix=("model:heavy",))
    places = [line.split(": ")[0] for line in lines]
    assert places == ["flag --reward", "r.yaml line 6", "r.yaml line 3", "r.yaml line 4"]


def test_a_wrong_mixture_is_an_error_where_it_is_read_too() -> None:
    with pytest.raises(ConfigError) as caught:
        mixture_of(Reward(parts=("judge:x", "foo:1")))
    assert len(caught.value.problems) == 2


def test_arguments_of_a_parts_function_are_its_own_matter() -> None:
    part = "mine: {function: f.py, function_kwargs: {api_key: k, deep: {x: 1}}}"
    mixture_parts = parts(file=written(f"composite: {{parts: {{{part}}}}}\n"))
    assert mixture_parts["mine"].function_kwargs == {"api_key": "k", "deep": {"x": 1}}


def test_the_settings_of_a_run_give_the_same_mixture_again(tmp_path: Path) -> None:
    overrides = (
        "reward.composite.parts.a={only_if: b >= 1, scaling: sigmoid, mean: 2, clip: 3}",
        "reward.composite.parts.a.judge={votes: 3, key_env: MINE, monitor: {model: m}}",
        "reward.composite.parts.c={model: ./rm, on_failure: renormalise}",
        "reward.composite.weights.c=0.25",
        "reward.composite.parts.b.function_kwargs={x: [1, 2], y: 'no'}",
        "reward.composite.parts.b.function=f.py",
    )
    resolved = settle(*overrides, mix=("judge:a:0.5", "rule:b:-1e-3"))
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(resolved), encoding="utf-8")
    reread = settle(files=(path,))
    assert mixture_of(reread.config.reward) == mixture_of(resolved.config.reward)
    assert len(mixture_of(reread.config.reward)) == 3


def test_a_part_that_is_only_named_takes_more_settings_from_above() -> None:
    mixture_parts = parts(
        "reward.composite.parts.judge=null", "reward.composite.parts.judge.clip=2"
    )
    assert mixture_parts["judge"].clip == 2.0
    text = "reward.composite.parts={judge: {clip: 3, weight: 0.4}}"
    mixture_parts = parts(text, "reward.composite.parts.judge.clip=2")
    assert (mixture_parts["judge"].clip, mixture_parts["judge"].weight) == (2.0, 0.4)
    mixture_parts = parts(text, "reward.composite.parts.judge=0.7")
    assert (mixture_parts["judge"].clip, mixture_parts["judge"].weight) == (None, 0.7)
