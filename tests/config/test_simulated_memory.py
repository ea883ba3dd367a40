"""The memory plan of GPUs against the peaks of a simulated learner, 0.5B to 72B.

`simulated_memory.json` holds the config.json of each model, the settings of each run, and the
highest moment of each phase on rank 0 in GB (10^9 bytes), sampler left out. A simulation runs the
learner on tensors without numbers: `ppo plan --simulate` repeats one for a run's settings (not
weights in 4 bits and AdamW8bit, for which the allocations of bitsandbytes were stood in for).
References that stay on the device were simulated in float32; the figures have them in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.planning.memory.devices import ModelShapes
from ppo_cli.planning.memory.plan import estimate_memory
from tests.settings import with_gpus

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("simulated_memory.json").read_text())
WITHIN = 0.10


@pytest.mark.parametrize("case", DATA["cases"])
def test_the_plan_is_within_10_percent_of_the_simulation(case: str) -> None:
    run = DATA["cases"][case]
    shape = Shape.from_config(DATA["models"][run["model"]])
    assert shape is not None
    trainer = {"n_gpus_per_node": run["gpus_per_node"], "nnodes": run["nodes"]}
    config = Config.model_validate({"model": {"dtype": "bfloat16"}, "trainer": trainer})
    config = with_settings(config, run["settings"])
    machine = with_gpus(run["gpus_per_node"], run["gb"] * 10**9)
    config = settle(config, machine).config
    place, *_ = estimate_memory(config, ModelShapes(shape, shape, shape), machine).places
    off = {
        phase: f"{place.phases[phase] / 1e9:.2f} GB planned, {simulated} simulated"
        for phase, simulated in run["simulated_gb"].items()
        if abs(place.phases[phase] / 1e9 / simulated - 1) > WITHIN
    }
    assert off == {}


def test_the_simulations_cover_what_users_choose() -> None:
    cases = DATA["cases"].values()
    used = {key for run in cases for key in run["settings"]}
    assert len(cases) >= 24
    assert {
        "model.lora_rank", "model.quantization", "actor.fsdp_config.param_offload",
        "actor.fsdp_config.optimizer_offload", "actor.fsdp_config.fsdp_size",
        "actor.fsdp_config.reshard_after_forward", "actor.optim.optimizer", "model.packing",
        "trainer.tensor_parallel_size", "actor.ppo_micro_batch_size_per_gpu", "rollout.n",
    } <= used  # fmt: skip
    kinds = {DATA["models"][run["model"]]["model_type"] for run in cases}
    assert {"qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "phi3"} <= kinds
