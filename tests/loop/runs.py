"""Whole runs in separate processes, as a user starts them, and how two are compared."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ppo_cli.run_folder.lines import read_lines
from tests.forked import PPO, Forked, run_forked

ROOT = Path(__file__).resolve().parents[2]
# Small enough to be quick, rich enough to hold everything that a resume must bring back.
SMALL = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_steps", "8", "--save_freq", "2", "--test_freq", "4", "--ppo_epochs", "2",
    "--max_response_length", "8", "data.val_max_samples=16", "data.train_max_samples=36",
    "algorithm.kl_ctrl.type=adaptive", "actor.optim.lr_scheduler_type=cosine",
)  # fmt: skip


# Writes as ever, then holds the checkpoint of step 4 back; FULL lets the disk then be full.
SLOW_DISK = """
import os, sys, time
from pathlib import Path
from ppo_cli.engine.checkpoint import Snapshot

write = Snapshot.write

def slow(self, directory):
    write(self, directory)
    if "step_000004" in directory.name:
        (Path(os.environ["DESK"]) / "held").touch()
        end = time.monotonic() + float(os.environ["HOLD"])
        while time.monotonic() < end:
            time.sleep(0.05)
        if os.environ.get("FULL"):
            raise OSError(28, "No space left on device")

Snapshot.write = slow
from ppo_cli.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def command(out: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "ppo_cli", "train", *args, "--output_dir", str(out)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def train(
    out: Path, *args: str, exit_code: int = 0, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """`ppo train` to its end; `fresh` as a user starts it, with its own hash seed."""
    arguments = command(out, *args)
    if fresh:
        done = subprocess.run(
            arguments, env=environment(), capture_output=True, text=True, timeout=800
        )
    else:
        done = run_forked(arguments[3:], environment(), timeout=800)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def start(out: Path, *args: str) -> Forked:
    return Forked(PPO, command(out, *args)[3:], environment())


def start_slow(out: Path, *args: str, hold: float, **extra_args: str) -> Forked:
    """Start a run on a disk that takes `hold` seconds for the checkpoint of step 4."""
    out.parent.mkdir(exist_ok=True)
    desk = {"DESK": str(out.parent), "HOLD": str(hold)}
    return Forked(SLOW_DISK, command(out, *args)[3:], environment() | desk | extra_args)


def hidden(out: Path) -> list[str]:
    """Checkpoints that are not whole."""
    return sorted(name for name in os.listdir(out / "checkpoints") if name.startswith("."))


def wait_for(path: Path, process: Any, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)


def train_until_killed(out: Path, step: int, *args: str) -> None:
    """Start a run, which is killed with -9 once this step is saved."""
    process = start(out, *args)
    try:
        wait_for(out / "checkpoints" / f"step_{step:06d}", process)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def train_killed_halfway(out: Path, *args: str) -> None:
    """Run 8 steps: killed once step 4 is saved, then gone on with to the end."""
    train_until_killed(out, 4, *args)
    assert not (out / "checkpoints" / "step_000008").exists()
    assert "Going on after step" in train(out, *args).stdout


def metrics(out: Path) -> list[dict[str, Any]]:
    """All that must be the same in two equal runs: everything but the clock."""
    clock = (("time/", "perf/"), ("/seconds", "/tokens_per_s"))
    return [
        {k: v for k, v in line.items() if not (k.startswith(clock[0]) or k.endswith(clock[1]))}
        for line in read_lines(out / "metrics.jsonl")
    ]


def rows(out: Path, step: int | None = None) -> list[dict[str, Any]]:
    """The responses of a training step, or of all of them."""
    files = (out / "rollouts").glob("step_*.jsonl" if step is None else f"step_{step:06d}.jsonl")
    return [row for path in sorted(files) for row in read_lines(path)]


def stored(checkpoint: Path, stem: str) -> dict[str, torch.Tensor]:
    """All tensors of the files that begin so, whoever wrote which of them."""
    result: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob(f"{stem}*.safetensors"):
        result |= load_file(path)
    assert result, stem
    return result


def assert_true(out: Path) -> None:
    """What a run wrote down against its settings, computed again from its rollouts."""
    config = yaml.safe_load((out / "config.yaml").read_text())
    actor, trainer, control = (
        config["actor"], config["trainer"], config["algorithm"]["kl_ctrl"]
    )  # fmt: skip
    lines = [line for line in metrics(out) if line["step"]]
    assert [line["step"] for line in lines] == [*range(1, trainer["total_training_steps"] + 1)]
    coef, total = control["kl_coef"], trainer["total_training_steps"]
    for line in lines:
        responses, n = rows(out, line["step"]), config["rollout"]["n"]
        prompts = [row["uid"] for row in responses[::n]]
        assert len(set(prompts)) == len(prompts) == config["data"]["train_batch_size"]
        assert [row["uid"] for row in responses] == [uid for uid in prompts for _ in range(n)]
        scores = [row["score"] for row in responses if row["score"] is not None]
        assert line["reward_mean"] == pytest.approx(sum(scores) / len(scores))
        lengths = [row["tokens"] for row in responses]
        assert line["response_length_mean"] == pytest.approx(sum(lengths) / len(lengths))
        for name in ("actor", "critic"):
            optim = config[name]["optim"]
            turn = math.cos(math.pi * (line["step"] - 1) / total)
            share = (1 + turn) / 2 if optim["lr_scheduler_type"] == "cosine" else 1.0
            if not max(optim["lr_warmup_steps"], optim["lr_warmup_steps_ratio"]) > 0:
                rate = optim["lr"] * (optim["min_lr_ratio"] * (1 - share) + share)
                assert line.get(f"{name}/lr", rate) == pytest.approx(rate)
        if "kl/coef" in line:
            assert line["kl/coef"] == pytest.approx(coef)
            error = min(max(line["kl/penalty"] / control["target_kl"] - 1, -0.2), 0.2)
            if control["type"] == "adaptive":
                coef *= 1 + error * len(scores) / control["horizon"]
    assert actor["ppo_epochs"] > 1 or lines[0]["ppo_ratio"] == pytest.approx(1.0, abs=0.1)


def assert_same_run(a: Path, b: Path) -> None:
    """The same bits; and what they say is true, as two runs may be wrong alike."""
    assert_true(a)
    assert metrics(a) == metrics(b)
    stems = ["actor/model", "state/actor_opt"]
    if (a / "checkpoints" / "latest" / "critic").exists():
        stems += ["critic/model", "state/critic_opt"]
    for stem in stems:
        actual, reference = (stored(out / "checkpoints" / "latest", stem) for out in (a, b))
        assert actual.keys() == reference.keys()
        for key in actual:
            assert torch.equal(actual[key], reference[key]), f"{stem} {key}"
    for path in sorted((a / "rollouts").iterdir()):
        assert path.read_bytes() == (b / "rollouts" / path.name).read_bytes(), path.name


def undocumented(out: Path) -> set[str]:
    """Metrics of a run that docs/metrics.md does not name; `<part>` there is any name."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = [n for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for n in row.split(", ")]
    patterns = [re.sub(r"<\w+>", ".+", re.escape(n.strip("`"))) for n in named]
    names = re.compile(rf"step|(?:val/)?(?:{'|'.join(patterns)})")
    lines = read_lines(out / "metrics.jsonl")
    return {k for line in lines for k in line if not names.fullmatch(k)}
