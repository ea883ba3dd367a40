"""Seconds of a training step alone and beside two busy processes, for three ways to wait.

Run: python benchmarks/threads.py [--rounds 3] [--busy 2]   (about 4 minutes on two quiet cores)

One `ppo train` of the embedded model for each way: as shipped (a waiting thread spins for half a
millisecond, then sleeps), libgomp's own 300,000 rounds, and one thread. Each runs alone and beside
the busy processes in turns; the figures are medians. The busy processes end with this one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

WAYS = {"as shipped": {}, "spinning": {"GOMP_SPINCOUNT": "300000"}, "one": {"OMP_NUM_THREADS": "1"}}
SETTLE, BLOCK = 2, 3  # steps passed over after each change, and steps measured
MOST_S = 110  # for one way
OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def send(processes: list[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def measure(variables: dict[str, str], rounds: int, busy: int, run: Path) -> dict[str, list[float]]:
    """Steps of one run, alone and beside busy processes in turns, as many as fit into MOST_S."""
    found: dict[str, list[float]] = {"alone": [], "beside": []}
    steps = 1 + rounds * 2 * (SETTLE + BLOCK)
    environment = {k: v for k, v in os.environ.items() if k not in OPENMP} | variables
    command = [
        sys.executable, "-m", "ppo_cli", "train", "--output_dir", str(run), "--max_steps",
        str(steps), "--save_freq", "-1", "trainer.val_before_train=false", "data.val_max_samples=8",
    ]  # fmt: skip
    context = multiprocessing.get_context("fork")
    others: list[BaseProcess] = [
        context.Process(target=spin, args=(MOST_S + 30,), daemon=True) for _ in range(busy)
    ]
    for other in others:
        other.start()
    send(others, signal.SIGSTOP)
    training = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    end = time.monotonic() + MOST_S
    state, seen, passed = "alone", 1, 0  # the first step warms up
    try:
        while training.poll() is None and time.monotonic() < end:
            lines = read(run / "metrics.jsonl")
            for line in lines[seen:]:
                passed += 1
                if passed > SETTLE:
                    found[state].append(line["time/step_s"])
                if passed == SETTLE + BLOCK:
                    passed, state = 0, "beside" if state == "alone" else "alone"
                    send(others, signal.SIGCONT if state == "beside" else signal.SIGSTOP)
            seen = max(seen, len(lines))
            time.sleep(0.05)
    finally:
        for other in others:
            other.kill()
        training.kill()
        training.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", type=int, default=2)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {options.busy} busy processes")
    print(f"{'':<12}{'alone':>9}{'beside':>9}{'ratio':>7}  steps")
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in WAYS.items():
            run = Path(folder) / name.replace(" ", "-")
            found = measure(variables, options.rounds, options.busy, run)
            if not all(found.values()):
                print(f"{name:<12} too few steps within {MOST_S} s: {found}", flush=True)
                continue
            alone, beside = (statistics.median(found[state]) for state in ("alone", "beside"))
            counts = f"{len(found['alone'])} and {len(found['beside'])}"
            print(
                f"{name:<12}{alone:>8.2f}s{beside:>8.2f}s{beside / alone:>7.2f}  {counts}",
                flush=True,
            )


if __name__ == "__main__":
    main()
