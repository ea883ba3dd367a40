"""Whole runs of `ppo train` on one GPU beside those of the CPU: numbers, resuming, LoRA."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.loop.runs import command

# Where there is no GPU: runs on the CPU are compared in tests/loop.
pytestmark = [pytest.mark.weekly, pytest.mark.timeout(300)]
SMALL = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_response_length", "8", "--save_freq", "2", "--test_freq", "2",
    "data.val_max_samples=16", "trainer.engine=local",
)  # fmt: skip
COMPARED = (
    "reward_mean", "response_length_mean", "entropy", "values/mean", "actor_loss", "critic_loss",
    "grad_norm", "critic_grad_norm", "actor/approx_kl",
)  # fmt: skip


def train(out: Path, variables: Mapping[str, str], *args: str) -> list[dict[str, Any]]:
    """The metrics of a run, from its validation before the first step."""
    done = subprocess.run(
        command(out, *args), env=variables, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def responses(out: Path) -> list[str]:
    """What was sampled for the first step."""
    rows = (out / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    return [json.loads(row)["response"] for row in rows]


def test_a_run_is_that_of_the_cpu(
    on_gpu: bool, variables: dict[str, str], tmp_path: Path, figure: Any
) -> None:
    """In float32; on the CPU its two ways to lay rows out are compared."""
    on_cpu = variables | {"CUDA_VISIBLE_DEVICES": ""}
    exact = train(tmp_path / "cpu", on_cpu, *SMALL, "--max_steps", "2", "model.packing=false")
    lines = train(tmp_path / "run", variables, *SMALL, "--max_steps", "2")
    assert responses(tmp_path / "run") == responses(tmp_path / "cpu")
    assert lines[0]["val/accuracy"] == exact[0]["val/accuracy"]
    # The policy is still its reference; the sampler's log-probs are rounded in other places.
    assert lines[1]["kl/penalty"] == pytest.approx(0, abs=1e-5)
    for name in COMPARED:
        assert lines[1][name] == pytest.approx(exact[1][name], rel=1e-2, abs=1e-4), name
    assert lines[2]["kl/penalty"] == pytest.approx(exact[2]["kl/penalty"], rel=0.2, abs=1e-5)
    figure("seconds a step", lines[2]["time/step_s"])


def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(
    on_gpu: bool, variables: dict[str, str], tmp_path: Path
) -> None:
    unbroken = train(tmp_path / "whole", variables, *SMALL, "--max_steps", "4")
    train(tmp_path / "parts", variables, *SMALL, "--max_steps", "2")
    parts = train(tmp_path / "parts", variables, *SMALL, "--max_steps", "4")
    assert [line["step"] for line in parts] == [0, 1, 2, 3, 4]
    rounding = {"rel": 1e-2, "abs": 1e-4} if on_gpu else {"rel": 0.0, "abs": 0.0}
    for name in COMPARED:
        assert parts[3][name] == pytest.approx(unbroken[3][name], **rounding), name


def test_lora_in_half_precision(on_gpu: bool, variables: dict[str, str], tmp_path: Path) -> None:
    """The policy begins as its reference, and departs from it; only the adapter is saved."""
    lines = train(
        tmp_path / "run", variables, *SMALL, "--max_steps", "2", "model.dtype=bfloat16",
        "model.lora_rank=4", "actor.optim.lr=1e-3",
    )  # fmt: skip
    assert lines[1]["kl/penalty"] == 0 != lines[2]["kl/penalty"]
    assert lines[2]["actor/skipped_steps"] == 0
    actor = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    assert (actor / "adapter_model.safetensors").exists()
    assert not (actor / "model.safetensors").exists()
