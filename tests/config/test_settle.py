"""What nobody has set is decided once, whatever is read first, and stays when it is named."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_cli.config.schema.keys import nest_values, table, value_of, with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.schema.unset import Fitted, Follows
from ppo_cli.config.settle import Settling, settle
from ppo_cli.machine.device_record import FEATURES
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.plan import fit_memory
from tests.settings import CPU, with_gpus

MACHINES = {"cpu": CPU, "gpu": with_gpus(1), "gpus": with_gpus(8, proven=FEATURES)}
RULES = {name: key.rule for name, key in table().items() if key.rule is not None}
FOLLOWS = {name: rule.key for name, rule in RULES.items() if isinstance(rule, Follows)}
NAMING = ("trainer.engine", "trainer.n_gpus_per_node")  # their reasons name what was set
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


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_nothing_is_left_undecided(machine: Machine) -> None:
    config = fit_memory(Config.model_validate({"model": {"path": "embedded"}}), machine).config
    undecided = {name for name in RULES if value_of(config, name) is None}
    assert all(_may_be_none(name) for name in undecided), undecided


def _may_be_none(name: str) -> bool:
    *groups, leaf = name.split(".")
    section: Any = Config
    for group in groups:
        section = section.model_fields[group].annotation
    return NoneType in get_args(section.model_fields[leaf].annotation)
