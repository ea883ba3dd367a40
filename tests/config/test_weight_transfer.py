"""How new weights reach the samplers: what auto comes to, and what cannot be had."""

from __future__ import annotations

import pytest

from ppo_cli.config.settle import settle as apply_rules
from ppo_cli.machine.device_record import FEATURES, Feature
from ppo_cli.planning.memory.plan import fit_memory
from ppo_cli.planning.placement import plan_devices
from tests.config.settling import device_notes, settle
from tests.settings import with_gpus

VLLM = "rollout.name=vllm"
FOUR = "trainer.n_gpus_per_node=4"
SPLIT = "trainer.placement=train:0-2,rollout:3"
SHARED = "trainer.placement=train:0-3,rollout:0-3"
WITHIN = "trainer.placement=train:0-3,rollout:0-1"
PARTLY = "trainer.placement=train:0-2,rollout:2-3"
LORA = "model.lora_rank=8"
NODES = "trainer.nnodes=2 trainer.node_rank=0"


@pytest.mark.parametrize(
    ("overrides", "gpus", "way"),
    [
        ("", 0, "memory"),
        ("", 8, "memory"),
        (VLLM, 0, "memory"),
        (f"{VLLM} trainer.num_workers=2", 0, "memory"),
        (f"{VLLM} trainer.placement=train:0,rollout:0", 0, "memory"),
        (f"{VLLM} trainer.n_gpus_per_node=0", 8, "memory"),
        ("rollout.name=hf trainer.n_gpus_per_node=4", 4, "memory"),
        (f"rollout.name=hf {FOUR} {SPLIT}", 4, "memory"),
        (VLLM, 1, "ipc"),
        (FOUR, 4, "ipc"),
        (f"{VLLM} {FOUR} {SHARED}", 4, "ipc"),
        (f"{FOUR} {NODES}", 4, "ipc"),
        (f"{FOUR} {WITHIN}", 4, "ipc"),
        (f"{FOUR} {PARTLY}", 4, "memory"),
        (f"{FOUR} {SPLIT}", 4, "nccl"),
        (f"{FOUR} trainer.async_steps=1", 4, "nccl"),
        (f"{FOUR} {NODES} trainer.placement=train:0-3,rollout:4-7", 4, "nccl"),
        # Only the adapter travels, unless it is merged.
        (f"{FOUR} {LORA}", 4, "memory"),
        (f"{FOUR} {LORA} model.lora_merge=true", 4, "ipc"),
        (f"{FOUR} {SPLIT} {LORA} model.lora_merge=true", 4, "nccl"),
        # What is chosen is taken.
        ("rollout.weight_transfer=memory", 0, "memory"),
        (f"{FOUR} rollout.weight_transfer=memory", 4, "memory"),
        (f"{VLLM} {LORA} rollout.weight_transfer=memory", 0, "memory"),
        (f"{FOUR} rollout.weight_transfer=gloo", 4, "gloo"),
        (f"{VLLM} rollout.weight_transfer=gloo", 0, "gloo"),
        (f"{VLLM} {LORA} model.lora_merge=true rollout.weight_transfer=gloo", 0, "gloo"),
        (f"{FOUR} {PARTLY} rollout.weight_transfer=gloo", 4, "gloo"),
        (f"{FOUR} {SPLIT} rollout.weight_transfer=nccl", 4, "nccl"),
        (f"{FOUR} {WITHIN} rollout.weight_transfer=ipc", 4, "ipc"),
    ],
)
def test_the_way_follows_from_devices_and_sampler(overrides: str, gpus: int, way: str) -> None:
    resolved = settle(*overrides.split(), machine=with_gpus(gpus, proven=FEATURES))
    assert resolved.config.rollout.weight_transfer == way


@pytest.mark.parametrize(
    ("overrides", "features", "way", "sleep", "slow"),
    [
        ("", (), "memory", "offload", ("not by ipc", "vLLM's weights are kept")),
        ("", ("transfer_nccl", "sleep"), "memory", "discard", ("not by ipc",)),
        ("", ("transfer_ipc",), "ipc", "offload", ("vLLM's weights are kept",)),
        ("", ("transfer_ipc", "sleep"), "ipc", "discard", ()),
        (SPLIT, ("transfer_ipc",), "memory", "offload", ("not by nccl",)),
        (SPLIT, ("transfer_nccl",), "nccl", "offload", ()),
        (LORA, (), "memory", "offload", ()),
        (LORA, ("transfer_ipc", "sleep"), "memory", "offload", ()),
        ("rollout.weight_transfer=ipc rollout.sleep=discard", (), "ipc", "discard", ()),
    ],
)
def test_auto_takes_what_the_self_test_has_proven(
    overrides: str, features: tuple[Feature, ...], way: str, sleep: str,
    slow: tuple[str, ...],
) -> None:  # fmt: skip
    machine = with_gpus(4, proven=("packed_attention", *features))
    resolved = settle(VLLM, FOUR, *overrides.split(), machine=machine)
    rollout = fit_memory(apply_rules(resolved.requested, machine)).config.rollout
    assert (rollout.weight_transfer, rollout.sleep) == (way, sleep)
    lines = [line for line in device_notes(resolved, {}) if "self-test" in line]
    assert len(lines) == bool(slow)
    for fragment in slow:
        assert fragment in lines[0] and lines[0].endswith(
            "doctor --self-test` tries the faster ways."
        )


def test_the_plan_tells_the_way() -> None:
    def lines(*overrides: str, gpus: int) -> tuple[str, ...]:
        machine = with_gpus(gpus, proven=FEATURES)
        return plan_devices(settle(*overrides, machine=machine).config, machine, {}).sentences

    assert "new weights are sent by nccl" in lines(VLLM, FOUR, SPLIT, gpus=4)
    assert "new weights" not in " ".join(lines("trainer.num_workers=2", gpus=0))
