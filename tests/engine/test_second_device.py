"""The one-process engine and reward models on a second device that is as strict as a GPU.

It shows what a run on the CPU cannot: a tensor that stayed behind, a CPU generator or index, a
wait for the device that nobody meant. `second_device` says what is refused; a process of its own
takes the device, as it is registered for good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.second_device_runs import REWARDS, RUNS
from tests.loop.runs import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = (
        Path(__file__).with_name("second_device_runs.py"),
        tmp_path_factory.mktemp("on"),
    )
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        cwd=ROOT, env=environment() | {"XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_the_device_refuses_what_a_gpu_refuses(report: dict[str, Any]) -> None:
    assert report["not refused"] == []


def test_each_kind_of_wait_is_counted_and_nothing_else(report: dict[str, Any]) -> None:
    assert report["miscounted"] == []


@pytest.mark.parametrize("name", [*RUNS, *REWARDS])
def test_it_runs_there_and_gives_the_cpus_numbers(report: dict[str, Any], name: str) -> None:
    gaps = report[name]
    assert gaps["wrong"] == ""
    # Half precision rounds products at other places than the CPU's does.
    limit = 0.15 if name.startswith("half") else 1e-4
    far = {number: gap for number, gap in gaps["gaps"].items() if not gap <= limit}
    assert gaps["gaps"] and not far


def test_values_leave_the_device_only_where_they_must(report: dict[str, Any]) -> None:
    assert report["hidden"] == [], "add them to second_device_waits.txt if they must"
    assert report["unused"] == [], "take them out of second_device_waits.txt"


STEPS = 2  # of each run
ACTOR_STEPS, CRITIC_STEPS = STEPS * len(RUNS), STEPS * (len(RUNS) - 1)  # one has no critic


def test_metrics_are_read_once_an_optimizer_step(report: dict[str, Any]) -> None:
    waits = report["waits"]
    assert waits["engine/training/actor_critic.py:fetch_sums"] == ACTOR_STEPS + CRITIC_STEPS
    # The actor's gradient is measured again after it is clipped by value.
    assert waits["engine/training/optimizer.py:_norm"] == 2 * ACTOR_STEPS + CRITIC_STEPS


def test_annotations_are_read_once_a_micro_batch(report: dict[str, Any]) -> None:
    assert report["waits"]["engine/learner.py:pad_to_batch"] == 3 * len(RUNS)


# The rest of these tests compares what the report above does.
BODIES = "attention or first_step or halved or padded or BERT"


def test_bodies_of_gpu_tests_pass_on_the_second_device() -> None:
    files = [ROOT / "tests" / "gpu" / f"test_{name}.py" for name in ("02_numbers", "03_memory")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", BODIES, "-p", "no:cacheprovider",
         *map(str, files)],
        cwd=ROOT, env=environment() | {"PPO_TEST_DEVICE": "second", "PYTEST_ADDOPTS": ""},
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "\n8 passed" in done.stdout, done.stdout
