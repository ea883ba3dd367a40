"""Simulate tiny configs on 1 and 8 ranks, in a process of its own; prints JSON.

    simulated_steps.py FOLDER

The device is registered for good, so that no other test may run in this process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.algo.batch import TrainBatch
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.training.optimizer import Optimizer
from ppo_cli.extras.lab.simulation import steps
from ppo_cli.extras.lab.simulation.counters import CollectiveCounter, MemoryCounter, Watch
from ppo_cli.extras.lab.simulation.device import DEVICE, NAME, Simulator, register
from ppo_cli.planning.memory.plan import with_settings
from tests.engine.tiny_families import FAMILIES, SIZE
from tests.settings import complete, with_gpus

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KEYS = 4096, 256, 512, 2, 4, 2
RANK, WIDE_RANK = 4, 256
BUDGET = 300  # tokens: 2 of the longest rows leave 44 over
BASE: dict[str, Any] = {
    "data": {"max_prompt_length": 64, "max_response_length": 64, "train_batch_size": 64},
    "actor": {"ppo_mini_batch_size": 64},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
}


def write_model(folder: Path) -> str:
    """A config without weights: none are read."""
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KEYS,
        tie_word_embeddings=False, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def make_config(path: str, ranks: int, **settings: Any) -> Config:
    """A run on so many GPUs of one node."""
    model = {"path": path, "dtype": "bfloat16", "enable_gradient_checkpointing": True}
    trainer = {"n_gpus_per_node": ranks, "engine": "ray" if ranks > 1 else "local"}
    rollout = {"name": "vllm" if ranks > 1 else "hf"}
    sections = BASE | {"model": model, "trainer": trainer, "rollout": rollout}
    asked = with_settings(Config.model_validate(sections), settings)
    return complete(asked, with_gpus(ranks))


def measure(config: Config) -> dict[str, Any]:
    """The measurements, and the bytes of gradients when each optimizer step begins."""
    gradients: list[int] = []
    simulator, apply = Simulator(), Optimizer.apply

    def note(optimizer: Optimizer) -> Any:
        gc.collect()
        by_maker = simulator.device_memory.by_maker
        gradients.append(by_maker["backward pass"] + by_maker["reduce-scatter buffers"])
        return apply(optimizer)

    with (
        patch.object(steps, "Simulator", lambda: simulator),
        patch.object(Optimizer, "apply", note),
    ):
        return asdict(steps.simulate(config)) | {"gradients": gradients}


def peaks_by_torch(config: Config) -> dict[str, int]:
    """The peak of the actor's update by us and by torch's own tracker, in bytes."""
    peaks: dict[str, int] = {}

    def track(
        simulator: Simulator, name: str, batch: TrainBatch, _budget: Any, work: Any, *_: Any
    ) -> None:
        if name != "update of the actor":
            return
        rank0 = work.func.__closure__[0].cell_contents
        work(batch)
        gc.collect()
        simulator.device_memory.restart()
        work(batch)
        peaks["ours"] = simulator.device_memory.peak_bytes
        gc.collect()
        root, adamw = rank0.policy.weights_context._root, rank0._actor.optimizer._adamw
        tracker = FSDPMemTracker(root, adamw)
        with tracker:
            work(batch)
        snapshot: Any = tracker.get_tracker_snapshot("peak")
        peaks["torch's"] = snapshot[DEVICE]["Total"]

    with patch.object(steps, "_measure", track):
        steps.simulate(config)
    return peaks


class RealMemory(MemoryCounter):
    """Host memory that tensors with numbers take."""

    def record(self, tensor: Tensor) -> None:
        """Count what is not fake."""
        if not isinstance(tensor, FakeTensor):
            super().record(tensor)


def load_for_real(config: Config) -> dict[str, int]:
    """Bytes that loading a config takes of this machine, and of the simulated device."""
    real, simulator = RealMemory("cpu"), Simulator()
    simulator._memories = (*simulator._memories, real)
    with (
        patch.object(steps, "Simulator", lambda: simulator),
        patch.object(steps, "_phases", lambda _: ()),
    ):
        at_rest = steps.simulate(config).rest_by_maker
    return {"real": real.peak_bytes, "simulated": at_rest["parameters"]}


def one_layer() -> dict[str, int]:
    """A linear layer of 64 x 32 weights on 16 rows, forward and backward."""
    simulator = Simulator()
    memory = simulator.device_memory
    with simulator:
        layer = torch.nn.Linear(32, 64, bias=False, device=DEVICE)
        rows = torch.zeros(16, 32).to(DEVICE)
        rest = memory.total_bytes
        memory.restart()
        simulator.operations.clear()
        layer(rows).sum().backward()
        sizes = {"rest": rest, "peak": memory.peak_bytes, "after": memory.total_bytes}
        work = vars(simulator.operations)
        names = ("launches", "flops", "product_bytes", "other_bytes")
        return sizes | {name: work[name] for name in names}


def cast_weights() -> dict[str, int]:
    """The copies that autocast keeps of a weight, trained and frozen, used twice in a block."""
    counts = {}
    for name, trained in (("trained", True), ("frozen", False)):
        simulator = Simulator()
        with simulator:
            weight = torch.empty(64, 32, device=DEVICE, requires_grad=trained)
            rows = torch.zeros(16, 32).to(DEVICE)
            with torch.no_grad():
                with torch.autocast(NAME, dtype=torch.bfloat16):
                    for _ in range(2):
                        torch.nn.functional.linear(rows, weight)
                    counts[f"{name}, inside"] = simulator.device_memory.total_bytes
                counts[f"{name}, after"] = simulator.device_memory.total_bytes
    return counts


def gated_unit() -> int:
    """The highest moment of the backward pass of SiLU, which is one kernel on GPUs."""
    simulator = Simulator()
    with simulator:
        rows = torch.zeros(16, 32).to(DEVICE).requires_grad_()
        torch.nn.functional.silu(rows).sum().backward()
    return simulator.device_memory.peak_bytes


def count_waits() -> int:
    """How often the stream that torch names took an event of the device."""
    module: Any = torch.get_device_module(DEVICE)
    for waits in range(20):
        try:
            torch.accelerator.current_stream().wait_event(module.Event())
        except RuntimeError:
            return waits
    return 20


def numbers_on_the_cpu() -> dict[str, int]:
    """The counters around tensors with numbers: nothing in them needs the simulated device."""
    memory = MemoryCounter("cpu")
    with Watch((memory,), CollectiveCounter()):
        weight = torch.ones(64, 32, requires_grad=True)
        loss = (weight * 2).sum()
        during = memory.total_bytes
        loss.backward()
        del loss
    return {"during": during, "after": memory.total_bytes, "peak": memory.peak_bytes}


def main(folder: Path) -> None:
    """Print all measurements."""
    register()
    path = write_model(folder)
    report: dict[str, Any] = {
        "one layer": one_layer(),
        "cast": cast_weights(),
        "gated unit": gated_unit(),
        "waits": count_waits(),
        "on the CPU": numbers_on_the_cpu(),
        "1": measure(make_config(path, 1)),
        "8": measure(make_config(path, 8)),
        "trackers": peaks_by_torch(make_config(path, 8)),
    }
    adapter = {
        "model.lora_rank": RANK, "actor.fsdp_config.optimizer_offload": True,
        "actor.ppo_max_token_len_per_gpu": BUDGET, "model.packing": True,
    }  # fmt: skip
    report["adapter, offloaded"] = measure(make_config(path, 8, **adapter))
    wide = make_config(path, 2, **{"model.lora_rank": WIDE_RANK})
    report["wide adapter"] = load_for_real(wide)
    CONFIG_MAPPING["qwen3_moe"](**SIZE, **FAMILIES["qwen3_moe"]).save_pretrained(folder / "experts")
    report["experts"] = measure(make_config(str(folder / "experts"), 1))
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
