"""Whole runs that learn from comparisons or a rubric alone: the real SDK, a judge on loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest

from ppo_cli.run_folder.lines import read_metrics
from tests.judge_server import JudgeServer
from tests.judge_server.wire import fenced
from tests.loop.runs import rows
from tests.loop.test_judge_runs import KEY, environment, run_ppo

JUDGED = (
    "train", "--preset", "embedded", "--test_freq", "0", "--use_api_reward",
    "--rm_api_type", "openai", "--rm_model", "judge-1", "--rm_canary_every", "0",
)  # fmt: skip
COMPARED = (
    *JUDGED, "--rm_mode", "compare", "--batch_size", "32", "--mini_batch_size", "16",
    "data.val_max_samples=32",
)  # fmt: skip
BLOCK = re.compile(r"<response-(R[12])-([0-9a-f]{16})>\n(.*?)\n</response-\1-\2>", re.DOTALL)
RUBRIC = """
- {name: even, text: The response ends in an even digit., weight: 1}
- {name: one, text: The response begins with the digit 1., weight: 0}
"""
pytestmark = pytest.mark.slow


def train(tmp_path: Path, answer: Callable[[str, str], str], *commands: tuple[str, ...]) -> str:
    """Run these commands in one folder with a judge that answers so; returns the last output."""
    with JudgeServer(answer) as server:
        server.keys = {KEY}
        where = ["--rm_base_url", server.url("openai"), "--output_dir", str(tmp_path / "run")]
        for command in commands:
            done = run_ppo(environment(tmp_path), [*command, *where])
    return done.stdout


def right(question: str, response: str) -> bool:
    """Whether the sum of the question is in the response."""
    total = sum(map(int, re.findall(r"\d+", question)))
    return re.search(rf"(?<!\d){total}(?!\d)", response) is not None


def prefer_the_right_one(system: str, user: str) -> str:
    question = fenced("prompt", user) or ""
    a, b = (right(question, text) for _, _, text in BLOCK.findall(user))
    better = "tie" if a == b else "R1" if a else "R2"
    return json.dumps({"reason": f"R1 {a}, R2 {b}.", "better_response": better})


def decide_criteria(system: str, user: str) -> str:
    text = (fenced("response", user) or "").strip()
    even, first = bool(re.search(r"[02468]\Z", text)), text.startswith("1")
    return json.dumps(
        {"c1": {"reason": text[-9:], "met": even}, "c2": {"reason": text[:9], "met": first}}
    )


def test_a_run_compares_with_the_model_that_it_started_with(tmp_path: Path) -> None:
    """With a critic, stopped after two steps and resumed: the same responses are the measure."""
    base = (*COMPARED, "--rm_compare", "base", "--rollout_n", "2", "--max_steps")
    output = train(tmp_path, prefer_the_right_one, (*base, "2"), (*base, "3"))
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if line["step"]] == [1, 2, 3]
    assert all(0.2 < line["judge/win_rate"] < 0.8 for line in lines if line["step"])
    assert "time/first_responses_s" in lines[0] | lines[1]
    assert "time/first_responses_s" not in lines[3] and "after step 2" in output


def test_a_run_learns_from_comparisons_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    grpo = ("--adv_estimator", "grpo", "algorithm.use_kl_in_reward=false", "--rollout_n", "4")
    command = (*COMPARED, *grpo, "--rm_compare_calls", "8", "--max_steps", "10")
    train(tmp_path, prefer_the_right_one, command)
    lines = read_metrics(out)
    steps = [line for line in lines if line["step"] > 0]
    assert all(line["reward_mean"] == pytest.approx(0.5, abs=0.03) for line in steps)
    assert all(line.get("judge/place_followed", 0) == 0 for line in steps)
    assert lines[0]["val/judge/win_rate"] == 0.5 and lines[-1]["val/judge/win_rate"] > 0.55
    shares = [
        fmean(right(row["prompt"], row["response"]) for row in rows(out, step))
        for step in range(1, 11)
    ]
    assert fmean(shares[-3:]) > fmean(shares[:3]) + 0.1
    judged = next(row for row in rows(out) if row.get("compared"))
    assert {"wins", "compared", "strength"} <= judged.keys() and "R1" in judged["reason"]


def test_a_run_learns_the_criterion_with_weight_and_not_the_one_without(tmp_path: Path) -> None:
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    rubric = ("--rm_rubric", str(tmp_path / "rubric.yaml"), "--max_steps", "18")
    train(tmp_path, decide_criteria, (*JUDGED, *rubric, "data.train_max_samples=256"))
    # Each step has the same 256 prompts; an empty response is scored without criteria.
    steps = [line for line in read_metrics(tmp_path / "run") if line["step"] > 0]

    def rise(name: str) -> float:
        values = [line[f"rubric/{name}"] for line in steps]
        return fmean(values[-3:]) - fmean(values[:3])

    assert rise("even") > 0.1 and abs(rise("one")) < rise("even") / 2
    assert all(
        line["reward_mean"] == pytest.approx(line["rubric/even"], abs=0.02) for line in steps
    )
    judged = next(row for row in rows(tmp_path / "run") if row.get("criteria"))
    assert set(judged["criteria"]) == {"even", "one"} and "even: " in judged["reason"]
