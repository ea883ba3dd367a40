"""`ppo plan --simulate`: what it refuses, and a whole simulation of the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ppo_cli.cli.app import main
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError
from ppo_cli.extras.lab.simulation.compiled import find_kernels
from ppo_cli.extras.lab.simulation.simulate import require_simulation, run_simulation
from ppo_cli.planning.resolve import resolve
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.work import GpuSpeed, Prediction, find_speed
from tests.settings import with_gpus

QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
# A preset and the config.json of its model.
PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k-qwen2.5-0.5b": QWEN | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
    "qwen2.5-7b-8gpu": QWEN | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "tie_word_embeddings": False, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def make_settings(preset: str | None, flags: dict[str, str]) -> Resolved:
    """The settings of a line."""
    typed = {name: (value, "flag") for name, value in flags.items()}
    return resolve(flags=typed, preset=preset, config_files=(), overrides=(), environ={})


def test_what_cannot_be_simulated_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    config = make_settings(None, {"trainer.n_gpus_per_node": "8"}).config
    for settings, fragment in {
        "trainer.n_gpus_per_node=0": "--simulate is for runs on GPUs",
        "actor.optim.optimizer=AdamW8bit": "actor.optim.optimizer is AdamW8bit",
        "model.quantization=nf4": "model.quantization holds weights in 4 bits",
    }.items():
        key, value = settings.split("=")
        refused = with_settings(config, {key: int(value) if value.isdigit() else value})
        with pytest.raises(ConfigError, match=fragment):
            require_simulation(refused)
    require_simulation(config)


@pytest.mark.parametrize(
    ("size", "count"), [("80GB", 80 * 10**9), ("24 GiB", 24 << 30), ("24564MiB", 24564 << 20)]
)
def test_the_plan_compares_with_the_memory_of_gpus_elsewhere(
    capfd: pytest.CaptureFixture[str], size: str, count: int
) -> None:
    main(["plan", "--n_gpus", "1", "--device_memory", size, "--json"])
    facts = json.loads(capfd.readouterr().out)
    assert facts["memory"]["devices"][0]["there"] == count
    assert facts["memory"]["fits"] is True


def test_a_prediction_by_hand() -> None:
    speed = GpuSpeed(tflops=100, gb_per_s=1000)
    work = {"flops": 60e12, "product_bytes": 1e9, "other_bytes": 1400e9, "launches": 1000}
    prediction = Prediction.make(speed, **work)
    assert prediction.seconds == pytest.approx(1.0 + 2.0)
    assert prediction.bound == "memory traffic between products"
    slow_host = Prediction.make(speed, **work | {"launches": 1e6})
    assert slow_host.seconds == pytest.approx(8.0) and "host" in slow_host.bound
    # Products that only copy are bound by traffic too.
    copies = Prediction.make(speed, **work | {"product_bytes": 7000e9})
    assert copies.seconds == pytest.approx(10.0 + 2.0)
    names = {
        "NVIDIA H100 PCIe": 756, "NVIDIA H100 80GB HBM3": 989, "Tesla T4": 65,
        "NVIDIA A100-SXM4-80GB": 312, "Tesla V100-SXM2-16GB": 125,
    }  # fmt: skip
    assert {name: find_speed(name).tflops for name in names} == names
    for other in ("NVIDIA GeForce GT 1030", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "RTX 4090 D"):
        assert find_speed(other) is None


def test_operations_between_products_are_one_kernel() -> None:
    def mlp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w).sigmoid() * 2, w.t()) + x

    kernels = find_kernels(make_fx(mlp)(torch.ones(2, 2), torch.ones(2, 2)).graph)
    names = {str(node): str(kernel) for node, kernel in kernels.items()}
    assert names.keys() == {"sigmoid", "mul", "add"}
    assert names["sigmoid"] == names["mul"] != names["add"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_bundled_model_on_8_gpus(capfd: pytest.CaptureFixture[str], compiled: bool) -> None:
    line = f"plan --n_gpus 8 --simulate --device_memory 80GB --json model.compile_layers={compiled}"
    main([*line.split(), "data.max_prompt_length=32", "data.max_response_length=32"])
    out, err = capfd.readouterr()
    simulation = json.loads(out)["simulation"]
    assert simulation["ranks"] == 8 and simulation["fits"] is True
    phases = simulation["phases"]
    assert [*phases] == ["annotation", "update of the actor", "update of the critic"]
    for phase in phases.values():
        assert phase["peak_bytes"] == sum(phase["peak_by_maker"].values())
        assert abs(phase["planned_bytes"] / phase["peak_bytes"] - 1) < 0.1
        assert min(phase["work"].values()) > 0
    assert (phases["update of the critic"]["work"]["launches"] < 300) is compiled
    assert "simulation: update of the critic" in err


@pytest.mark.weekly
@pytest.mark.parametrize("preset", PRESETS)
def test_the_plan_of_a_preset_is_within_10_percent_of_its_simulation(
    desk: Path, preset: str
) -> None:
    (desk / "config.json").write_text(json.dumps(PRESETS[preset]))
    resolved = make_settings(preset, {"model.path": str(desk), "trainer.n_gpus_per_node": "8"})
    simulation = run_simulation(resolved.requested, resolved.machine, print).as_dict()
    far = {
        name: phase["planned_bytes"] / phase["peak_bytes"] - 1
        for name, phase in simulation["phases"].items()
        if abs(phase["planned_bytes"] / phase["peak_bytes"] - 1) > 0.1
    }
    assert far == {}


RECORD = Path(__file__).parents[2] / "config" / "simulated_memory.json"
CASES: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())["cases"]
QUICK = "7B LoRA on one 80"  # the others take a minute and more
# What bitsandbytes computes was stood in for.
SIMULATED = [
    case
    for case, run in CASES.items()
    if not {"model.quantization", "actor.optim.optimizer"} & run["settings"].keys()
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case == QUICK else pytest.mark.weekly)
        for case in SIMULATED
    ],
)
def test_recorded_figures_are_simulated_again(case: str, tmp_path: Path) -> None:
    run = CASES[case]
    fields = json.loads(RECORD.read_text())["models"][run["model"]]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    trainer = {"n_gpus_per_node": run["gpus_per_node"], "nnodes": run["nodes"]}
    model = {"dtype": "bfloat16", "path": str(tmp_path)}
    config = Config.model_validate({"model": model, "trainer": trainer})
    machine = with_gpus(run["gpus_per_node"], run["gb"] * 10**9)
    # A list is none of the values that a setting of modules may have.
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in run["settings"].items()}
    simulation = run_simulation(with_settings(config, settings), machine, print)
    phases = simulation.measured["phases"]
    simulated = {name: phases[name]["peak_bytes"] / 1e9 for name in run["simulated_gb"]}
    assert simulated == pytest.approx(run["simulated_gb"], rel=0.02)
