"""Clashes, remarks and missing parts of runs with several processes."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ppo_cli.errors import ConfigError
from ppo_cli.machine.device_record import FEATURES
from ppo_cli.machine.machine import PACKAGES
from ppo_cli.planning.resolved import Resolved
from tests.config import settling
from tests.config.settling import problems, refusals, remarks
from tests.settings import with_gpus

SPAN = "rollout.tensor_model_parallel_size"
EIGHT = "trainer.n_gpus_per_node=8"


def settle(*overrides: str, gpus: int = 0, packages: Collection[str] = PACKAGES) -> Resolved:
    """Settings on a machine whose self-test has passed (else: test_weight_transfer)."""
    machine = with_gpus(gpus, proven=FEATURES, packages=packages)
    return settling.settle(*overrides, machine=machine)


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        ("trainer.engine=verl", 0, "Use --engine ray, or --engine local for one process"),
        ("trainer.n_gpus_per_node=1", 0, "no GPU is visible here; leave --n_gpus out"),
        ("trainer.n_gpus_per_node=4", 2, "2 GPUs are visible here; use 2"),
        ("rollout.name=vllm", 0, "run `scripts/setup vllm`, or use --rollout_name hf"),
        ("trainer.num_workers=2", 0, "pip install ray"),
        ("model.lora_rank=8", 0, "pip install peft"),
    ],
)
def test_a_part_that_is_not_there_is_said_in_a_sentence(
    overrides: str, gpus: int, message: str
) -> None:
    lacking = {"ray": "num_workers", "peft": "lora", "vllm": "rollout"}
    absent = {name for name, word in lacking.items() if word in overrides}
    machine = {*PACKAGES} - absent
    (sentence,) = refusals(settle(*overrides.split(), gpus=gpus, packages=machine), {})
    assert message in sentence


def test_a_running_cluster_may_have_gpus_that_are_not_here() -> None:
    assert refusals(settle(EIGHT), {"RAY_ADDRESS": "10.0.0.1:6379"}) == []


def test_the_nodes_of_a_running_cluster_need_no_rank() -> None:
    assert problems("trainer.nnodes=4", env={"RAY_ADDRESS": "10.0.0.1:6379"}) == ()


BY_TOKEN = "algorithm.rollout_correction.rollout_is=token"
BYPASS = (
    "algorithm.rollout_correction.bypass_mode=true trainer.engine=ray rollout.name=vllm "
    "trainer.n_gpus_per_node=2"
)
EIGHT_RANKS = "trainer.num_workers=8 data.train_batch_size="


@pytest.mark.parametrize(
    ("overrides", "gpus", "message"),
    [
        (BYPASS, 2, "nothing compares its weights with the trainer's"),
        ("", 2, "2 GPUs are visible, and one is used; --n_gpus 2 uses them all."),
        ("actor.strategy=fsdp", 0, "actor.strategy fsdp is FSDP2 here."),
        (f"trainer.async_steps=2 data.max_response_length=99 {BY_TOKEN}", 0, "partial_tokens 50"),
        (f"trainer.async_steps=1 rollout.partial_tokens=512 {BY_TOKEN}", 0, "512 has no effect"),
        (f"trainer.async_steps=2 rollout.partial_tokens=100 {BY_TOKEN}", 0, "over 200 tokens are"),
        ("trainer.placement=train:0,rollout:1,reward:2", 0, "no reward model runs on any of them"),
        (f"{EIGHT_RANKS}4 actor.ppo_mini_batch_size=4", 0, "makes 4 response(s) for 8 ranks"),
        (f"{EIGHT_RANKS}256 critic.ppo_mini_batch_size=4", 0, "critic.ppo_mini_batch_size makes 4"),
        (
            "trainer.n_gpus_per_node=3 trainer.nnodes=2 trainer.node_rank=0 "
            "trainer.tensor_parallel_size=2",
            3, "split over two nodes, which is slow",
        ),
    ],
)  # fmt: skip
def test_what_may_surprise_is_remarked_on(overrides: str, gpus: int, message: str) -> None:
    (note,) = remarks(settle(*overrides.split(), gpus=gpus), {})
    assert message in note


def test_partial_rollouts_are_described_with_their_tokens() -> None:
    partial = "trainer.async_steps=2 rollout.partial_tokens=100"
    (note,) = remarks(settle(*partial.split(), BY_TOKEN, "data.max_response_length=150"), {})
    assert "150 in all" in note and "sampled to its end" not in note


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ("trainer.n_gpus_per_node=1", 2),
        ("trainer.n_gpus_per_node=2 trainer.tensor_parallel_size=2", 2),
        (f"{EIGHT_RANKS}8 actor.ppo_mini_batch_size=8", 0),
        (f"{EIGHT_RANKS}8 actor.ppo_mini_batch_size=4 rollout.n=2", 0),
        (f"{EIGHT_RANKS}8 critic.ppo_mini_batch_size=4 rollout.n=2", 0),
    ],
)
def test_what_just_fits_is_not_remarked_on(overrides: str, gpus: int) -> None:
    assert remarks(settle(*overrides.split(), gpus=gpus), {}) == []


@pytest.mark.parametrize(
    ("overrides", "installed", "message"),
    [(EIGHT, False, 1), (EIGHT, True, 0), (f"{EIGHT} rollout.name=hf", False, 0)],
)
def test_the_slower_sampler_does_not_come_in_silence(
    overrides: str, installed: bool, message: int
) -> None:
    packages = PACKAGES if installed else ("ray",)
    notes = remarks(settle(*overrides.split(), gpus=8, packages=packages), {})
    assert sum("scripts/setup vllm" in note for note in notes) == message == len(notes)


def test_a_cluster_that_is_not_used_is_remarked_on() -> None:
    (note,) = remarks(settle(), {"RAY_ADDRESS": "auto"})
    assert "--engine ray runs it in that cluster" in note
    assert remarks(settle("trainer.engine=ray"), {"RAY_ADDRESS": "auto"}) == []


def test_launchers_may_name_the_first_of_one_node() -> None:
    resolved = settling.settle(
        env={"MASTER_ADDR": "host", "NODE_RANK": "0", "MASTER_PORT": "29500"}
    )
    assert refusals(resolved, {}) == []
    (note,) = remarks(resolved, {})[:1]
    assert "with one node it changes nothing" in note


def test_workers_beside_gpus_are_not_started() -> None:
    (line,) = problems("trainer.num_workers=2", machine=with_gpus(2))
    assert "but 2 GPU(s) are used; leave it out, or hide them" in line


def test_a_placement_can_be_read_also_on_the_engine_of_a_package() -> None:
    for engine in ("ray", "verl"):
        (line,) = problems(f"trainer.engine={engine}", "trainer.placement=nonsense")
        assert "comes before any role" in line


def test_offloading_needs_a_gpu_or_several_processes() -> None:
    overrides = "actor.fsdp_config.optimizer_offload=true"
    (line,) = remarks(settle(overrides), {})
    assert "everything is in host memory" in line
    assert remarks(settle(overrides, gpus=1), {}) == []
    assert remarks(settle(overrides, "trainer.engine=ray"), {}) == []


def test_more_threads_than_a_core_can_take_are_refused() -> None:
    settle("trainer.threads=16")
    settling.settle("trainer.threads=4096", env={"RAY_ADDRESS": "10.0.0.1:6379"})
    with pytest.raises(ConfigError, match=r"threads 17 is more than 4 for each of the 4 cores"):
        settle("trainer.threads=17")
