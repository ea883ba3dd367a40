"""GPUs that torch cannot use are refused, with the command that repairs the environment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.machine import machine as machine_module
from ppo_cli.machine import torch_build
from ppo_cli.machine.gpus import list_gpus, pin_gpu_order
from ppo_cli.machine.torch_build import TorchBuild, read_build
from ppo_cli.planning.findings.devices import unusable_gpus
from ppo_cli.planning.findings.judge_server import judge_fault
from ppo_cli.planning.findings.scene import Scene
from tests.config.settling import device_notes, settle
from tests.nvml import DRIVER, GIB, GT_1030, RTX_4090, T4, Machine, h100

OLD_DRIVER = "driver|550.54.15|12040"
B200 = f"card|NVIDIA B200|GPU-b200|{180 * GIB}|10.0|18944|1965"
NAMED = "RTX 4090 (compute capability 8.9, driver 580.95.05 for CUDA 13.0)"
CPU, CUDA_12, CUDA_13 = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0+cu126", (12, 6)), (
    TorchBuild("2.13.0", (13, 0))
)  # fmt: skip


def pip_line(name: str) -> str:
    index = f"https://download.pytorch.org/whl/{name}"
    return f"Run `{sys.executable} -m pip install torch==2.13.0+{name} --index-url {index}`."


@pytest.mark.parametrize(
    ("lines", "build", "parts"),
    [
        ((DRIVER, RTX_4090), CPU, (NAMED, "2.13.0+cpu is built for CPUs.", pip_line("cu130"))),
        ((OLD_DRIVER, RTX_4090), CPU, ("driver 550.54.15 for CUDA 12.4", pip_line("cu126"))),
        ((OLD_DRIVER, RTX_4090), CUDA_13,
         ("built for CUDA 13.0, which needs driver 580 or newer", pip_line("cu126"))),
        (("driver|470.256|11040", RTX_4090), CUDA_13, ("Update NVIDIA's driver to 580 or newer.",)),
        ((OLD_DRIVER, B200), CUDA_13, ("Update NVIDIA's driver to 580 or newer.",)),
        ((DRIVER, GT_1030), CUDA_13, ("CUDA 13.0, which has no code for this", pip_line("cu126"))),
        ((DRIVER, B200), CUDA_12, ("CUDA 12.6, which has no code for this", pip_line("cu130"))),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_with_its_repair(
    lines: tuple[str, ...], build: TorchBuild, parts: tuple[str, ...],
    machine: Machine, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    machine.set(*lines)
    monkeypatch.setattr(machine_module, "read_build", lambda: build)
    monkeypatch.setattr(torch_build, "setup_command", lambda: None)
    why = str(machine_module.Machine.here().gpu_fault(1))
    assert all(part in why for part in parts), why
    assert why.endswith('To compute on the CPU: `export CUDA_VISIBLE_DEVICES=""`.')
    assert machine_module.Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpu_fault(1) is None


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        ((DRIVER,), CPU), ((DRIVER, RTX_4090), CUDA_13), ((DRIVER, RTX_4090), CUDA_12),
        ((OLD_DRIVER, RTX_4090), CUDA_12), ((DRIVER, T4), CUDA_13), ((DRIVER, B200), CUDA_13),
        ((DRIVER, GT_1030, RTX_4090), CUDA_13), ((DRIVER, RTX_4090), None),
        ((DRIVER, B200), TorchBuild("2.13.0+cu128", (12, 8))),
    ],
)  # fmt: skip
def test_what_can_be_used_is_not_refused(
    lines: tuple[str, ...], build: TorchBuild | None,
    machine: Machine, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    machine.set(*lines)
    monkeypatch.setattr(machine_module, "read_build", lambda: build)
    assert machine_module.Machine.here().gpu_fault(1) is None


def test_an_environment_of_the_set_up_is_repaired_by_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.set(DRIVER, RTX_4090)
    monkeypatch.setattr(machine_module, "read_build", lambda: CPU)
    root, elsewhere = tmp_path / "the checkout", tmp_path / "elsewhere"
    monkeypatch.setattr("ppo_cli.machine.versions.ROOT", root)
    monkeypatch.chdir(tmp_path)
    for path in (root / "scripts/setup", root / ".venv/ready.run", elsewhere / "ready.run"):
        path.parent.mkdir(parents=True)
        path.touch()
    script, folder = (shlex.quote(str(path)) for path in (root / "scripts/setup", elsewhere))
    monkeypatch.setattr(sys, "prefix", str(elsewhere))
    fault = "Run `PPO_VENV={} {}`."
    assert fault.format(folder, script) in str(machine_module.Machine.here().gpu_fault(1))
    (elsewhere / "ready.dev").touch()
    monkeypatch.chdir(root)
    line = fault.format(folder, "scripts/setup dev")
    assert line in str(machine_module.Machine.here().gpu_fault(1))
    monkeypatch.setattr(sys, "prefix", str(root / ".venv"))
    assert "Run `scripts/setup`." in str(machine_module.Machine.here().gpu_fault(1))


def test_the_build_is_read_from_torch_s_files(tmp_path: Path) -> None:
    import torch

    build, cuda = read_build(), torch.version.cuda
    assert build is not None and build.version == torch.__version__
    assert build.cuda == (cuda and tuple(map(int, cuda.split("."))))
    python = tmp_path / "bin" / "python"
    assert read_build(str(python)) is None
    folder = tmp_path / "lib/python3.12/site-packages/torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text("__version__ = '2.14.0+cu132'\ncuda = '13.2'\n")
    assert read_build(str(python)) == TorchBuild("2.14.0+cu132", (13, 2))


def test_a_driver_that_does_not_answer_is_named(machine: Machine, tmp_path: Path) -> None:
    from ppo_cli.machine.gpus import Inventory

    for fault, advice in (
        ("RM has detected an NVML/RM version mismatch.", "`sudo reboot`"),
        ("NVML Shared Library Not Found", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("Unknown Error", "`nvidia-smi`"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                machine_module, "read_inventory", lambda root, fault=fault: Inventory(fault=fault)
            )
            why = str(machine_module.Machine.here({}).gpu_fault(1))
            assert fault.rstrip(".") + ". " in why and advice in why
            assert machine_module.Machine.here({"CUDA_VISIBLE_DEVICES": "-1"}).gpu_fault(1) is None


def test_the_order_of_unequal_cards_is_written_down(machine: Machine) -> None:
    machine.set(DRIVER, GT_1030, RTX_4090)
    for environ, expected in (
        ({}, "1,0"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1030b"}, "0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ""),
    ):
        before = list_gpus(environ)
        pin_gpu_order(environ)
        assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": expected}
        assert list_gpus(environ) == before
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    pin_gpu_order(chosen)
    assert chosen == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    machine.set(DRIVER, h100(0), h100(1))
    equal: dict[str, str] = {}
    pin_gpu_order(equal)
    assert equal == {}


def test_a_judge_s_environment_for_cpus_is_not_used_on_a_gpu(
    machine: Machine, tmp_path: Path
) -> None:
    folder = tmp_path / "lib/python3.11/site-packages/torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    python = str(tmp_path / "bin" / "python")
    machine.set(DRIVER)
    assert judge_fault(machine_module.Machine.here(), {"PPO_VLLM_PYTHON": python}) is None
    machine.set(DRIVER, RTX_4090)
    why = str(judge_fault(machine_module.Machine.here(), {"PPO_VLLM_PYTHON": python}))
    assert f"torch 2.13.0+cpu is built for CPUs, the one of {python}" in why
    assert "`unset PPO_VLLM_PYTHON; scripts/setup vllm`" in why
    (folder / "version.py").write_text("__version__ = '2.13.0'\ncuda = '13.0'\n")
    assert judge_fault(machine_module.Machine.here(), {"PPO_VLLM_PYTHON": python}) is None


needs_cpu_build = pytest.mark.skipif(
    getattr(read_build(), "cuda", None) is not None, reason="torch is built for GPUs here"
)


@needs_cpu_build
@pytest.mark.parametrize(
    "command",
    [
        "plan --preset embedded", "train --preset embedded --max_steps 1",
        "train --preset embedded --engine ray --n_gpus 1", "generate embedded 1+1",
        "eval embedded --data embedded",
    ],
)  # fmt: skip
def test_commands_refuse_a_gpu_that_torch_cannot_use(
    command: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    machine.set(DRIVER, RTX_4090)
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert NAMED in error
    assert "cannot be used: torch 2.13.0+cpu is built for CPUs. Run `" in error
    assert not (tmp_path / "outputs").exists()


@needs_cpu_build
def test_a_run_that_is_planned_for_the_cpu_starts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(DRIVER, RTX_4090)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["plan", "--preset", "embedded"]) == 0


SEEN = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("card", "dtype", "refused"),
    [(T4, "bfloat16", True), (T4, None, False), (RTX_4090, "bfloat16", False)],
)
def test_bfloat16_on_a_gpu_without_it_is_refused_by_vllm(
    card: str, dtype: str | None, refused: bool, machine: Machine
) -> None:
    machine.set(DRIVER, card)
    overrides = ["rollout.name=vllm", *([f"model.dtype={dtype}"] if dtype else [])]
    lines = list(unusable_gpus(Scene(settle(*overrides, env=SEEN), {})))
    lines = [line for line in lines if "vLLM does not compute" in line]
    assert len(lines) == refused
    assert all("in bfloat16 on a Tesla T4: leave --dtype out" in line for line in lines)


def test_what_a_gpu_computes_in_is_remarked(machine: Machine) -> None:
    def remarks(dtype: str | None) -> str:
        resolved = settle(*([f"model.dtype={dtype}"] if dtype else []), env=SEEN)
        return " ".join(device_notes(resolved, {}))

    machine.set(DRIVER, T4)
    assert "A Tesla T4 has no bfloat16: models compute in float32." in remarks(None)
    assert "A Tesla T4 emulates bfloat16" in remarks("bfloat16")
    machine.set(DRIVER, RTX_4090)
    assert "bfloat16" not in remarks(None) + remarks("bfloat16")
