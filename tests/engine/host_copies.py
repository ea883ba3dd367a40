"""Counts copies between the second device and host memory, over steps with offload.

Run as `python host_copies.py RANK SIZE FOLDER`; writes FOLDER/report.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_cli.config.schema.algorithm import Optim
from ppo_cli.engine.sharding.host_memory import OffloadedModel
from ppo_cli.engine.sharding.tensors import gather_copy
from tests.engine.packed_steps import build_optimizer
from tests.engine.second_device import SecondTensor, install

STEPS = 3


class Copies(TorchDispatchMode):
    """Counts what makes host memory from tensors of the device, or again from host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            on_host = [not isinstance(tensor, SecondTensor) for tensor in (source, output)]
            self.count[{(0, 1): "home", (1, 0): "out"}.get(tuple(map(int, on_host)), "within")] += 1
        elif func is torch.ops.aten.clone.default and not isinstance(output, SecondTensor):
            self.count["within"] += 1
        return output


def make_model() -> nn.Module:
    """Four parameters; the first layer is frozen and shares its weight with the last."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    model[0].requires_grad_(False)
    return model


def step_offloaded(device: torch.device) -> dict[str, Any]:
    """Optimizer steps whose moments wait in host memory: copies of each, and their places."""
    model = make_model().to(device)
    optimizer = build_optimizer(model, Optim(lr=0.1), grad_clip=1.0, offload=True)
    copies, places, moments = [], [], []
    for step in range(STEPS):
        model(torch.ones(2, 8, device=device) * step).sum().backward()
        with Copies() as seen:
            optimizer.apply()
        copies.append(dict(seen.count))
        saved_moments = optimizer.moments()
        places.append([t.data_ptr() for n, t in saved_moments.items() if not n.endswith(".step")])
        moments = [gather_copy(tensor).sum().item() for tensor in saved_moments.values()]
    return {"copies": copies, "places": places, "moments": moments}


def wake_hosted(device: torch.device) -> dict[str, Any]:
    """A model that comes to the device and goes home: copies, places, and what was changed."""
    model = make_model()
    hosted = OffloadedModel(model, device)
    copies, places = [], []
    for _ in range(STEPS):
        with Copies() as seen, hosted.awake(), torch.no_grad():
            assert all(p.device == device for p in model.parameters())
            assert model[2].weight is model[0].weight
            for parameter in model[1].parameters():
                parameter += 1.0
        copies.append(dict(seen.count))
        places.append([p.data_ptr() for p in model.parameters()])
    assert all(p.device.type == "cpu" for p in model.parameters())
    return {"copies": copies, "places": places}


def main(folder: Path) -> None:
    device = install()
    torch.manual_seed(0)
    on_cpu = step_offloaded(torch.device("cpu"))["moments"]
    torch.manual_seed(0)
    report = {"optimizer": step_offloaded(device), "on_cpu": on_cpu, "hosted": wake_hosted(device)}
    with Copies() as seen:
        gather_copy(torch.ones(5, device=device))
    report["full_tensor"] = dict(seen.count)
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[3]))
