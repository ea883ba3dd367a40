"""The whole path without a network: pairs, a fitted reward model, PPO with it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ppo_cli.config.models.bundled import EMBEDDED, model_folder, prompt_files
from tests.forked import run_forked


def ppo(*args: str) -> str:
    done = run_forked(args, os.environ, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count_parameters(folder: Path | str) -> int:
    from safetensors.torch import load_file

    files = Path(folder).glob("*.safetensors")
    return sum(tensor.numel() for file in files for tensor in load_file(file).values())


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
@pytest.mark.weekly
def test_a_fit_tells_right_sums_from_wrong_ones(reward_model: Path) -> None:
    """Prompts are held out, so that sums cannot be learnt by heart."""
    record = json.loads((reward_model / "fit.json").read_text())
    assert 0.4 < record["before"]["accuracy"] < 0.6
    assert record["after"]["accuracy"] > 0.88
    assert record["after"]["loss"] < 0.35


@pytest.mark.slow
@pytest.mark.weekly
def test_ppo_raises_the_score_of_held_out_prompts(reward_model: Path, tmp_path: Path) -> None:
    ppo(
        "train", "--preset", "embedded", "--reward_model", str(reward_model), "--max_steps", "15",
        "--test_freq", "15", "--output_dir", str(tmp_path / "run"),
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val/reward_mean"] > lines[0]["val/reward_mean"] + 0.1


@pytest.mark.slow
def test_a_judge_of_labelled_responses_agrees_on_held_out_prompts_and_trains(
    tmp_path: Path,
) -> None:
    """The embedded model's own responses, with labels by rule; then PPO with the judge."""
    embedded = ("train", "--preset", "embedded", "--output_dir")
    ppo(*embedded, str(tmp_path / "first"), "--max_steps", "2", "trainer.val_before_train=false")
    lines = [
        json.loads(line)
        for file in sorted((tmp_path / "first/rollouts").glob("step_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    rows = []
    for line in lines:
        number = int(line["extracted"] or 0)
        marks = {"hundreds": number >= 100, "size": min(3, max(0, number // 50))}
        rows.append({"prompt": line["prompt"], "response": line["response"], "marks": marks})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    criteria = [
        {"name": "hundreds", "text": "The number has three digits.", "weight": 2},
        {"name": "size", "text": "How large the number is.", "levels": 3},
    ]
    (tmp_path / "criteria.yaml").write_text(json.dumps(criteria))
    result = ppo(
        "reward", "fit", "--data", str(tmp_path / "rows.jsonl"), "--labels", "marks",
        "--criteria", str(tmp_path / "criteria.yaml"), "--model", "embedded", "--epochs", "3",
        "--val_share", "0.25", "--lr", "0.003", "--out", str(tmp_path / "judge"),
    )  # fmt: skip
    record = json.loads((tmp_path / "judge/fit.json").read_text())
    for name in ("score", "hundreds", "size"):
        assert record["agreement"][name]["low"] > 0.7, record["agreement"]
    assert "hundreds" in result and " ms in which embedded writes one." in result
    assert min(record["seconds"].values()) > 0
    # Timings depend on the load: a judge that reads a response in one pass is as large as the
    # policy that writes it token by token.
    judge, policy = (count_parameters(x) for x in (tmp_path / "judge", model_folder(EMBEDDED)))
    assert judge < 1.1 * policy
    ppo(
        *embedded, str(tmp_path / "run"), "--reward_model", str(tmp_path / "judge"), "--max_steps",
        "8", "--test_freq", "8", "--reward_model_self_test", "warn",
    )  # fmt: skip
    steps = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["val/reward_mean"] > steps[0]["val/reward_mean"] + 0.02
    assert 0 <= steps[-1]["rubric/hundreds"] <= 1
