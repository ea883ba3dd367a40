"""Words about a run cost no torch: what fresh processes import, and how much of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch", "transformers", "datasets", "numpy", "pyarrow", "pandas", "ray", "vllm", "sympy",
    "math_verify", "openai", "anthropic", "dashscope", "tensorboard", "wandb",
    "trackio", "mlflow", "swanlab", "bokeh",
}  # fmt: skip
PROGRAM = [sys.executable, "-X", "importtime", "-m", "ppo_cli"]


def modules_of(root: Path, cwd: Path, *args: str, exit_code: int) -> list[str]:
    """All modules that a fresh process imports."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*PROGRAM, *args], capture_output=True, text=True, timeout=120, cwd=cwd, env=env
    )
    assert done.returncode == exit_code, done.stderr[-2000:]
    assert done.stdout.strip() or exit_code
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return [line.rsplit("|", 1)[1].strip() for line in lines]


# How many modules come in is the same on every machine; benchmarks/startup.py has the times.
@pytest.mark.parametrize(
    ("args", "max_modules", "exit_code"),
    [
        ("--help", 250, 0), ("train --help", 650, 0), ("train --dry_run", 500, 0),
        ("train --engine verl", 600, 2), ("presets list", 500, 0),
        ("report --help", 500, 0), ("eval --help", 650, 0), ("generate --greedy", 650, 2),
        ("show", 500, 2), ("prompts render embedded --response 4", 680, 0),
    ],
)  # fmt: skip
def test_no_heavy_import(
    root: Path, tmp_path: Path, args: str, max_modules: int, exit_code: int
) -> None:
    modules = modules_of(root, tmp_path, *args.split(), exit_code=exit_code)
    assert "ppo_cli" in modules
    settings = {"pydantic", "yaml", "rich"} if args == "--help" else set()
    allowed = {"numpy"} if "render" in args else set()
    assert {name.split(".")[0] for name in modules} & (HEAVY | settings) <= allowed
    assert len(modules) < max_modules


def test_a_plan_loads_the_rewards_that_it_names(root: Path, tmp_path: Path) -> None:
    modules = modules_of(root, tmp_path, "plan", "--preset", "embedded", exit_code=0)
    assert {name.split(".")[0] for name in modules}.isdisjoint(HEAVY) and len(modules) < 440
    for absent in ("rewards.judge", "rewards.code.check", "rewards.pool", "extras.migrate.bridge"):
        assert not [name for name in modules if name.startswith(f"ppo_cli.{absent}")]
    judged = ["plan", "--preset", "judge", "--model", "embedded", "--train_files", "embedded"]
    modules = modules_of(root, tmp_path, *judged, exit_code=0)
    assert {"ppo_cli.rewards.judge.prompt", "ppo_cli.scoring.forecast"} <= set(modules)
    loaded = {name.split(".")[0] for name in modules}
    assert loaded.isdisjoint(HEAVY - {"numpy"} | {"google", "aiohttp"})


def test_prompts_are_counted_without_torch(root: Path, tmp_path: Path) -> None:
    modules = modules_of(root, tmp_path, "data", "check", "embedded", exit_code=0)
    loaded = {name.split(".")[0] for name in modules}
    assert "transformers" in loaded and loaded.isdisjoint({"torch", "datasets", "ray", "sympy"})
