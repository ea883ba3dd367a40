"""The tests of GPUs run in the order of their files: what proves most comes first.

No body runs for the first time on a GPU: those that compute in this process also run on the second
device (PPO_TEST_DEVICE=second, `tests/engine/test_second_device.py`), those that start programs
also on the CPU (marked slow). `figure` keeps numbers; with PPO_GPU_FIGURES they are lines of JSON
in that file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.engine.device import Compute
from ppo_cli.rewards.models import heads
from tests.engine.second_device import install
from tests.loop.runs import ROOT, environment

CPU = torch.device("cpu")
OnDevice = Callable[[torch.device], None]


@pytest.fixture
def gpu() -> torch.device:
    """The device for what computes in this process; the test is marked gpu."""
    return install() if os.environ.get("PPO_TEST_DEVICE") == "second" else torch.device("cuda")


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.slow),
    ]
)
def on_gpu(request: pytest.FixtureRequest) -> bool:
    """Whether the programs of a test compute on the GPU or on the CPU."""
    return bool(request.param == "cuda")


@pytest.fixture
def compute_on(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    """Makes engines and reward models that are loaded from now on compute on a device."""

    def choose(device: torch.device) -> None:
        default = "float32" if device.type == "cpu" else "bfloat16"

        def choose_compute(cls: type[Compute], dtype: str | None) -> Compute:
            return cls(device, getattr(torch, dtype or default))

        monkeypatch.setattr(Compute, "choose", classmethod(choose_compute))
        monkeypatch.setattr(heads, "open_device", lambda name: device)

    return choose


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str, Any], None]:
    """Keep a number that a test has measured."""

    def keep(name: str, value: Any) -> None:
        line = {"test": request.node.name, "figure": name, "value": value}
        if path := os.environ.get("PPO_GPU_FIGURES"):
            with Path(path).open("a") as file:
                file.write(json.dumps(line) + "\n")

    return keep


@pytest.fixture
def variables(on_gpu: bool) -> dict[str, str]:
    """The environment of a program."""
    return environment() | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})


@pytest.fixture
def run_program(variables: dict[str, str]) -> Callable[..., str]:
    """Run Python with these arguments, which must end well; returns what it printed."""

    def run(*args: str) -> str:
        done = subprocess.run(
            [sys.executable, *args],
            env=variables, cwd=ROOT, capture_output=True, text=True, timeout=380,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    return run
