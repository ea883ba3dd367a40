"""SLURM's variables, its node lists, and launchers that start one process a GPU."""

from __future__ import annotations

import pytest

from ppo_cli.config.slurm import (
    expand_hosts,
    node_variables,
    outside_step,
    slurm_hosts,
)
from ppo_cli.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NNODES": "3", "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu-[07-08],login", "SLURM_GPUS_ON_NODE": "8",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("a-[1-3,5]", ["a-1", "a-2", "a-3", "a-5"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
        ("a[1,3]-ib,b,c[2]", ["a1-ib", "a3-ib", "b", "c2"]),
        ("", []),
    ],
)
def test_node_lists_are_expanded(listed: str, hosts: list[str]) -> None:
    assert expand_hosts(listed) == hosts


@pytest.mark.parametrize("listed", ["a[", "a[1-x]", "a]1[", "a[1-999999999]", "a[]"])
def test_node_lists_that_cannot_be_read(listed: str) -> None:
    with pytest.raises(ConfigError, match="node list"):
        expand_hosts(listed)


WHOLE = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "gpu-07", "N_GPUS": "8"}
OLDER = {**STEP, "SLURM_JOB_NUM_NODES": "4", "SLURM_NNODES": ""}


@pytest.mark.parametrize(
    ("env", "set_keys", "values"),
    [
        (STEP, [], WHOLE),
        # What is said outright stays.
        ({**STEP, "MASTER_ADDR": "10.0.0.1", "N_GPUS": "4"}, [], {"NNODES": "3", "NODE_RANK": "2"}),
        (STEP, ["trainer.node_rank"], {k: v for k, v in WHOLE.items() if k != "NODE_RANK"}),
        ({**STEP, "NNODES": "1"}, [], {}),
        (OLDER, [], {**WHOLE, "NNODES": "4"}),
        ({**STEP, "SLURM_GPUS_ON_NODE": ""}, [], {k: WHOLE[k] for k in list(WHOLE)[:3]}),
        # One node, and a line outside of a step, need nothing.
        ({**STEP, "SLURM_NNODES": "1", "SLURM_NODEID": "0"}, [], {}),
        ({"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "8"}, [], {}),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}, [], {}),
        ({}, [], {}),
        ({"RANK": "0"}, [], {}),
        ({"RANK": "0", "WORLD_SIZE": "1"}, [], {}),
    ],
)
def test_a_node_is_read_from_slurm(
    env: dict[str, str], set_keys: list[str], values: dict[str, str]
) -> None:
    assert node_variables(env, set_keys).values == values


def test_a_line_outside_of_a_step() -> None:
    assert outside_step({"SLURM_NNODES": "2"})
    assert not outside_step(STEP)


def test_origins_name_slurm() -> None:
    origins = node_variables(STEP).origins
    assert origins["NODE_RANK"] == "env SLURM_NODEID"
    assert origins["NNODES"] == "env SLURM_NNODES"
    assert origins.keys() == node_variables(STEP).values.keys()


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_LOCALID": "1"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
        {"SLURM_STEP_TASKS_PER_NODE": "1,8"},
        {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": "8"},
        {"SLURM_NNODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"},
    ],
)
def test_several_tasks_on_a_node_are_a_mistake(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"once per node.*--ntasks-per-node=1"):
        node_variables({**STEP, **variables})


def test_torchrun_is_named() -> None:
    env = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8"}
    with pytest.raises(ConfigError, match=r"RANK=3 LOCAL_RANK=3 WORLD_SIZE=8 .* per node, not"):
        node_variables(env)
    assert node_variables({**env, "NNODES": "1"}).values == {}
    assert node_variables(env, set_keys=["trainer.nnodes"]).values == {}


def test_ranks_that_may_count_nodes_are_named_with_the_mend() -> None:
    with pytest.raises(ConfigError, match="NNODES=2 NODE_RANK=1"):
        node_variables({"RANK": "1", "WORLD_SIZE": "2"})


def test_hosts_for_names() -> None:
    assert slurm_hosts(STEP) == ["gpu-07", "gpu-08", "login"]
    assert slurm_hosts({"SLURM_JOB_NODELIST": "a,b,c", "SLURM_STEP_NODELIST": "b,c"}) == ["b", "c"]
    assert slurm_hosts({}) == []
    assert slurm_hosts({"SLURM_JOB_NODELIST": "a[", "PATH": ""}) == []
