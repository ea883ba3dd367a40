"""Who works where: engine, sampler, ranks and devices, from the settings alone."""

from __future__ import annotations

import json

import pytest

from ppo_cli.machine.machine import Machine
from ppo_cli.planning.placement import (
    placement_of,
    plan_devices,
)
from ppo_cli.planning.run_plan import make_plan
from tests.config.settling import load_table, settle, unchecked
from tests.settings import with_gpus

DEVICES = load_table("devices.yaml")


@pytest.mark.parametrize(
    ("gpus", "overrides"), [(gpus, text) for gpus, texts in DEVICES.items() for text in texts]
)
def test_the_plan_says_who_works_where(gpus: int, overrides: str) -> None:
    machine = with_gpus(gpus, packages=())
    sentences = plan_devices(unchecked(overrides, machine), Machine(), {}).sentences
    who_works = [text for text in sentences if not text.startswith("importance weights")]
    assert who_works == DEVICES[gpus][overrides]
    # vLLM takes the place of the hf sampler on GPUs, unless hf is chosen.
    machine = with_gpus(gpus, packages=("vllm",))
    facts = plan_devices(unchecked(overrides, machine), machine, {}).facts
    on_gpus = facts["devices_per_node"] > 0 and facts["engine"] == "ray"
    vllm = "vllm" in overrides or (on_gpus and "rollout.name=hf" not in overrides)
    assert facts["sampler"] == ("vllm" if vllm else "hf")


def test_gpus_are_numbered_over_nodes_and_slots_are_on_none() -> None:
    assert placement_of(unchecked("trainer.num_workers=2")).node_of(1) is None
    two_nodes = "trainer.nnodes=2 trainer.n_gpus_per_node=8"
    assert placement_of(unchecked(two_nodes)).node_of(8) == 1


def test_a_split_counts_only_the_ranks_that_train() -> None:
    size = "actor.ppo_micro_batch_size_per_gpu=1"
    split = "trainer.n_gpus_per_node=8 trainer.placement=train:0-3,rollout:4-7"
    for gpus, overrides, batches in ((0, size, 64), (8, f"{split} {size}", 16)):
        plan = make_plan(settle(*overrides.split(), machine=with_gpus(gpus)))
        assert plan.arithmetic["actor_micro_batches_at_most"] == batches


def test_the_plan_has_the_placement_for_programs() -> None:
    plan = make_plan(settle("trainer.num_workers=2")).as_dict()["placement"]
    assert (plan["engine"], plan["sampler"], plan["learner_ranks"]) == ("ray", "hf", 2)
    plan = json.loads(json.dumps(plan))
    assert (plan["rollout"], plan["sleepers"]) == ([[2]], [])
