"""Workers that are killed in the middle of a run: it starts again by itself and ends the same.

`PPO_KILLS=20` adds so many kills at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_cli.atomic import is_running
from ppo_cli.processes.reaper import descendants
from tests.forked import Forked
from tests.loop.runs import (
    assert_same_run,
    command,
    environment,
    metrics,
    start,
    train,
    wait_for,
)

pytestmark = pytest.mark.slow

EIGHT = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_steps", "8", "--save_freq", "2", "--test_freq", "4", "--max_response_length", "8",
    "data.val_max_samples=16", "--engine", "ray", "--num_workers", "2",
)  # fmt: skip
KINDS = ("gcs_server", "sampler-0", "learner-1", "raylet", "learner-0")
Begin = Callable[..., "Forked | Orphan"]
KILLS = int(os.environ.get("PPO_KILLS", "0"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calm") / "run"
    train(out, *EIGHT)
    return out


def find(kind: str, out: Path, family: list[int]) -> int | None:
    """Return the process of a run's family that is a part of Ray, or a worker by its log."""
    for pid in family:
        try:
            program = Path(os.readlink(f"/proc/{pid}/exe")).name
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
        except OSError:  # it has ended meanwhile
            continue
        if kind == program or log == out / "logs" / f"{kind}.log":
            return pid
    return None


class Orphan:
    """A run whose parent is process 1, as in a container: there Ray takes its own for dead."""

    returncode = 0  # only process 1 learns it

    def __init__(self, out: Path, *args: str) -> None:
        noted = out.with_name("pid")
        self._shell = subprocess.Popen(
            ["sh", "-c", '"$0" "$@" & echo $! > "$NOTED"', *command(out, *args)],
            env=environment() | {"NOTED": str(noted)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._shell.wait(60)
        self.pid = int(noted.read_text())

    def poll(self) -> int | None:
        return None if is_running(self.pid) else 0

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        return self._shell.communicate(timeout=timeout)[0], None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def await_end(family: list[int]) -> None:
    end = time.monotonic() + 120
    while running := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < end, running
        time.sleep(0.2)


def run_with_a_kill(
    out: Path, kind: str, after: int, moment: float, *flags: str, begin: Begin = start
) -> str:
    """Run, and kill one worker a moment after so many steps; returns what was told."""
    process = begin(out, *EIGHT, *flags)
    try:
        wait_for(out / "rollouts" / f"step_{after:06d}.jsonl", process)
        time.sleep(moment)
        family = descendants(process.pid)
        victim = find(kind, out, family)
        assert victim is not None, f"there is no {kind}"
        os.kill(victim, signal.SIGKILL)
        output = process.communicate(timeout=800)[0]
    except (AssertionError, subprocess.TimeoutExpired):
        process.kill()
        raise
    assert process.returncode == 0 and "\nDone: " in output, output
    await_end(family)
    hidden = [path for path in out.rglob(".*") if path.name.startswith(".unfinished")]
    assert hidden == []
    assert [line["step"] for line in metrics(out)] == [*range(9)]
    return output


@pytest.mark.skipif(not KILLS, reason="set PPO_KILLS to the number of kills")
def test_a_worker_that_dies_while_it_starts_is_replaced(calm: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out, *EIGHT)
    try:
        wait_for(out / "logs" / "learner-1.log", process)
        victim = None
        until = time.monotonic() + 300
        while victim is None:
            assert time.monotonic() < until
            victim = find("learner-1", out, descendants(process.pid))
        os.kill(victim, signal.SIGKILL)
        output = process.communicate(timeout=800)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "Starting again (1 of 3)" in output and "Traceback" not in output
    assert_same_run(calm, out)


@pytest.mark.parametrize(
    ("kind", "begin", "fragment"),
    [
        ("learner-0", start, "Learner rank 0 on node"),
        pytest.param("raylet", Orphan, "lost its raylet", marks=pytest.mark.weekly),
    ],
)
def test_a_killed_worker_costs_some_time_and_nothing_else(
    calm: Path, tmp_path: Path, kind: str, begin: Begin, fragment: str
) -> None:
    output = run_with_a_kill(tmp_path / "run", kind, after=3, moment=0.1, begin=begin)
    assert "Starting again (1 of 3)" in output and "Traceback" not in output
    assert fragment in output
    assert_same_run(calm, tmp_path / "run")


def test_ctrl_c_saves_a_killed_run_leaves_nothing_and_both_go_on(
    calm: Path, tmp_path: Path
) -> None:
    """Ctrl-C reaches all processes of the terminal; the workers must not be among them."""
    out = tmp_path / "run"
    for step, ending, code in ((2, signal.SIGINT, 3), (5, signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            command(out, *EIGHT), env=environment(), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(out / "rollouts" / f"step_{step:06d}.jsonl", process)
        family = descendants(process.pid)
        os.killpg(process.pid, ending)
        assert process.wait(300) == code
        await_end(family)
    assert "Going on after step" in train(out, *EIGHT).stdout
    assert_same_run(calm, out)


@pytest.mark.skipif(not KILLS, reason="set PPO_KILLS to the number of kills")
def test_a_killed_reward_model_is_hosted_again(reward_model: Path, tmp_path: Path) -> None:
    judged = ("--reward_model", str(reward_model), "--reward_model_self_test", "off")
    train(tmp_path / "calm", *EIGHT, *judged)
    output = run_with_a_kill(tmp_path / "run", "reward-model", 3, 0.1, *judged)
    assert "Traceback" not in output
    assert_same_run(tmp_path / "calm", tmp_path / "run")


@pytest.mark.skipif(not KILLS, reason="set PPO_KILLS to the number of kills")
@pytest.mark.parametrize("turn", range(KILLS))
def test_kills_at_random_moments(calm: Path, tmp_path: Path, turn: int) -> None:
    dice = random.Random(turn)
    kind = KINDS[turn % len(KINDS)]
    run_with_a_kill(tmp_path / "run", kind, dice.randint(1, 6), dice.uniform(0.0, 0.8))
    assert_same_run(calm, tmp_path / "run")
