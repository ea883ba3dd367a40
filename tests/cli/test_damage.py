"""Checkpoints that changed after they were saved are named, and so is what to use instead."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_cli.digests import NAMED_IN, find_damage
from tests.forked import run_forked

pytestmark = pytest.mark.slow  # each begins with a run of three steps
RUN = (
    "train", "--preset", "embedded", "--batch_size", "4", "--mini_batch_size", "4",
    "--rollout_n", "1", "--save_freq", "1", "--test_freq", "-1", "--max_response_length", "4",
    "data.val_max_samples=4", "data.train_max_samples=16", "--output_dir", "run",
)  # fmt: skip
WEIGHTS, MOMENTS = "actor/model.safetensors", "state/critic_optimizer.safetensors"


def ppo(*args: str, exit_code: int) -> subprocess.CompletedProcess[str]:
    done = run_forked(args, os.environ, timeout=300)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    desk = tmp_path_factory.mktemp("saved")
    folder = Path.cwd()
    os.chdir(desk)
    try:
        ppo(*RUN, "--max_steps", "3", exit_code=0)
    finally:
        os.chdir(folder)
    return desk / "run"


@pytest.fixture
def run(saved: Path, desk: Path) -> Path:
    shutil.copytree(saved, desk / "run", symlinks=True)
    return desk / "run"


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_000003"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def append_zeros(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(400_000))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def take_from_step_2(path: Path) -> None:
    shutil.copy(path.parents[2] / "step_000002" / path.parent.name / path.name, path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a bit of a weight": (flip_bit, WEIGHTS, "is not what was saved"),
    "a bit of a moment": (flip_bit, MOMENTS, "is not what was saved"),
    "a bit of the state": (flip_bit, "state/run.json", "is not what was saved"),
    "zeros at the end": (append_zeros, WEIGHTS, "were saved"),
    "a truncated file": (cut, MOMENTS, "were saved"),
    "a missing file": (Path.unlink, MOMENTS, "is missing"),
    "a missing configuration": (Path.unlink, "actor/config.json", "is missing"),
    "no digests": (Path.unlink, "digests.json", "is missing"),
    "half of the digests": (cut, "digests.json", "cannot be read"),
    "another step's weights": (take_from_step_2, WEIGHTS, "but that of step_000002"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_found(newest: Path, damage: str) -> None:
    change, name, message = DAMAGES[damage]
    change(newest / name)
    (problem,) = find_damage(newest)
    assert problem.startswith(name) and re.search(message, problem)


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert find_damage(tmp_path, NAMED_IN) == [f"{NAMED_IN} is missing"]


def test_a_resume_names_the_file_and_goes_on_from_the_checkpoint_before(newest: Path) -> None:
    flip_bit(newest / WEIGHTS)
    before = sorted(newest.parents[1].rglob("*"))
    err = ppo(*RUN, "--max_steps", "4", exit_code=2).stderr
    assert f"{newest} is damaged: {WEIGHTS} is not what was saved" in err
    assert "Traceback" not in err and err.count("error: ") == 1
    assert sorted(newest.parents[1].rglob("*")) == before  # nothing was lost
    command = shlex.split(err.split("step_000002 is intact; to use it: ")[1])
    done = ppo(*command[command.index("ppo_cli") + 1 :], exit_code=0)
    assert "Going on after step 2" in done.stdout
    assert (newest.parent / "step_000004").is_dir()


ACTOR = "run/checkpoints/step_000003/actor"
LOADS = {
    "eval run@3": "--data embedded data.val_max_samples=2",
    f"generate {ACTOR}": "1+1?",
    "export run/checkpoints/latest": "--out model",
    "export run": "--checkpoint 3 --out model",
    f"train --model {ACTOR}": " ".join([*RUN[1:-1], "other", "--max_steps", "1"]),
}


@pytest.mark.parametrize("line", LOADS)
def test_each_command_that_loads_weights(newest: Path, line: str) -> None:
    flip_bit(newest / WEIGHTS)
    err = ppo(*line.split(), *LOADS[line].split(), exit_code=2).stderr
    assert f"{newest} is damaged: {WEIGHTS} is not what was saved." in err
    command = shlex.split(err.split("step_000002 is intact; to use it: ")[1])
    ppo(*command[command.index("ppo_cli") + 1 :], exit_code=0)


@pytest.mark.slow
def test_a_fork_and_a_plan_say_the_same(newest: Path) -> None:
    flip_bit(newest / MOMENTS)
    message = f"{newest} is damaged: {MOMENTS} is not what was saved."
    plan = ("plan", *RUN[1:], "--resume", str(newest))
    for line in (["plan", "--fork", "run@3"], plan, ["train", "--fork", "run@3"]):
        err = ppo(*line, "--max_steps", "4", exit_code=2).stderr
        assert message in err
    command = shlex.split(err.split("to use it: ")[1])
    out = ppo(*command[command.index("ppo_cli") + 1 :], exit_code=0).stdout
    assert "Going on after step 2" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", [MOMENTS, "state/run.json"])
def test_checkpoints_that_are_damaged_too_are_passed_over(newest: Path, name: str) -> None:
    flip_bit(newest / name)
    flip_bit(newest.parent / "step_000002" / WEIGHTS)
    err = ppo(*RUN, "--max_steps", "4", exit_code=2).stderr
    assert "step_000001 is intact" in err
    flip_bit(newest.parent / "step_000001" / WEIGHTS)
    err = ppo(*RUN, "--max_steps", "4", exit_code=2).stderr
    assert "No other checkpoint of this run is intact." in err
    command = shlex.split(err.split("Start from the first step with: ")[1])
    assert command[-2:] == ["--resume", "never"]


@pytest.mark.slow
def test_a_checkpoint_of_a_version_without_digests_still_loads(newest: Path) -> None:
    (newest / "digests.json").unlink()
    state = json.loads((newest / "state" / "run.json").read_text())
    del state["digests"]
    (newest / "state" / "run.json").write_text(json.dumps(state))
    assert "Going on after step 3" in ppo(*RUN, "--max_steps", "4", exit_code=0).stdout


@pytest.mark.slow
def test_a_checkpoint_that_was_copied_elsewhere_is_compared_too(newest: Path, desk: Path) -> None:
    shutil.copytree(newest, desk / "copy")
    flip_bit(desk / "copy" / WEIGHTS)
    for line in ("generate copy 1+1?", "generate copy/actor 1+1?", "export copy --out model"):
        err = ppo(*line.split(), exit_code=2).stderr
        assert f"{desk / 'copy'} is damaged: {WEIGHTS} is not what was saved." in err


@pytest.mark.slow
def test_another_run_in_the_folder_does_not_need_what_is_damaged(newest: Path) -> None:
    flip_bit(newest / WEIGHTS)
    out = ppo(*RUN, "--max_steps", "1", "--seed", "7", exit_code=0).stdout
    assert "A new run" in out
