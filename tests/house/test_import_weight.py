"""Words about a run cost no torch: fresh processes, what they import and what they take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch", "transformers", "datasets", "pyarrow", "pandas", "ray", "vllm", "sympy",
    "math_verify", "openai", "anthropic", "dashscope", "tensorboard", "wandb",
}  # fmt: skip
PROGRAM = [sys.executable, "-X", "importtime", "-m", "ppo_cli"]


def run_ppo(root: Path, cwd: Path, *words: str) -> tuple[set[str], float]:
    """Top-level modules that a fresh process imports, and the CPU seconds it takes."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    before = os.times()
    done = subprocess.run(
        [*PROGRAM, *words], capture_output=True, text=True, timeout=120, cwd=cwd, env=env
    )
    after = os.times()
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    seconds = sum(after[2:4]) - sum(before[2:4])
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}, seconds


# CPU time, not wall time: a busy machine must not fail the test.
@pytest.mark.parametrize(
    ("words", "limit"),
    [(["--help"], 0.5), (["train", "--help"], 1.0), (["plan", "--preset", "embedded"], 1.5)],
    ids=["help", "train-help", "plan"],
)
def test_no_heavy_import(root: Path, tmp_path: Path, words: list[str], limit: float) -> None:
    runs = [run_ppo(root, tmp_path, *words) for _ in range(3)]
    modules = runs[0][0]
    assert "ppo_cli" in modules
    assert modules & HEAVY == set()
    assert min(seconds for _, seconds in runs) < limit
