"""Whole PPO runs on mixtures: parts on one scale, killed and resumed, tokens rewarded, gates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.run_folder.lines import read_lines
from tests.loop.runs import (
    SMALL,
    assert_same_run,
    metrics,
    rows,
    train,
    train_killed_halfway,
    undocumented,
)

pytestmark = pytest.mark.slow
# A function that rewards steps: each right digit at its place, and the length at the end.
STEPS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = [(i + 1, 0.5) for i, (a, b) in enumerate(zip(solution_str, ground_truth)) if a == b]
    return {"score": sum(v for _, v in right) - 0.1 * len(solution_str), "step_rewards": right}
"""
MIXED = """
composite_reward:
  enable: true
  parts:
    model: {weight: 0.5, clip: 3}
    digits: {kind: rule, function: %s, weight: 0.3, scaling: group}
    right: {kind: rule, rule: arithmetic, weight: 0.2, scaling: none, only_if: "digits > 0"}
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "steps.py").write_text(STEPS)
    (folder / "reward_model_config.yaml").write_text(MIXED % (folder / "steps.py"))
    return (
        *SMALL, "--reward_config", str(folder / "reward_model_config.yaml"),
        "--reward_model", str(reward_model), "--reward_model_self_test", "off",
        "--reward_normalize", "running", "--overlong_buffer", "4", "--repetition_penalty", "0.5",
    )  # fmt: skip


def drop_seconds(value: Any) -> Any:
    """Return a value of a run's files without what a reward model and a function took in time."""
    clock = ("model/seconds", "model/tokens_per_s", "latency_s")
    if not isinstance(value, dict):
        return value
    return {k: drop_seconds(v) for k, v in value.items() if not k.endswith(clock)}


def assert_same_but_for_seconds(a: Path, b: Path) -> None:
    for run in (a, b):
        for path in (run / "metrics.jsonl", *(run / "rollouts").iterdir()):
            lines = [json.dumps(drop_seconds(line)) for line in read_lines(path)]
            path.write_text("".join(f"{line}\n" for line in lines))
    assert_same_run(a, b)


def test_killed_and_resumed_the_running_scales_go_on_bit_for_bit(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    full_run, out = tmp_path / "whole", tmp_path / "killed"
    train(full_run, *settings)
    train_killed_halfway(out, *settings)
    assert_same_but_for_seconds(full_run, out)
    states = [
        json.loads((run / "checkpoints" / "latest" / "state" / "run.json").read_text())
        for run in (full_run, out)
    ]
    assert states[0] == states[1]
    assert states[0]["reward"]["running"]["model"]["count"] == 8 * 16
    assert states[0]["run"]["moments"]["count"] == 8 * 16
    assert undocumented(full_run) == set()
    last = metrics(full_run)[-1]
    assert last["shaping/overlong_mean"] <= 0 and "shaping/repetition_mean" in last
    assert {"reward/digits/scaled_std", "reward/right/gated_share"} <= last.keys()
    for line in rows(full_run, 8):
        parts, digits = line["parts"], line["parts"]["digits"]["raw"]
        assert (parts["right"]["raw"] is None) == (digits <= 0)
        assert abs(parts["model"]["scaled"]) <= 3
        total = sum(
            w * parts[n]["scaled"] for n, w in (("model", 0.5), ("digits", 0.3), ("right", 0.2))
        )
        assert line["score"] == pytest.approx(total)
        assert line["shaping"]["reward"] != line["score"]


def test_pieces_of_a_group_are_the_same_killed_and_in_micro_batches_of_one_row(
    tmp_path: Path,
) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    settings = (
        *SMALL, "--reward_function", str(tmp_path / "steps.py"), "--adv_estimator", "piece_group",
        "algorithm.use_kl_in_reward=true",
    )  # fmt: skip
    full_run, killed, by_row = (tmp_path / name for name in ("full", "killed", "by_row"))
    train(full_run, *settings, "actor.ppo_micro_batch_size_per_gpu=4")
    train_killed_halfway(killed, *settings, "actor.ppo_micro_batch_size_per_gpu=4")
    assert_same_but_for_seconds(full_run, killed)
    assert any(line.get("advantages/max", 0) > 0 for line in metrics(full_run))
    train(by_row, *settings, "actor.ppo_micro_batch_size_per_gpu=1", "--max_steps", "1")
    whole, alone = metrics(full_run)[1], metrics(by_row)[1]
    for name in ("advantages/mean", "policy_loss", "grad_norm", "actor/approx_kl"):
        assert whole[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name


def test_a_function_that_always_raises_ends_the_run_with_one_message(tmp_path: Path) -> None:
    out, file = tmp_path / "run", tmp_path / "mine.py"
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    file.write_text(f"{head}    return float(answer == ground_truth)\n")
    args = (*SMALL, "--reward_function", str(file))
    for extra in ((), ("trainer.val_before_train=false",)):
        output = train(out, *args, *extra, exit_code=2)
        message = "responses failed with NameError: name 'answer' is not defined (mine.py, line 2)"
        assert output.stderr.count(message) == 1
        assert "NameError" not in output.stdout and "step 1/" not in output.stdout
    file.write_text(f"{head}    return float(len(solution_str))\n")
    train(out, *args)
    assert metrics(out)[-1]["step"] == 8
