"""The whole path without a network: pairs, a fitted reward model, PPO with it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ppo_cli.config.models.bundled import EMBEDDED, prompt_files
from tests.forked import run_forked


def ppo(*args: str) -> str:
    done = run_forked(args, os.environ, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted on the bundled sums: the right answer against two wrong numbers each."""
    folder = tmp_path_factory.mktemp("fit")
    created = random.Random(0)
    rows = []
    for line in Path(prompt_files([EMBEDDED], "train")[0]).read_text().splitlines():
        row = json.loads(line)
        right = int(row["ground_truth"])
        for wrong in created.sample([n for n in range(20, 199) if n != right], 2):
            rows.append({"prompt": row["prompt"], "chosen": str(right), "rejected": str(wrong)})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ppo(
        "reward", "fit", "--data", str(folder / "pairs.jsonl"), "--model", "embedded",
        "--epochs", "3", "--out", str(folder / "rm"),
    )  # fmt: skip
    return folder / "rm"


@pytest.mark.slow
def test_a_fit_tells_right_sums_from_wrong_ones(reward_model: Path) -> None:
    """Prompts are held out, so that sums cannot be learnt by heart."""
    record = json.loads((reward_model / "fit.json").read_text())
    assert 0.4 < record["before"]["accuracy"] < 0.6
    assert record["after"]["accuracy"] > 0.88
    assert record["after"]["loss"] < 0.35


@pytest.mark.slow
def test_ppo_raises_the_score_of_held_out_prompts(reward_model: Path, tmp_path: Path) -> None:
    ppo(
        "train", "--preset", "embedded", "--reward_model", str(reward_model), "--max_steps", "10",
        "--test_freq", "10", "--output_dir", str(tmp_path / "run"),
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val/reward_mean"] > lines[0]["val/reward_mean"] + 0.1
