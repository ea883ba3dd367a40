"""`ppo plan --simulate`: the learner's memory on fake tensors, in a process without GPUs.

The plan adds up what each role should need. Here the learner's code allocates it, as rank 0 of all
ranks, and the peak of each phase is compared with the sum (docs/memory.md).
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.errors import ConfigError, UserError
from ppo_cli.machine.machine import Machine
from ppo_cli.planning.memory.devices import (
    GIB,
    RESERVE,
    ModelShapes,
    RunNeeds,
    device_memory,
    read_shapes,
)
from ppo_cli.planning.memory.plan import fit_memory, format_size
from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.work import Prediction, find_speed
from ppo_cli.processes.child import Child, ChildEnded

USUAL_GPUS = ("H100", "A100")  # where no GPU is here
MIN_SHARE = 0.01  # of a peak; smaller parts are not listed


@dataclass(frozen=True)
class Simulation:
    """The measured bytes of the learner in each phase, and those of the plan.

    `memory` is the size of a GPU, if known, and `left_free` what must stay free. `beside`: planned
    bytes of the sampler and of reward models on the GPU while the learner works.
    """

    measured: Mapping[str, Any]
    planned: Mapping[str, int]
    beside: int
    memory: int | None
    left_free: int
    gpus: int
    kinds: tuple[str, ...]  # of GPUs to predict the speed of

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most memory, and its bytes on a GPU."""
        phases = self.measured["phases"]
        phase = max(phases, key=lambda name: phases[name]["peak_bytes"])
        return phase, phases[phase]["peak_bytes"] + self.beside

    @property
    def fits(self) -> bool | None:
        """Whether enough stays free at the peak; None if the size of the GPU is unknown."""
        return None if self.memory is None else self.peak[1] <= self.memory - self.left_free

    def as_dict(self) -> dict[str, Any]:
        """Return everything as a JSON value."""
        phases = {
            name: phase | {"planned_bytes": self.planned.get(name)}
            for name, phase in self.measured["phases"].items()
        }
        return {
            **self.measured,
            "phases": phases,
            "beside_bytes": self.beside,
            "memory_bytes": self.memory,
            "fits": self.fits,
        }

    def _describe_speed(self, phase: Mapping[str, Any]) -> Iterator[str]:
        """Yield the work of a micro-batch, and the time that it takes on each kind of GPU."""
        work, tokens = phase["work"], phase["micro_batch_tokens"]
        moved = work["product_bytes"] + work["other_bytes"]
        yield (
            f"  a micro-batch of {tokens:,} tokens: {work['launches']:,.0f} launches, "
            f"{work['flops'] / 1e12:.3g} TFLOP, {moved / 1e9:.3g} GB read and written"
        )
        for kind in self.kinds:
            if (speed := find_speed(kind)) is None:
                continue
            prediction = Prediction.make(speed, **work)
            seconds = prediction.seconds
            share = work["flops"] / (seconds * speed.tflops * 1e12)
            yield (
                f"    {kind}: about {seconds:.3g} s without collectives, {tokens / seconds:,.0f} "
                f"tokens/s, {share:.0%} of its FLOP/s; bound by {prediction.bound}"
            )

    def lines(self) -> list[str]:
        """Return the lines of the terminal's report."""
        ranks = self.measured["ranks"]
        lines = [
            f"rank 0 of {ranks} loads the models, annotates and updates, without numbers and GPUs",
            f"at rest: {format_size(self.measured['rest_bytes'])} of a GPU "
            f"({_list_parts(self.measured['rest_by_maker'], self.measured['rest_bytes'])})",
        ]
        # Each phase: its peak, the plan's count, the largest parts, and the collectives.
        for name, phase in self.measured["phases"].items():
            peak, on_paper = phase["peak_bytes"], ""
            if name in self.planned:
                count = self.planned[name]
                on_paper = f"; {format_size(count)} on paper, {count / peak - 1:+.0%}"
            lines.append(f"{name}: {format_size(peak)}{on_paper}")
            lines.append(f"  at its peak: {_list_parts(phase['peak_by_maker'], peak)}")
            if phase["collectives"]:
                counts = (
                    f"{of['calls']:g} {kind} ({format_size(round(of['bytes']))})"
                    for kind, of in phase["collectives"].items()
                )
                lines.append(f"  collectives of a micro-batch: {', '.join(counts)}")
            lines += self._describe_speed(phase)
        host = max(phase["host_peak_bytes"] for phase in self.measured["phases"].values())
        if host >= GIB // 10:
            lines.append(
                f"host memory: {format_size(host)} a rank for offloaded weights and moments, "
                f"{format_size(host * self.gpus)} a node"
            )
        if self.beside:
            lines.append(
                f"the sampler and reward models hold {format_size(self.beside)} more, on paper"
            )
        phase, need = self.peak
        if self.memory is None:
            verdict = "how much a GPU has is not known here: add --device_memory, such as 80GB"
        else:
            verdict = f"of {format_size(self.memory)}: " + (
                "fits"
                if self.fits
                else f"of which {format_size(self.left_free)} is left free: does not fit"
            )
        lines.append(f"a GPU that trains needs {format_size(need)} ({phase}); {verdict}")
        lines.append(
            "not simulated: sampling and publishing (see Memory), CUDA's context, buffers of NCCL "
            "and cuBLAS, fragmentation"
        )
        return lines


def measure(resolved: Resolved) -> tuple[dict[str, Any], list[str]]:
    """Return the simulation of a run's step, as JSON and as lines; progress goes to stderr."""
    require_simulation(resolved.config)
    began = time.monotonic()

    def report(text: str) -> None:
        print(f"  simulation: {text} ({time.monotonic() - began:.0f} s)", file=sys.stderr)

    simulation = run_simulation(resolved.requested, resolved.machine, report)
    return simulation.as_dict(), simulation.lines()


def require_simulation(config: Config) -> None:
    """Raise ConfigError if a run cannot be simulated."""
    problems = []
    if not config.trainer.n_gpus_per_node:
        problems.append(
            "--simulate is for runs on GPUs, and this one is on the CPU: add --n_gpus (GPUs need "
            "not be here), and --device_memory for what each has, such as 80GB."
        )
    # bitsandbytes has no kernels for fake tensors.
    reasons = [f"{key} holds weights in 4 bits" for key in config.quantised]
    models = ("actor", "critic") if config.uses_critic else ("actor",)
    reasons += [
        f"{model}.optim.optimizer is AdamW8bit"
        for model in models
        if getattr(config, model).optim.optimizer == "AdamW8bit"
    ]
    problems += [
        f"--simulate cannot simulate that {reason}: the code of bitsandbytes needs numbers on a "
        "GPU. Leave --simulate out: ppo plan counts such a run on paper."
        for reason in reasons
    ]
    if problems:
        raise ConfigError(problems)


def run_simulation(
    requested: Config, machine: Machine, report: Callable[[str], None]
) -> Simulation:
    """Simulate a run in a separate process, which sees no GPU.

    `requested` has the settings before any rule decides. Raises the UserError with which the run
    would end before its first step.
    """
    config = fit_memory(settle(requested, machine)).config
    gpus, shapes, memory = (
        config.trainer.n_gpus_per_node, read_shapes(config), device_memory(config.trainer, machine),
    )  # fmt: skip
    # The plan of the same settings, if it can be made.
    planned: Mapping[str, int] = {}
    beside, left_free = 0, int(RESERVE * (memory or 0))
    if isinstance(shapes, ModelShapes):
        needs = RunNeeds(config, shapes, machine)
        planned, place = needs.learner_phases(), needs.devices()[0]
        beside = place.phases["annotation"] - planned["annotation"] + place.asleep
        left_free = place.left_free
    measured = asyncio.run(_run_simulation(config.model_dump_json().encode(), report))
    kinds = tuple(dict.fromkeys(gpu.name for gpu in machine.gpus)) or USUAL_GPUS
    return Simulation(measured, planned, beside, memory, left_free, gpus, kinds)


async def _run_simulation(settings: bytes, report: Callable[[str], None]) -> dict[str, Any]:
    """Run the simulated steps in a separate process without GPUs; return its measurements.

    Passes progress lines to `report`. Raises UserError for a problem that the process names, and
    RuntimeError, with its log, if it ends without an answer.
    """
    with TemporaryDirectory(prefix="ppo-simulation-") as folder:
        log = Path(folder, "log")
        child = await Child.start(
            [sys.executable, "-m", "ppo_cli.extras.lab.simulation.steps"], kind="simulation",
            environ={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}, log=log,
        )  # fmt: skip
        try:
            answer = await child.request(settings, math.inf, lambda part: report(part.decode()))
        except ChildEnded as end:
            printed = log.read_text() if log.exists() else ""
            raise RuntimeError(f"{end}\n{printed}") from None
        finally:
            await child.close("the simulation has ended")
    facts: dict[str, Any] = json.loads(answer)
    if "problem" in facts:
        raise UserError(facts["problem"])
    return facts


def _list_parts(parts: Mapping[str, int], total: int) -> str:
    return ", ".join(
        f"{name} {format_size(size)}" for name, size in parts.items() if size > MIN_SHARE * total
    )
