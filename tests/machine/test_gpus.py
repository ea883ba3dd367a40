"""Which GPUs a process may use: NVML's list in CUDA's order, narrowed by CUDA's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from ppo_cli.machine import machine as machine_module
from ppo_cli.machine.gpus import (
    Gpu,
    driver_version,
    explain_hidden_gpus,
    list_gpus,
    read_inventory,
)
from ppo_cli.planning.memory.devices import device_memory
from ppo_cli.planning.placement import plan_devices
from tests.config.settling import device_notes, settle
from tests.nvml import DRIVER, GIB, GT_1030, RTX_4090, Machine, build_library, environment, h100
from tests.settings import complete


def uuids(**environ: str) -> list[str]:
    return [gpu.uuid for gpu in list_gpus(environ)]


def test_a_card_has_name_memory_and_capability(machine: Machine) -> None:
    machine.set(DRIVER, RTX_4090)
    assert list_gpus({}) == (
        Gpu("NVIDIA GeForce RTX 4090", "GPU-4090a", 24 * GIB, (8, 9)),
    )  # fmt: skip
    assert driver_version() == "580.95.05"
    assert read_inventory(Path("/")).cuda == (13, 0)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ("", ""), ("-1", ""), ("0", "0"), ("1,0", "10"), ("0,1,2,3", "012"), ("1,-1,0", "1"),
        (" 2 , 0", "20"), ("0,,1", "0"), ("7,0", ""), ("0,0", ""), ("nonsense", ""),
        ("GPU-h1002", "2"), ("GPU-h1002,GPU-h1000", "20"), ("GPU-h100", ""), ("GPU-none,0", ""),
        ("GPU-h1001,0", "10"), ("GPU-h1001,GPU-h1001", ""), ("1,GPU-h1001", ""), ("h1001", ""),
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_cuda_reads_them(
    visible: str, numbers: str, machine: Machine
) -> None:
    machine.set(DRIVER, *(h100(number) for number in range(3)))
    assert uuids(CUDA_VISIBLE_DEVICES=visible) == [f"GPU-h100{number}" for number in numbers]


def test_the_fastest_card_comes_first_unless_the_bus_orders(machine: Machine) -> None:
    machine.set(DRIVER, GT_1030, RTX_4090)
    assert uuids() == ["GPU-4090a", "GPU-1030b"]
    assert uuids(CUDA_VISIBLE_DEVICES="0") == ["GPU-4090a"]
    assert uuids(CUDA_DEVICE_ORDER="FASTEST_FIRST", CUDA_VISIBLE_DEVICES="1") == ["GPU-1030b"]
    assert uuids(CUDA_DEVICE_ORDER="PCI_BUS_ID") == ["GPU-1030b", "GPU-4090a"]
    assert uuids(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="1") == ["GPU-4090a"]


def a_slice(number: int, gib: int = 10) -> str:
    name = f"NVIDIA H100 80GB HBM3 MIG 1g.{gib}gb"
    return f"slice|{name}|MIG-5{number}|{gib * GIB}"


def test_a_process_sees_one_slice_of_a_split_card(machine: Machine) -> None:
    machine.set(DRIVER, h100(0), h100(1), "split", "hole", a_slice(0), a_slice(1, gib=20))
    assert list_gpus({}) == (Gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-50", 10 * GIB, (9, 0)),)
    assert uuids(CUDA_VISIBLE_DEVICES="MIG-51") == ["MIG-51"]
    assert uuids(CUDA_VISIBLE_DEVICES="MIG-51,MIG-50") == ["MIG-51"]
    assert uuids(CUDA_VISIBLE_DEVICES="0") == ["GPU-h1000"]
    assert uuids(CUDA_VISIBLE_DEVICES="0,1") == uuids(CUDA_VISIBLE_DEVICES="1") == ["MIG-50"]
    assert uuids(CUDA_VISIBLE_DEVICES="GPU-h1001") == []


def test_a_split_card_without_slices_is_not_usable(machine: Machine) -> None:
    machine.set(DRIVER, h100(0), "split")
    assert list_gpus({}) == ()


@pytest.mark.parametrize("visible", ["9", "none", "MIG-1234", "GPU-none,0", "7,0", "0,0", "h1001"])
def test_a_list_that_names_no_gpu_is_told(visible: str, machine: Machine) -> None:
    machine.set(DRIVER, h100(0), h100(1))
    idle = explain_hidden_gpus({"CUDA_VISIBLE_DEVICES": visible})
    assert idle is not None
    assert idle.startswith(f"CUDA_VISIBLE_DEVICES={visible} names none of the 2 GPUs here")


def test_a_list_that_ends_early_is_told(machine: Machine) -> None:
    machine.set(DRIVER, h100(0), h100(1))
    idle = explain_hidden_gpus({"CUDA_VISIBLE_DEVICES": "0,9,1"})
    assert idle is not None and 'names 1 of the 2 GPUs here: it ends at "9"' in idle


@pytest.mark.parametrize("visible", [None, "", "-1", " ", "0", "1,0", "1,-1,0", "GPU-h1001", "0,"])
def test_a_list_that_is_a_choice_is_not_told(visible: str | None, machine: Machine) -> None:
    machine.set(DRIVER, h100(0), h100(1))
    assert explain_hidden_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) is None


def test_a_machine_without_gpus_has_none_idle(machine: Machine) -> None:
    machine.set(DRIVER)
    assert explain_hidden_gpus({"CUDA_VISIBLE_DEVICES": "9"}) is None


@pytest.mark.parametrize("visible", [None, "1", "GPU-h1001", "0,1"])
def test_a_split_card_without_instances_is_told(visible: str | None, machine: Machine) -> None:
    machine.set(DRIVER, h100(0), h100(1), "split")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    idle = explain_hidden_gpus(environ)
    assert idle is not None and idle.startswith("GPU 1 (NVIDIA H100 80GB HBM3) is in MIG mode")
    assert "`sudo nvidia-smi mig -cgi 0 -C -i 1`" in idle
    assert explain_hidden_gpus({"CUDA_VISIBLE_DEVICES": "0"}) is None


def test_what_is_idle_is_a_remark_of_plans_and_runs(machine: Machine) -> None:
    machine.set(DRIVER, h100(0))
    environ = {"CUDA_VISIBLE_DEVICES": "9"}
    notes = list(device_notes(settle(env=environ), environ))
    assert explain_hidden_gpus(environ) in notes
    shown = settle(env={"CUDA_VISIBLE_DEVICES": "0"})
    assert not any("names none" in n for n in device_notes(shown, {}))


def test_one_memory_for_cpu_and_gpu_is_the_machine_s(machine: Machine) -> None:
    machine.set(DRIVER, "card|NVIDIA GB10|GPU-gb10|0|12.1|6144|2418")
    (gpu,) = list_gpus({})
    assert gpu.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_cards_of_which_nvml_knows_no_speed_keep_the_order_of_the_bus(machine: Machine) -> None:
    cards = [f"card|GRID A100|GPU-v{n}|{GIB}|8.0|0|0" for n in range(2)]
    machine.set(DRIVER, *cards)
    assert uuids() == ["GPU-v0", "GPU-v1"]


def test_a_driver_that_does_not_answer_is_a_fault_where_there_are_devices(
    machine: Machine, tmp_path: Path
) -> None:
    machine.set("error|18")
    assert read_inventory(tmp_path).fault is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    machine.set("error|18")  # a new process
    assert read_inventory(tmp_path).fault is None
    (tmp_path / "dev/nvidia0").touch()
    machine.set("error|18")
    fault = read_inventory(tmp_path).fault
    assert fault is not None and "version mismatch" in fault
    assert list_gpus({}, tmp_path) == ()
    machine.set(DRIVER, RTX_4090)
    assert read_inventory(tmp_path).fault is None and len(list_gpus({}, tmp_path)) == 1


def test_a_command_asks_nvml_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    starts, real = [], pynvml.nvmlInit

    def start() -> None:
        starts.append(1)
        real()

    monkeypatch.setattr(pynvml, "nvmlInit", start)
    for lines in ([DRIVER, RTX_4090], ["error|18"]):
        machine.set(*lines)
        main(["plan", "--preset", "embedded"])
        assert len(starts) == 1
        starts.clear()


def test_a_run_computes_in_what_all_of_its_gpus_have(machine: Machine) -> None:
    machine.set(DRIVER, GT_1030, RTX_4090)
    seen = machine_module.Machine.here({})
    proven = replace(seen, proven=frozenset({"float16"}))
    dtypes = [
        complete({"trainer": {"n_gpus_per_node": gpus}}, where).model.dtype
        for where in (seen, proven)
        for gpus in (1, 2)
    ]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "float16"]


def test_wsl_s_driver_that_does_not_answer_is_a_fault(machine: Machine, tmp_path: Path) -> None:
    machine.set("error|999")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()  # it is there without a driver, too
    assert read_inventory(tmp_path).fault is None
    library = tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    machine.set("error|999")
    assert read_inventory(tmp_path).fault is not None


def test_wsl_s_library_is_outside_of_the_loader_s_path(tmp_path: Path) -> None:
    library = tmp_path / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    library.parent.mkdir(parents=True)
    program = (
        "import sys; from pathlib import Path; from ppo_cli.machine.gpus import list_gpus\n"
        "print([gpu.uuid for gpu in list_gpus({}, Path(sys.argv[1]))], 'torch' in sys.modules)"
    )

    def listed() -> str:
        environ = {**os.environ, **environment(tmp_path, DRIVER, RTX_4090), "LD_LIBRARY_PATH": ""}
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert listed() == "[] False"
    library.symlink_to(build_library())
    assert listed() == "['GPU-4090a'] False"


def test_a_plan_counts_the_memory_of_the_gpus_that_are_used(machine: Machine) -> None:
    def planned(trainer: dict[str, int], **environ: str) -> tuple[int | None, str]:
        seen = machine_module.Machine.here(environ)
        config = complete({"trainer": trainer}, seen)
        sentences = plan_devices(config, seen, {}).sentences
        return device_memory(config.trainer, seen), "; ".join(sentences)

    machine.set(DRIVER, GT_1030, RTX_4090)
    memory, sentences = planned({})
    assert memory == 24 * GIB and "1 GPU here: NVIDIA GeForce RTX 4090, 24 GiB" in sentences
    memory, sentences = planned({"n_gpus_per_node": 2})
    assert memory == 2 * GIB and "GPU 1 is NVIDIA GeForce GT 1030, 2 GiB (memory is" in sentences
    assert planned({}, CUDA_VISIBLE_DEVICES="GPU-1030b")[0] == 2 * GIB
    machine.set(DRIVER, h100(0), h100(1), "split", a_slice(0))
    assert planned({})[0] == 10 * GIB
    machine.set(DRIVER, *(h100(number) for number in range(8)))
    memory, sentences = planned({"n_gpus_per_node": 8})
    assert memory == 80 * GIB and "8 GPUs here: NVIDIA H100 80GB HBM3, 80 GiB" in sentences
