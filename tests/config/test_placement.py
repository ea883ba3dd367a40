"""Who works where: engine, sampler, ranks and devices, from the settings alone."""

from __future__ import annotations

import json

import pytest

from ppo_cli.config.placement import (
    data_ranks,
    describe_placement,
    has_package,
    learner_ranks,
    placement_of,
    plan_devices,
)
from ppo_cli.config.plan import batch_arithmetic, make_plan
from ppo_cli.config.schema.run import Config
from tests.config.settling import settle

RM = "reward.model.path=a/b"
SPAN = "rollout.tensor_model_parallel_size"
TABLE = "trainer.n_gpus_per_node=8 trainer.placement=train:0-7,rollout:0-1,reward:2-3"
PARTLY = "trainer.n_gpus_per_node=8 trainer.placement=train:0-5,rollout:4-7"


def config(overrides: str) -> Config:
    return settle(*overrides.split()).config


def test_a_package_is_looked_for_and_not_imported() -> None:
    assert has_package("json") and not has_package("no_such_package_at_all")


@pytest.mark.parametrize(
    ("overrides", "gpus", "train", "rollout", "reward", "sleepers"),
    [
        ("", 0, 1, [(0,)], (), (0,)),
        ("trainer.engine=ray", 1, 1, [(0,)], (), (0,)),
        ("trainer.n_gpus_per_node=4", 4, 4, [(0,), (1,), (2,), (3,)], (), (0, 1, 2, 3)),
        (f"trainer.n_gpus_per_node=4 {SPAN}=2", 4, 4, [(0, 1), (2, 3)], (), (0, 1)),
        (f"trainer.n_gpus_per_node=2 {RM}", 2, 2, [(0,), (1,)], (1,), (0, 1)),
        (f"trainer.n_gpus_per_node=2 {RM} reward.model.device=cpu", 2, 2, [(0,), (1,)], (), (0, 1)),
        ("trainer.n_gpus_per_node=2 reward.model.path=http://h", 2, 2, [(0,), (1,)], (), (0, 1)),
        ("trainer.n_gpus_per_node=8 trainer.async_steps=1", 8, 6, [(6,), (7,)], (), ()),
        (f"trainer.n_gpus_per_node=8 trainer.async_steps=1 {RM}", 8, 6, [(6,), (7,)], (5,), ()),
        ("trainer.n_gpus_per_node=2 trainer.async_steps=1", 2, 1, [(1,)], (), ()),
        ("trainer.num_workers=2", 0, 2, [(2,)], (), ()),
        (f"trainer.num_workers=2 rollout.num_samplers=2 {RM}", 0, 2, [(2,), (3,)], (4,), ()),
        ("trainer.nnodes=2 trainer.node_rank=0", 0, 2, [(2,)], (), ()),
        ("trainer.async_steps=1", 0, 1, [(1,)], (), ()),
        ("trainer.placement=train:0-1,rollout:2,3", 0, 2, [(2,), (3,)], (), ()),
        (f"trainer.placement=train:0-1,rollout:2 {RM}", 0, 2, [(2,)], (3,), ()),
        (f"trainer.placement=train:0-1,rollout:2,reward:1 {RM}", 0, 2, [(2,)], (1,), ()),
        ("trainer.placement=train:0-1,rollout:0-1", 0, 2, [(0,), (1,)], (), (0, 1)),
        (f"{TABLE} {SPAN}=2 {RM}", 8, 8, [(0, 1)], (2, 3), (0,)),
        (
            f"trainer.placement=train:0-3,rollout:0-1,reward:2-3 {RM}",
            0,
            4,
            [(0,), (1,)],
            (2, 3),
            (0, 1),
        ),
        (f"{PARTLY} {SPAN}=2", 8, 6, [(4, 5), (6, 7)], (), (0,)),
        (
            f"trainer.n_gpus_per_node=8 trainer.placement=train:0-4,rollout:4-7 {SPAN}=2",
            8,
            5,
            [(4, 5), (6, 7)],
            (),
            (0,),
        ),
        ("trainer.placement=train:0-1,rollout:0-3", 0, 2, [(0,), (1,), (2,), (3,)], (), (0, 1)),
    ],
)
def test_everybody_has_a_place(
    overrides: str,
    gpus: int,
    train: int,
    rollout: list[tuple[int, ...]],
    reward: tuple[int, ...],
    sleepers: tuple[int, ...],
) -> None:
    settings = config(overrides)
    placed = placement_of(settings, gpus)
    assert placed.train == tuple(range(train))
    assert placed.rollout == tuple(rollout)
    assert (placed.reward, placed.sleepers) == (reward, sleepers)
    assert learner_ranks(settings, gpus) == train


def test_a_split_leaves_ranks_that_divide() -> None:
    overrides = (
        "trainer.n_gpus_per_node=8 trainer.nnodes=2 trainer.node_rank=0 trainer.async_steps=1"
    )
    settings = config(f"{overrides} trainer.tensor_parallel_size=2 {SPAN}=2")
    assert (learner_ranks(settings, 8), data_ranks(settings, 8)) == (12, 6)
    sharded = config(f"{overrides} actor.fsdp_config.fsdp_size=8")
    assert learner_ranks(sharded, 8) == 8  # 12 would not make groups of 8
    samplers = placement_of(settings, 8).rollout
    assert samplers == ((12, 13), (14, 15))
    assert {placement_of(settings, 8).node_of(d) for s in samplers for d in s} == {1}


def test_slots_are_on_no_node_yet() -> None:
    assert placement_of(config("trainer.num_workers=2"), 0).node_of(1) is None


def test_a_split_counts_only_the_ranks_that_train() -> None:
    overrides = "trainer.n_gpus_per_node=8 trainer.placement=train:0-3,rollout:4-7"
    assert learner_ranks(config(overrides), 8) == 4
    assert data_ranks(config(f"{overrides} trainer.tensor_parallel_size=4"), 8) == 1
    text = batch_arithmetic(config("actor.ppo_micro_batch_size_per_gpu=1"))
    parted = batch_arithmetic(config(f"{overrides} actor.ppo_micro_batch_size_per_gpu=1"))
    assert text["actor_micro_batches_at_most"] == 64
    assert parted["actor_micro_batches_at_most"] == 16


@pytest.mark.parametrize(
    ("overrides", "gpus", "lines"),
    [
        ("", 0, ["one process on the CPU trains and samples"]),
        ("", 1, ["one process on the GPU trains and samples"]),
        (
            f"trainer.n_gpus_per_node=8 {SPAN}=2",
            8,
            [
                "8 learner ranks on GPUs 0-7, 4 samplers of 2 GPUs on GPUs 0-7 "
                "(asleep on GPUs 0-7 while training)"
            ],
        ),
        (
            "trainer.n_gpus_per_node=8 trainer.placement=train:0-4,rollout:6-7,reward:4",
            8,
            [
                "5 learner ranks on GPUs 0-4, 2 samplers of 1 GPU on GPUs 6-7",
                "reward models on GPU 4 (shares 4 with training)",
                "GPU 5 does nothing",
            ],
        ),
        (
            f"{TABLE} {SPAN}=2 {RM}",
            8,
            [
                "8 learner ranks on GPUs 0-7, 1 sampler of 2 GPUs on GPUs 0-1 (asleep on "
                "GPUs 0-1 while training)",
                "reward models on GPUs 2-3 (shares 2-3 with training)",
            ],
        ),
        (
            f"{PARTLY},reward:5-6 {RM}",
            8,
            [
                "6 learner ranks on GPUs 0-5, 4 samplers of 1 GPU on GPUs 4-7 (asleep on GPUs "
                "4-5 while training)",
                "reward models on GPUs 5-6 (shares 5 with training and 5-6 with sampling)",
            ],
        ),
        (
            "trainer.placement=train:0-1,rollout:1-2",
            0,
            [
                "2 learner ranks on CPU slots 0-1, 2 samplers on CPU slots 1-2 (asleep on CPU "
                "slot 1 while training)"
            ],
        ),
        (
            "trainer.n_gpus_per_node=2 trainer.nnodes=2 trainer.node_rank=0",
            2,
            [
                "4 learner ranks on GPUs 0-3, 4 samplers of 1 GPU on GPUs 0-3 "
                "(asleep on GPUs 0-3 while training)",
                "node 0 has GPUs 0-1, node 1 has GPUs 2-3",
            ],
        ),
        (
            "trainer.num_workers=2 trainer.nnodes=2 trainer.node_rank=0",
            0,
            [
                "2 learner ranks on CPU slots 0-1, 1 sampler on CPU slot 2",
                "the slots are spread over 2 nodes",
            ],
        ),
        ("trainer.engine=ray", 0, ["1 learner rank on CPU slot 0, 1 sampler on CPU slot 1"]),
    ],
)
def test_it_is_said_who_works_where(overrides: str, gpus: int, lines: list[str]) -> None:
    assert describe_placement(placement_of(config(overrides), gpus)) == lines


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("", "each model is sharded over 4 ranks, 4 ranks share the rows"),
        (
            "actor.fsdp_config.fsdp_size=2",
            "each model is sharded over 2 ranks, there are 2 copies of each model, 4 ranks share "
            "the rows",
        ),
        (
            "actor.fsdp_config.fsdp_size=1",
            "there are 4 copies of each model, 4 ranks share the rows",
        ),
        (
            "trainer.tensor_parallel_size=2",
            "each model is sharded over 2 ranks, each layer is split over 2 ranks, 2 groups of "
            "ranks share the rows",
        ),
        ("trainer.tensor_parallel_size=4", "each layer is split over 4 ranks"),
    ],
)
def test_the_plan_says_how_ranks_share_models_and_rows(overrides: str, message: str) -> None:
    plan = plan_devices(config(f"trainer.num_workers=4 {overrides}"), 0)
    assert plan.sentences[1:] == (message, "the sampler is hf, the processes are Ray's")


def test_the_plan_has_the_placement_for_programs() -> None:
    plan = make_plan(settle("trainer.num_workers=2")).as_dict()["placement"]
    assert (plan["engine"], plan["sampler"], plan["learner_ranks"]) == ("ray", "hf", 2)
    plan = json.loads(json.dumps(plan))
    assert (plan["rollout"], plan["sleepers"]) == ([[2]], [])
