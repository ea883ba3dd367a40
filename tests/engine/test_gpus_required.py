"""What a process does where torch and NVML do not agree on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ppo_cli.cluster.worker_process import Worker
from ppo_cli.engine.device import Compute, require_gpus
from ppo_cli.errors import MissingPart
from ppo_cli.machine import machine as machine_module
from ppo_cli.machine.torch_build import TorchBuild
from tests.nvml import DRIVER, RTX_4090, T4, Machine
from tests.settings import complete


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A torch for CUDA, of which the test says what `torch.cuda` gives."""
    monkeypatch.setattr(machine_module, "read_build", lambda: TorchBuild("2.13.0", (13, 0)))

    def give(*, available: bool, error: str = "") -> None:
        def start() -> None:
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "init", start)

    return give


def test_cuda_that_does_not_start_is_an_error_with_its_words(
    machine: Machine, cuda: Callable[..., None]
) -> None:
    machine.set(DRIVER, RTX_4090)
    cuda(available=False, error="CUDA unknown error - this may be due to a set-up\nmore")
    with pytest.raises(MissingPart, match=r"RTX 4090 .* cannot be used .*CUDA unkn") as e:
        require_gpus(machine_module.Machine.here(), 1)
    assert "nvidia-modprobe" in str(e.value) and "more" not in str(e.value)


def test_fewer_gpus_than_planned_is_an_error(machine: Machine, cuda: Callable[..., None]) -> None:
    machine.set(DRIVER, RTX_4090)
    cuda(available=True)
    require_gpus(machine_module.Machine.here(), 1)
    with pytest.raises(MissingPart, match="it sees 1 of 2 GPUs"):
        require_gpus(machine_module.Machine.here(), 2)


def test_a_gpu_that_is_not_counted_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(DRIVER)
    require_gpus(machine_module.Machine.here(), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MissingPart, match=r"NVML\) does not show.*CUDA_VISIBLE_DEVICES"):
        require_gpus(machine_module.Machine.here(), 0)


@pytest.mark.parametrize(("card", "dtype"), [(RTX_4090, "bfloat16"), (T4, "float32")])
def test_a_gpu_without_bfloat16_computes_in_float32(
    card: str, dtype: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.set(DRIVER, card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert complete({}, machine_module.Machine.here({})).model.dtype == dtype
    assert Compute.choose(dtype) == Compute(torch.device("cuda"), getattr(torch, dtype))


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for GPUs here")
def test_a_worker_names_its_node(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle
    import socket

    machine.set(DRIVER, RTX_4090)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    failure = Worker().build(dict).failure
    assert failure is not None and failure.pickled is not None
    error = pickle.loads(failure.pickled)
    assert isinstance(error, MissingPart)
    assert str(error).startswith(f"{socket.gethostname()}: NVIDIA GeForce RTX 4090")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Worker().build(dict).failure is None
