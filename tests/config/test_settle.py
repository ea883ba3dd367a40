"""What nobody has set is decided once, whatever is read first, and stays when it is named."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.config.mixture import (
    OF_REWARD,
    further_judges,
    judges_of,
    models_of,
    other_judge,
    read_judge,
)
from ppo_cli.config.schema.keys import keys_of, nest_values, table, value_of, with_settings
from ppo_cli.config.schema.reward import ApiReward, ModelReward, Reward
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.unset import Fitted, Follows
from ppo_cli.config.settle import Settled, Settling, settle
from ppo_cli.machine.device_record import FEATURES
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.run.identity import describe_changes, setting_values
from tests.settings import CPU, with_gpus

MACHINES = {"cpu": CPU, "gpu": with_gpus(1), "gpus": with_gpus(8, proven=FEATURES)}
RULES = {name: key.rule for name, key in table().items() if key.rule is not None}
FOLLOWS = {name: rule.key for name, rule in RULES.items() if isinstance(rule, Follows)}
# Their reasons name what was set.
NAMING = (
    "trainer.engine", "trainer.n_gpus_per_node", "algorithm.rollout_correction.rollout_is",
)  # fmt: skip
DECIDED = [name for name, rule in RULES.items() if not isinstance(rule, Fitted)]
# Settings that choices depend on.
ASKED = st.fixed_dictionaries(
    {"model.path": st.just("embedded")},
    optional={
        "trainer.engine": st.sampled_from(["local", "ray"]),
        "trainer.n_gpus_per_node": st.sampled_from([0, 1, 8]),
        "trainer.async_steps": st.sampled_from([0, 1]),
        "trainer.nnodes": st.sampled_from([1, 2]),
        "rollout.name": st.sampled_from(["hf", "vllm"]),
        "rollout.tensor_model_parallel_size": st.sampled_from([1, 2]),
        "model.dtype": st.sampled_from(["float32", "bfloat16"]),
        "model.lora_rank": st.sampled_from([0, 8]),
        "actor.use_kl_loss": st.booleans(),
        "algorithm.adv_estimator": st.sampled_from(["gae", "grpo", "gdpo"]),
        "critic.pretrain_until": st.just(0.5),
    },
)
HERE = st.sampled_from(list(MACHINES.values()))


@given(ASKED, HERE, st.sampled_from(DECIDED))
def test_naming_what_was_decided_changes_nothing(
    asked: dict[str, Any], machine: Machine, name: str
) -> None:
    config = Config.model_validate(nest_values(asked))
    settled = settle(config, machine)
    value = value_of(settled.config, name)
    if name in asked or value is None:
        return
    if (
        name == "algorithm.use_kl_in_reward"
        and asked.get("algorithm.adv_estimator", "gae") != "gae"
    ):
        return  # to name it turns the KL in the loss off
    if name == "algorithm.lam":
        return  # to name it sets the critic's as well
    named = settle(with_settings(config, {name: value}), machine)
    assert named.config == settled.config
    others = settled.why.keys() - {name, *NAMING}
    assert named.why.keys() == settled.why.keys() - {name}
    assert {key: named.why[key] for key in others} == {key: settled.why[key] for key in others}


@given(ASKED, HERE, st.permutations(list(table())))
def test_the_order_of_reading_does_not_matter(
    asked: dict[str, Any], machine: Machine, order: list[str]
) -> None:
    config = Config.model_validate(nest_values(asked))
    settling = Settling(config, machine)
    for name in order:
        settling[name]
    assert with_settings(config, settling.decided) == settle(config, machine).config


@pytest.mark.parametrize(("name", "other"), FOLLOWS.items())
def test_an_unset_setting_has_the_value_of_the_one_it_follows(name: str, other: str) -> None:
    values = {"data.max_response_length": 24, "model.path": "embedded", "trainer.seed": 7}
    values[other] = values.get(other, 3 if isinstance(table()[other].default, int) else 0.5)
    settled = settle(Config.model_validate(nest_values(values)), CPU)
    assert value_of(settled.config, name) == values[other]
    assert settled.why[name] == f"as {other}"


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({}, "reward.api.scale", "1-10"),
        ({"reward.api.prompt_file": "p.yaml"}, "reward.api.scale", "0-5"),
        ({"reward.api.prompt_file": "p.yaml"}, "reward.api.output", "text"),
        ({"reward.api.prompt_file": "none.yaml"}, "reward.api.output", "json"),
        ({"reward.api.scoring_prompt": "From 0 to 3: {response}"}, "reward.api.scale", None),
        ({"reward.api.mode": "compare"}, "reward.api.scale", None),
        ({"trainer.store": "s3://b/r"}, "reward.api.cache", "./outputs/verdicts.sqlite"),
        ({"reward.model.path": "RLHFlow/ArmoRM-Llama3-8B-v0.1"}, "reward.model.max_length", 4096),
        ({"reward.model.path": "http://h/classify"}, "reward.model.max_length", None),
    ],
)  # fmt: skip
def test_what_rewards_leave_out_is_decided(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    name: str,
    value: str | int | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text("scale: 0-5\noutput: text\nscoring: '{response}'\n")
    settled = settle(with_settings(Config(), changes), CPU)
    assert value_of(settled.config, name) == value
    assert settled.why[name]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_nothing_is_left_undecided(machine: Machine) -> None:
    settled = settle(Config.model_validate({"model": {"path": "embedded"}}), machine)
    config = fit_memory(settled).config
    undecided = {name for name in RULES if value_of(config, name) is None}
    assert all(_may_be_none(name) for name in undecided), undecided


def _may_be_none(name: str) -> bool:
    *groups, leaf = name.split(".")
    section: Any = Config
    for group in groups:
        section = section.model_fields[group].annotation
    return NoneType in get_args(section.model_fields[leaf].annotation)


def test_what_may_be_empty_is_decided_or_says_what_that_means() -> None:
    optional = {name: key for name, key in table().items() if key.optional}
    assert {name for name, key in optional.items() if not (key.rule or key.absent)} == set()


API = {"enable": True, "type": "openai", "model": "m"}
# Rewards whose judges and models differ in what rules read.
REWARDS: dict[str, dict[str, Any]] = {
    "votes": {"api": {**API, "votes": 3}},
    "claude": {"api": {**API, "type": "claude"}},
    "panel": {
        "api": {**API, "panel": {"judges": ["claude/c", "gpt-4.1", "slow"]}, "rubric": "r.yaml",
                "judges": {"slow": {"model": "s", "timeout": 90, "votes": 3}}},
    },
    "cascade": {"api": {**API, "votes": 3, "cascade": {"model": "b"},
                        "judges": {"b": {"type": "claude", "model": "c", "votes": 1}}}},
    "unsure": {"api": {**API, "cascade": {"model": "b"}, "judges": {"b": {"votes": 5}}}},
    "parts": {
        "api": {"type": "claude", "model": "c", "votes": 3}, "parts": ["judge:1", "judge:strict:1"],
        "composite": {
            "weights": {"wide": 1, "rm": 1},
            "parts": {"strict": {"judge": {"type": "openai", "model": "s", "votes": 1}},
                      "wide": {"judge": {"panel": {"judges": ["x", "y"]}, "timeout": 5}},
                      "rm": {"model": {"path": "rm", "device": "cpu"}},
                      "far": {"model": {"path": "far"}, "weight": 1}},
        },
    },
}  # fmt: skip


def _rewarded(name: str, machine: Machine) -> Settled:
    values = {"model": {"path": "embedded"}, "reward": REWARDS[name]}
    return settle(Config.model_validate(values), machine)


def _sections(reward: Reward) -> dict[str, ApiReward | ModelReward]:
    """What holds for each judge and reward model, by where its settings are."""
    judges: dict[str, ApiReward | ModelReward] = {}
    for judge in judges_of(reward):
        judges[judge.own_key] = judge.settings.model_copy(update={"judges": {}})
        for name in further_judges(judge.settings):
            judges[f"{judge.own_key}.judges.{name}"] = other_judge(judge.settings, name)
    # Without the names of further judges, each of which is there.
    return judges | {model.own_key: model.settings for model in models_of(reward)}


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("name", REWARDS)
def test_each_judge_and_model_is_decided_as_if_it_were_alone(name: str, machine: Machine) -> None:
    settled = _rewarded(name, machine)
    requested = _sections(settled.requested.reward)
    for key, section in _sections(settled.config.reward).items():
        at = "reward.api" if isinstance(section, ApiReward) else "reward.model"
        unset = requested[key]
        if isinstance(unset, ApiReward) and key.rpartition(".judges.")[1]:
            unset = unset.model_copy(update={"rubric_order": section.rubric_order})
        alone = settle(with_settings(Config(), {at: unset}), machine)
        for leaf, declared in keys_of(type(section)).items():
            if declared.rule is not None and not leaf.startswith(OF_REWARD):
                assert value_of(section, leaf) == value_of(alone.config, f"{at}.{leaf}"), leaf


@pytest.mark.parametrize("name", REWARDS)
def test_naming_what_holds_for_a_judge_or_model_is_the_same_run(name: str) -> None:
    machine = MACHINES["gpus"]
    settled = _rewarded(name, machine)
    identity, sections = setting_values(settled.config), _sections(settled.config.reward)
    for key, section in sections.items():
        for leaf, declared in keys_of(type(section)).items():
            value = value_of(section, leaf)
            further = ".judges." in key
            if declared.rule is None or value is None or (further and leaf.startswith(OF_REWARD)):
                continue
            # What is set counts for further judges as well, which may decide otherwise.
            heirs = [s for at, s in sections.items() if at.startswith(f"{key}.judges.")]
            if any(value_of(heir, leaf) != value for heir in heirs):
                continue
            requested = settled.requested
            if further:  # as a group of settings, since its name may be all that was set
                at, _, judge = key.partition(".judges.")
                judges = (
                    value_of(settled.config, at).get("judges", {})
                    if "parts" in at
                    else (settled.config.reward.api.judges)
                )
                group = {**read_judge(judges, judge), leaf: value}
                changes = {f"{at}.judges": {**judges, judge: group}}
            else:
                changes = {f"{key}.{leaf}": value}
            named = settle(with_settings(requested, changes), machine).config
            assert _sections(named.reward) == sections, (key, leaf)
            assert describe_changes(identity, setting_values(named)) == "", (key, leaf)
