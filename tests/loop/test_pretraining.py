"""Critic pretraining: what is trained and when, how it ends, and that a kill changes nothing."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.run_folder.lines import read_lines
from tests.forked import run_forked
from tests.loop.runs import (
    assert_same_run,
    environment,
    metrics,
    rows,
    start,
    stored,
    train,
    train_until_killed,
    wait_for,
)

# A warm-up whose first rate is far from the peak, and validations: both have to stay as they are.
SMALL = (
    "--preset", "embedded", "--batch_size", "8", "--mini_batch_size", "4", "--rollout_n", "2",
    "--max_steps", "4", "--save_freq", "2", "--test_freq", "4", "--max_response_length", "8",
    "data.val_max_samples=16", "data.train_max_samples=36", "--critic_lr", "1e-3",
    "critic.optim.lr_warmup_steps=3",
)  # fmt: skip
PRETRAINED = (*SMALL, "--critic_pretrain_steps", "6", "reward.shaping.normalize=running")
# test_loop.py shows in a moment what pretraining does in a run that is resumed.
pytestmark = pytest.mark.slow


def pretraining(out: Path) -> list[dict[str, Any]]:
    """The steps of pretraining without the clock."""
    lines = read_lines(out / "pretraining.jsonl")
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines
    ]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pretrained") / "run"
    done = train(out, *PRETRAINED)
    assert "critic pretraining 6/6  explained " in done.stdout
    assert re.search(r"critic pretrained in 6 steps: explained variance \S+ -> \S+\n", done.stdout)
    return out


def test_only_the_critic_is_trained_and_training_starts_as_without(
    pretrained: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    train(plain, *SMALL, "--max_steps", "1", "reward.shaping.normalize=running")
    late = ("--resume", str(plain / "checkpoints" / "step_000001"), "--output_dir", str(tmp_path))
    refused = [
        run_forked([command, *PRETRAINED, *late], environment(), timeout=800)
        for command in ("plan", "train")
    ]
    problem = r"step_000001 has 1 step of training, and critic pretraining comes before the first"
    for done in refused:
        assert done.returncode == 2 and re.search(problem, done.stderr), done.stderr
    saved = pretrained / "checkpoints" / "step_000000"
    assert load_file(saved / "state" / "actor_optimizer.safetensors") == {}
    initial = load_file(Path(model_folder("embedded")) / "model.safetensors")
    for name, tensor in stored(saved, "actor/model").items():
        assert torch.equal(tensor, initial[name])
    # Step 1 has the prompts, the responses and the rates of a run without pretraining.
    mine, other = rows(pretrained, 1), rows(plain, 1)
    assert [row["response"] for row in mine] == [row["response"] for row in other]
    assert [row["uid"] for row in mine] == [row["uid"] for row in other]
    first, alone = (metrics(out)[1] for out in (pretrained, plain))
    assert (first["critic/lr"], first["actor/lr"]) == (alone["critic/lr"], alone["actor/lr"])
    assert first["critic/lr"] == pytest.approx(1e-3 / 4)
    assert alone["values/mean"] == 0 != first["values/mean"]  # a fresh head, and a trained one
    # Pretraining has fresh responses in each step, and the peak rate.
    lines = pretraining(pretrained)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {line["critic/lr"] for line in lines} == {1e-3}
    assert not any("grad_norm" in line or "policy_loss" in line for line in lines)
    texts = {
        path.name: [row["response"] for row in read_lines(path)]
        for path in (pretrained / "rollouts").glob("pretraining_*.jsonl")
    }
    assert len(texts) == 6 and len({tuple(text) for text in texts.values()}) == 6
    assert [line["step"] for line in metrics(pretrained)] == [0, 1, 2, 3, 4]


def test_killed_in_pretraining_it_goes_on_as_if_it_was_not(
    pretrained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    train_until_killed(out, 0, *PRETRAINED)
    assert not (out / "checkpoints" / "step_000002").exists()
    assert 2 <= len(pretraining(out)) <= 6
    done = train(out, *PRETRAINED)
    assert "critic pretraining 6/6" in done.stdout
    assert "critic pretraining 1/6" not in done.stdout
    assert_same_run(out, pretrained)
    assert pretraining(out) == pretraining(pretrained)


def test_a_signal_in_pretraining_saves_it(pretrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "stopped"
    process = start(out, *PRETRAINED)
    wait_for(out / "pretraining.jsonl", process)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == 3, said
    assert re.search(
        r"Stopped after step \d of critic pretraining \(SIGTERM\)\. \d steps? of critic "
        r"pretraining (is|are) saved\. Go on with: ", said
    )  # fmt: skip
    train(out, *PRETRAINED)
    assert_same_run(out, pretrained)
    assert pretraining(out) == pretraining(pretrained)


def test_it_ends_at_its_target_or_says_that_it_did_not(tmp_path: Path) -> None:
    # The score is known from the prompt alone, so that the critic can learn it.
    rows_file, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
    rows_file.write_text("".join(
        json.dumps({"prompt": f"{word} is {i}?", "ground_truth": str(int(word == "What"))}) + "\n"
        for i in range(32) for word in ("What", "Who")
    ))  # fmt: skip
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth)\n"
    )
    run = (
        "--preset", "embedded", "--train_files", str(rows_file), "data.val_files=[]",
        "--reward_function", str(reward), "--batch_size", "32", "--mini_batch_size", "8",
        "--max_response_length", "2", "--max_steps", "1", "--critic_lr", "1e-3",
        "--critic_pretrain_until", "0.9",
    )  # fmt: skip
    done = train(tmp_path / "reached", *run)
    lines = pretraining(tmp_path / "reached")
    assert len(lines) < 50 and lines[-1]["explained_variance"] >= 0.9
    assert all(line["explained_variance"] < 0.9 for line in lines[:-1])
    assert metrics(tmp_path / "reached")[0]["explained_variance"] > 0.8  # in step 1
    sentence = f"critic pretrained in {len(lines)} steps: explained variance 0.00 -> "
    assert f"{sentence}{lines[-1]['explained_variance']:.2f} (target 0.9)" in done.stdout
    done = train(tmp_path / "missed", *run, "--critic_pretrain_steps", "2")
    assert "warning: critic pretrained in 2 steps: explained variance 0.00 -> 0." in done.stdout
    assert ", below the target 0.9 (more steps: --critic_pretrain_steps)" in done.stdout


@pytest.mark.weekly
def test_two_ranks_killed_in_pretraining_go_on_as_if_they_were_not(tmp_path: Path) -> None:
    """With an adapter of the critic, and rollouts that are sampled ahead and in parts."""
    run = (
        *PRETRAINED, "--engine", "ray", "--num_workers", "2", "--max_steps", "2",
        "--test_freq", "0", "--async_steps", "2", "--partial_tokens", "1",
        "critic.model.lora_rank=4",
    )  # fmt: skip
    whole, out = tmp_path / "whole", tmp_path / "killed"
    train(whole, *run)
    train_until_killed(out, 0, *run)
    done = train(out, *run)
    assert "critic pretraining 6/6" in done.stdout and "pretraining 1/6" not in done.stdout
    assert pretraining(out) == pretraining(whole) and metrics(out) == metrics(whole)
    assert rows(out) == rows(whole)
    for model in ("actor", "critic"):
        mine, other = (stored(o / "checkpoints" / "latest", f"{model}/") for o in (out, whole))
        assert all(torch.equal(mine[name], other[name]) for name in other)
