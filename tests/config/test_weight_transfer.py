"""How new weights reach the samplers: what auto comes to, and what cannot be had."""

from __future__ import annotations

import pytest

from ppo_cli.config import placement
from ppo_cli.config.checks.devices import device_remarks
from ppo_cli.config.placement import plan_devices, sleep_mode, weight_transfer
from tests.config.settling import settle

VLLM = "rollout.name=vllm"
FOUR = "trainer.n_gpus_per_node=4"
SPLIT = "trainer.placement=train:0-2,rollout:3"
SHARED = "trainer.placement=train:0-3,rollout:0-3"
WITHIN = "trainer.placement=train:0-3,rollout:0-1"
PARTLY = "trainer.placement=train:0-2,rollout:2-3"
LORA = "model.lora_rank=8"
NODES = "trainer.nnodes=2 trainer.node_rank=0"


@pytest.mark.parametrize(
    ("given", "gpus", "way"),
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
        (f"{FOUR} rollout.weight_transfer=memory", 4, "memory"),
        (f"{FOUR} rollout.weight_transfer=gloo", 4, "gloo"),
        (f"{VLLM} rollout.weight_transfer=gloo", 0, "gloo"),
    ],
)
def test_the_way_follows_from_devices_and_sampler(
    given: str, gpus: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "has_package", lambda name: True)
    monkeypatch.setattr(placement, "is_proven", lambda feature: True)
    assert weight_transfer(settle(*given.split()).config, gpus) == way


@pytest.mark.parametrize(
    ("given", "features", "way", "sleep", "slow"),
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
    given: str, features: tuple[str, ...], way: str, sleep: str, slow: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(placement, "is_proven", features.__contains__)
    config = settle(VLLM, FOUR, *given.split()).config
    assert (weight_transfer(config, 4), sleep_mode(config)) == (way, sleep)
    said = [line for line in device_remarks(config, 4, {}) if "self-test" in line]
    assert len(said) == bool(slow)
    for words in slow:
        assert words in said[0] and said[0].endswith("doctor --self-test` tries the faster ways.")


@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("memory", ""),
        ("memory", f"{VLLM} {LORA}"),
        ("memory", f"{VLLM} {FOUR} {SPLIT}"),
        ("gloo", f"{VLLM} {FOUR}"),
        ("gloo", f"{VLLM} {LORA} model.lora_merge=true"),
        ("nccl", f"{VLLM} {FOUR} {SPLIT}"),
        ("ipc", f"{VLLM} {FOUR}"),
        ("ipc", f"{VLLM} {FOUR} {WITHIN}"),
        ("gloo", f"{VLLM} {FOUR} {PARTLY}"),
        ("auto", f"{VLLM} {LORA}"),
    ],
)
def test_what_can_be_gone_is_taken(way: str, given: str) -> None:
    found = settle(f"rollout.weight_transfer={way}", *given.split())
    assert found.config.rollout.weight_transfer == way


def test_the_plan_tells_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "is_proven", lambda feature: True)
    said = plan_devices(settle(VLLM, FOUR, SPLIT).config).sentences
    assert "new weights travel by nccl" in said
    assert "travel" not in " ".join(plan_devices(settle("trainer.num_workers=2").config).sentences)
