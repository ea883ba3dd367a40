"""Real runs with an environment: killed and resumed, in every arrangement, split by turns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_cli.run_folder.lines import read_lines
from tests.loop.runs import SMALL, metrics, rows, stored, train, train_killed_halfway

# Asks two to four questions, which depend on the answers and on the seed of the episode.
ENVIRONMENT = """
class Questions:
    def reset(self, row):
        self.seed, self.turn = row["seed"], 0
        return row["prompt"] or "Begin."

    def step(self, message):
        self.turn += 1
        length = len(message["content"])
        done = self.turn == 2 + self.seed % 3
        if self.seed % 11 == 0 and self.turn == 2:
            raise RuntimeError("no third question")
        reward = {"length": length / 10, "turns": 1.0}
        return f"{length} + {self.seed % 9} = ?", done, reward
"""
EPISODES = (
    *SMALL, "--max_response_length", "128", "--max_turn_tokens", "6",
    "environment.num_workers=2", "environment.gamma_turn=0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("environment") / "questions.py"
    file.write_text(ENVIRONMENT)
    return ("--environment", f"{file}:Questions", *EPISODES)


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    turns = [{**turn, "seconds": 0, "tools": ()} for turn in row.get("turns", ())]
    return {key: value for key, value in row.items() if "seconds" not in key} | {"turns": turns}


def assert_same_run(a: Path, b: Path) -> None:
    """The same bits but for the time that the environment took."""
    assert [*map(without_clock, metrics(a))] == [*map(without_clock, metrics(b))]
    assert [*map(without_clock, rows(a))] == [*map(without_clock, rows(b))]
    for stem in ("actor/model", "critic/model", "state/actor_opt", "state/critic_opt"):
        actual, reference = (stored(out / "checkpoints" / "latest", stem) for out in (a, b))
        assert actual.keys() == reference.keys()
        for key in actual:
            assert torch.equal(actual[key], reference[key]), f"{stem} {key}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        ("--episodes", "36", "--val_episodes", "4"),
        pytest.param(("--async_steps", "1"), marks=pytest.mark.weekly),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(
    episodes: tuple[str, ...], sampling: tuple[str, ...], tmp_path: Path
) -> None:
    args = (*episodes, *sampling)
    train(tmp_path / "whole", *args)
    train_killed_halfway(tmp_path / "killed", *args)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_turns_differ_in_number_and_failed_episodes_are_counted_and_masked(tmp_path: Path) -> None:
    file = tmp_path / "questions.py"
    ends = "if self.turn == 2 and self.seed % 4 < 2: os._exit(7) if self.seed % 4 else 1 / 0"
    file.write_text("import os\n" + re.sub(r"if self.seed % 11.*\n.*", ends, ENVIRONMENT))
    few = ("--max_steps", "2", "--save_freq", "-1", "trainer.val_before_train=false")
    train(tmp_path / "run", "--environment", f"{file}:Questions", *EPISODES, *few)
    written = rows(tmp_path / "run")
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert {len(row["turns"]) for row in written} == {2, 3, 4}
    failed = [row for row in written if row["failure"]]
    reasons = Counter(row["failure"].partition(" (")[0] for row in failed)
    crashes = reasons.pop("its process ended with exit code 7")
    assert reasons.keys() == {"raised ZeroDivisionError: division by zero"}
    assert all((row["score"] is None) == bool(row["failure"]) for row in written)
    assert all(len(row["turns"]) == 2 for row in failed)
    share = sum(line["environment/failed_share"] for line in lines) / len(lines)
    assert share == pytest.approx(len(failed) / len(written))
    assert sum(line["environment/crashes"] for line in lines) == crashes
    assert not any(line["environment/restarts"] for line in lines)


@pytest.mark.slow
def test_a_split_history_trains_a_row_for_each_turn(
    episodes: tuple[str, ...], tmp_path: Path
) -> None:
    args = (*episodes, "--max_steps", "2", "--save_freq", "1", "--max_prompt_length", "128",
            "environment.history=split")  # fmt: skip
    train(tmp_path / "run", *args)
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    written = rows(tmp_path / "run", 1)
    turns = [len(row["turns"]) for row in written if row["score"] is not None]
    assert lines[0]["environment/turns_mean"] > 2
    critic = read_lines(tmp_path / "run" / "critic.jsonl")[0]
    assert critic["positions"][0][0] == sum(turns)  # rows that have a first token


@pytest.mark.slow
@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(("model.packing=false",), marks=pytest.mark.weekly),
        pytest.param(
            ("--engine", "ray", "--num_workers", "2", "model.packing=true"),
            marks=pytest.mark.weekly,
        ),
        ("--rollout_name", "vllm"),
    ],
    ids=["padded", "two ranks", "vllm"],
)
def test_losses_are_those_of_one_process_that_packs(
    episodes: tuple[str, ...], arrangement: tuple[str, ...], tmp_path: Path
) -> None:
    if "vllm" in arrangement:
        pytest.importorskip("vllm")
    # Each token is the most probable one, so that the samplers draw the same.
    args = (
        *episodes, "--max_steps", "2", "--save_freq", "2", "rollout.top_k=1",
        "trainer.val_before_train=false", "--lr", "1e-5", "--critic_lr", "1e-5",
    )  # fmt: skip
    train(tmp_path / "alone", *args, "model.packing=true")
    train(tmp_path / "other", *args, *arrangement)
    responses = [[row["turns"] for row in rows(tmp_path / run)] for run in ("alone", "other")]
    texts = [[[turn["message"] for turn in turns] for turns in run] for run in responses]
    assert texts[0] == texts[1]
    a, b = metrics(tmp_path / "alone"), metrics(tmp_path / "other")
    assert len(a) == len(b) >= 2
    for row_a, row_b in zip(a, b, strict=True):
        for name in ("reward_mean", "policy_loss", "value_loss", "entropy", "grad_norm",
                     "critic_grad_norm", "kl_divergence", "response_length_mean"):  # fmt: skip
            assert row_b.get(name, 0) == pytest.approx(row_a.get(name, 0), rel=5e-4, abs=2e-6), name
