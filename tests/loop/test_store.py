"""Runs with a copy in a store: killed in the middle of an upload, on a wiped disk, without it."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import PPO, Forked, run_forked
from tests.loop.runs import SLOW_DISK, SMALL, assert_same_run, train, wait_for
from tests.s3_server import S3Server

URL = "s3://bucket/runs/a"
KILLS = int(os.environ.get("PPO_KILLS", "0"))
# Writes the checkpoint of step 4 when it may.
WAITING = SLOW_DISK.replace("time.monotonic() < end", 'not Path(os.environ["DESK"], "go").exists()')
ARGS = (*SMALL, "trainer.max_ckpt_to_keep=2")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in a folder, without interruption."""
    out = tmp_path_factory.mktemp("calm") / "run"
    train(out, *ARGS)
    return out


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def environment(s3: S3Server, tmp_path: Path) -> dict[str, str]:
    cache = str(tmp_path / "cache")
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | s3.environment | {
        "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache,
    }  # fmt: skip


def local(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "ppo-cli" / "runs" / "s3" / "bucket" / "runs" / "a"


def run(s3: S3Server, tmp_path: Path, *args: str, exit_code: int = 0) -> str:
    env = environment(s3, tmp_path)
    done = run_forked(["train", *ARGS, "--output_dir", URL, *args], env, timeout=300)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert "loopback-secret" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def begin(s3: S3Server, tmp_path: Path) -> Forked:
    return Forked(PPO, ["train", *ARGS, "--output_dir", URL], environment(s3, tmp_path))


def end(process: Forked) -> None:
    process.kill()
    process.communicate()


def test_killed_in_an_upload_and_wiped_it_goes_on_to_the_same_bits(
    calm: Path, s3: S3Server, tmp_path: Path
) -> None:
    s3.hold = r"/step_00000[468]/critic/"
    env = environment(s3, tmp_path) | {"DESK": str(tmp_path), "HOLD": "0"}
    process = Forked(WAITING, ["train", *ARGS, "--output_dir", URL], env)
    try:
        while "step_000002/digests.json" not in s3.read("runs/a/index.json"):
            assert process.poll() is None
            time.sleep(0.1)
        (tmp_path / "go").touch()
        assert s3.held.wait(120)
        assert process.poll() is None
    finally:
        end(process)
    s3.hold = None
    s3.release.set()
    shutil.rmtree(tmp_path / "cache")
    # A part of a later checkpoint is there, and does not count.
    assert any(re.search("step_00000[468]/", name) for name in s3.names())
    output = run(s3, tmp_path)
    assert "Fetching" in output and "Going on after step 2" in output, output
    assert_same_run(local(tmp_path), calm)
    # The copy is the folder: fetched again, it is complete, and older checkpoints are gone.
    shutil.rmtree(tmp_path / "cache")
    assert "This run is complete" in run(s3, tmp_path)
    assert_same_run(local(tmp_path), calm)
    steps = {name.split("/")[3] for name in s3.names() if "/checkpoints/" in name}
    assert steps == {path.name for path in (calm / "checkpoints").glob("step_*")}
    assert not any("lease" in name for name in s3.names())


def test_a_store_that_goes_away_does_not_stop_the_run(
    calm: Path, s3: S3Server, tmp_path: Path
) -> None:
    process = begin(s3, tmp_path)
    try:
        wait_for(local(tmp_path) / "metrics.jsonl", process)
        s3.gone.set()
        wait_for(local(tmp_path) / "checkpoints" / "step_000008", process)
        refused = s3.refused
        while s3.refused < refused + 2:
            time.sleep(0.1)
        s3.gone.clear()
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert s3.refused and output.count("does not answer") == 1
    assert_same_run(local(tmp_path), calm)
    shutil.rmtree(tmp_path / "cache")
    run(s3, tmp_path)
    assert_same_run(local(tmp_path), calm)


@pytest.mark.skipif(not KILLS, reason="PPO_KILLS=20 kills a run as often")
def test_kills_at_random_moments(calm: Path, s3: S3Server, tmp_path: Path) -> None:
    dice = random.Random(KILLS)
    for number in range(KILLS):
        process = begin(s3, tmp_path)
        time.sleep(dice.uniform(1, 12))
        print(number, process.poll())
        end(process)
        if dice.random() < 0.7:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    run(s3, tmp_path)
    assert_same_run(local(tmp_path), calm)
