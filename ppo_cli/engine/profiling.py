"""Profiles of single training steps: a Chrome trace, and a table of phases.

Each computing process writes its own into `profile/` of the run folder. Other steps are not
recorded.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ppo_cli.config.schema.run import Trainer

# Time outside of the phases: rewards, advantages, the driver, or waiting for other ranks.
REST = "outside"
TOP = 3  # operators listed for each phase
# Above the level of kineto's two `USDT` lines per profile (tried with torch 2.13).
KINETO_SILENT = "6"


class Profiler:
    """Records the steps of `trainer.profile_steps`, in the thread that runs them.

    A step begins with its first phase and ends with `finish`. Without a folder nothing is recorded.
    """

    def __init__(self, trainer: Trainer, folder: Path | None, process: str) -> None:
        self._trainer = trainer
        self._folder = folder
        self._process = process
        self._open: Any = None
        self._step = 0
        self._started = 0.0
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Context that records a phase of a training step, if that step is profiled."""
        if self._folder is None or not self._trainer.is_profiled(step):
            yield
            return
        if self._open is None:
            self._begin(step)
        started = time.perf_counter()
        with record_function(f"phase: {name}"):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def finish(self) -> None:
        """End the step and write its trace and table. Does nothing if no step is recorded."""
        if self._open is None or self._folder is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # The clock is read after `synchronize`: work queued on the device belongs to the step.
        step_seconds = time.perf_counter() - self._started
        recorded, self._open = self._open, None
        recorded.__exit__(None, None, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = self._folder / f"step_{self._step:06d}.{self._process}"
        recorded.export_chrome_trace(f"{stem}.json.gz")
        table = phase_table(self._seconds, step_seconds, _operators(recorded.events()))
        title = f"Step {self._step}, {self._process}, {step_seconds:.2f} s; trace: {stem}.json.gz"
        Path(f"{stem}.txt").write_text(f"{title}\n{table}\n", encoding="utf-8")

    def _begin(self, step: int) -> None:
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self._step, self._seconds = step, {}
        os.environ.setdefault("KINETO_LOG_LEVEL", KINETO_SILENT)
        self._open = profile(activities=kinds, acc_events=True)
        self._open.__enter__()
        self._started = time.perf_counter()


def phase_table(
    seconds: dict[str, float], step_seconds: float, operators: dict[str, dict[str, float]]
) -> str:
    """Return a table of phases: seconds, share of the step, and the slowest operators.

    `operators` has seconds by phase and operator, without the operators called inside.
    """
    rows = [*seconds.items(), (REST, step_seconds - sum(seconds.values()))]
    lines = [f"{'phase':<14}{'seconds':>9}{'share':>8}  top operators (own seconds)"]
    for name, phase_seconds in rows:
        top = sorted(operators.get(name, {}).items(), key=lambda item: -item[1])[:TOP]
        named = ", ".join(f"{operator} {self_seconds:.2f}" for operator, self_seconds in top)
        lines.append(
            f"{name:<14}{phase_seconds:>9.2f}{phase_seconds / step_seconds:>8.0%}  {named}".rstrip()
        )
    return "\n".join(lines)


def _operators(events: Any) -> dict[str, dict[str, float]]:
    """Return seconds by phase and operator, without nested operators; device time if recorded."""
    # A phase is a time span; an operator belongs to the phase in which it starts.
    marked = [e for e in events if e.name.startswith("phase: ")]
    spans = [(e.time_range.start, e.time_range.end, e.name.removeprefix("phase: ")) for e in marked]
    on_device = any(e.self_device_time_total for e in events)
    by_phase: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for e in events:
        if e.name.startswith("phase: "):
            continue
        begun = e.time_range.start
        phase = next((name for start, end, name in spans if start <= begun <= end), REST)
        self_time_us = e.self_device_time_total if on_device else e.self_cpu_time_total
        by_phase[phase][e.name] += self_time_us / 1e6
    return by_phase
