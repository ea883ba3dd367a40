"""Mixtures: from flags, weights and parts to one tuple, each mistake with its place and mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.checks.runner import missing_parts, remarks
from ppo_cli.config.mixture import MixPart, mixture_of
from ppo_cli.config.plan import config_yaml
from ppo_cli.config.schema.reward import Reward
from ppo_cli.errors import ConfigError
from tests.config.settling import problems, settle, written

RM = "reward.model.path=rm"
TWO = "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"


def parts(*overrides: str, mix: tuple[str, ...] = (), file: str = "") -> dict[str, MixPart]:
    reward = settle(*overrides, mix=mix, file=file).config.reward
    return {part.name: part for part in mixture_of(reward)}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
    assert missing_parts(settle(*overrides.split(), file="r.yaml"), gpus=0) == []


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
    assert mixture_parts["kind"].judge == {"votes": 3}
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
    assert missing_parts(resolved, gpus=0) == []
    assert any("the mixture is off" in note for note in remarks(resolved, gpus=0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("critic:1", "'critic' is not one of judge, model, rule"),
        ("modle:1", "Did you mean 'model'?"),
        ("function:1", "Did you mean 'rule'?"),
        ("judge", "write KIND:WEIGHT or KIND:NAME:WEIGHT, such as judge:0.5"),
        ("rule:a:b:1", "write KIND:WEIGHT"),
        ("rule:format", "Then write rule:format:1"),
        ("judge:x:heavy", "the weight 'heavy' is not a number"),
        ("judge:nan", "the weight 'nan' is not a number"),
        ("judge:inf", "the weight 'inf' is not a number"),
        ("rule:Format:1", "'Format' cannot name a part: a small letter first"),
        ("rule:1st:1", "cannot name a part"),
        ("rule:token:1", "hidden as secrets; use another"),
        ("judge:0", "leave it out"),
        ("judge:1 judge:2", "give each a name, such as --reward judge:NAME:WEIGHT"),
        ("judge:a:1 rule:a:2", "another part is called a; rename one"),
        ("model:1", "--reward_model PATH, or reward.composite.parts.model.model.path"),
    ],
)
def test_a_wrong_flag_is_told_with_its_mend(overrides: str, message: str) -> None:
    (problem,) = problems(mix=tuple(overrides.split()))
    assert problem.startswith("flag --reward: ")
    assert message in problem


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("weights={jugde: 1}", "there is no part 'jugde'. Did you mean 'judge'?"),
        ("weights.rm_scor=1", "Did you mean 'rm_score'?"),
        ("weights.format=1", "Set it up below reward.composite.parts.format"),
        ("weights.judge=heavy", "'heavy' is not a number; write a weight such as 0.5"),
        ("weights.judge=[1, 2]", "is not a number"),
        ("weights.rm_score=1", "--reward_model PATH, or --use_api_reward"),
        ("parts.judge={weight: 0}", "leave it out"),
        ("parts.format={weight: 1}", "does not say what format is: add kind: judge, model or"),
        ("parts.format={weight: 1, rule: a, judge: b}", "does not say what format is"),
        ("parts.judge=hello", "'hello' is not a group of settings such as weight: 0.5"),
        ("parts.Judge={weight: 1}", "'Judge' cannot name a part"),
        ("parts.judge={weigth: 1}", "weigth: there is no such setting. Did you mean 'weight'?"),
        ("parts.judge={weight: much}", "parts.judge.weight: 'much' is not a number."),
        ("parts.judge={scaling: zcore}", "'zcore' is not one of none, affine, sigmoid, zscore"),
        ("parts.judge={clip: 0}", "clip: must be above 0, but is 0"),
        ("parts.judge={on_failure: drop}", "is not one of fail, renormalise"),
        ("parts.judge={kind: juge}", "Did you mean 'judge'?"),
        ("parts.judge={rule: exact}", "is of kind judge, and rule is for parts of kind rule"),
        ("parts.rule={model: rm}", "is of kind rule, and model is for parts of kind model"),
        ("parts.rule={rule: a, function: b}", "has a rule and a function; keep one"),
        ("parts.judge={judge: {voets: 3}}", "voets: there is no such setting. Did you mean 'vo"),
        ("parts.judge={judge: {votes: 0}}", "votes: must be at least 1, at most 64, but is 0"),
        ("parts.judge={judge: {votes: x}}", "votes: 'x' is not a number"),
        ("parts.judge={judge: {monitor: {modell: x}}}", "Did you mean 'monitor.model'?"),
        ("parts.judge={judge: {enable: true}}", "enable: there is no such setting."),
        ("parts.judge={judge: {scale: ten}}", "'ten' is not LOW-HIGH"),
        ("parts.judge={judge: {type: openai}}", "--rm_model gpt-6-luna"),
        ("parts.judge={judge: {base_url: 'h:1'}}", "judge.base_url: 'h:1' is not an address"),
        ("parts.judge={judge: {type: claude, mode: decision, model: m}}", "--rm_mode text"),
        ("parts.model={model: {path: a/b, offlod: true}}", "Did you mean 'offload'?"),
        ("parts.model={model: {path: a/b, max_length: 3}}", "must be at least 8, but is 3"),
        ("parts.model={model: {path: a/b, device: gpu}}", "'gpu' is not a device"),
        ("parts.model={scaling: affine, model: a/b}", "needs mean and std"),
        ("parts.model={scaling: affine, mean: 1, model: a/b}", "`ppo reward fit` writes them"),
        ("parts.rule={std: 2}", "std are for scaling affine and sigmoid, not for zscore"),
        ("parts.rule={scaling: none, mean: 2, std: 1}", "mean and std are for scaling affine"),
        ("parts.rule={scaling: group}", "Use --rollout_n 4, or scaling zscore"),
        ("parts.rule={only_if: 'judge > 1'}", "there is no part 'judge'. Parts: no other."),
        ("parts.rule={only_if: 'rule > 1'}", "a part cannot wait for its own score"),
        ("parts.rule={only_if: 'judge > x'}", "write PART >= NUMBER"),
        ("parts.rule={only_if: 'judge = 1'}", "write PART >= NUMBER"),
        ("parts.rule={only_if: ''}", "write PART >= NUMBER"),
        ("enable=true", "the mixture has no parts: add --reward"),
        ("weights=0.5", "is not a group such as {name: value}"),
        ("parts.judge={weight: ", "is not a value; put text that has signs into quotes"),
    ],
)
def test_a_wrong_setting_is_told_with_its_mend(overrides: str, message: str) -> None:
    (problem,) = problems(f"reward.composite.{overrides}")
    assert problem.startswith("override: ")
    assert message in problem


@pytest.mark.parametrize(
    ("mix", "overrides", "message"),
    [
        ("judge:0.5", "reward.composite.weights.judge=0.4", "is 0.5 in --reward and 0.4 in rew"),
        ("judge:0.5", "reward.composite.parts.judge.weight=0.4", "judge.weight; keep one"),
        ("judge:0.5", "reward.composite.parts.judge.kind=rule", "--reward says that judge is a j"),
        ("judge:1", "reward.composite.parts.format.rule=f", "part format has no weight, and ot"),
        ("judge:a:1 judge:b:1", "reward.composite.weights.judge_score=1", "may be a or b; use"),
        ("rule:1", "reward.api.enable=true reward.api.model=m", "or switch it off: --no_use"),
        ("rule:1", "reward.rule=a reward.function=f", "--reward rule:a:0.2"),
        ("judge:1 rule:1", "reward.composite.parts.judge.only_if=rul>=1", "Did you mean 'rule'?"),
    ],
)
def test_places_that_do_not_agree_are_told(mix: str, overrides: str, message: str) -> None:
    (problem,) = problems(*overrides.split(), mix=tuple(mix.split()))
    assert "override" in problem.split(": ")[0]
    assert message in problem


def test_gates_in_a_circle_are_named() -> None:
    gates = {"a": "b > 0", "b": "c > 0", "c": "a > 0"}
    overrides = [f"reward.composite.parts.{n}.only_if={gate}" for n, gate in gates.items()]
    (problem,) = problems(*overrides, mix=("rule:a:1", "rule:b:1", "rule:c:1"))
    assert "a waits for b waits for c waits for a; take one only_if out" in problem


def test_a_part_that_opens_a_gate_may_weigh_nothing() -> None:
    mixture_parts = parts(
        "reward.composite.parts.judge.only_if=format>=1", mix=("judge:1", "rule:format:0")
    )
    assert mixture_parts["format"].weight == 0


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


def test_a_secret_of_a_part_is_refused() -> None:
    (problem,) = problems(file=written("composite: {parts: {judge: {judge: {api_key: hush}}}}\n"))
    assert "keys belong into the environment" in problem
    assert "hush" not in problem


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


def test_a_plain_value_takes_no_settings_below_it() -> None:
    for text in ("reward.composite.parts={judge: 0.5}", "reward.composite.parts.judge=0.5"):
        (problem,) = problems(text, "reward.composite.parts.judge.clip=2")
        assert "judge has one plain value already" in problem


def test_a_settings_file_in_the_older_style_sets_up_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(TWO + "reward_model: {path: rm}\n", encoding="utf-8")
    resolved = settle(files=(path,))
    assert [part.name for part in mixture_of(resolved.config.reward)] == ["model", "rule"]
