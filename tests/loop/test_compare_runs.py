"""A whole run that learns from nothing but comparisons: the real SDK, a judge on loopback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.judge_server import JudgeServer
from tests.judge_server.wire import fenced
from tests.loop.test_judge_runs import KEY, environment, metrics, rollouts, train

BLOCK = re.compile(r"<response-(R[12])-([0-9a-f]{16})>\n(.*?)\n</response-\1-\2>", re.DOTALL)
RUN = (
    "train", "--preset", "embedded", "--rollout_n", "4", "--batch_size", "32",
    "--mini_batch_size", "16", "--max_steps", "10", "--test_freq", "-1", "--adv_estimator", "grpo",
    "algorithm.use_kl_in_reward=false", "data.val_max_samples=32", "--use_api_reward",
    "--rm_api_type", "openai", "--rm_model", "judge-1", "--rm_mode", "compare",
    "--rm_compare_calls", "8", "--rm_canary_every", "0",
)  # fmt: skip
pytestmark = pytest.mark.slow


def right(question: str, response: str) -> bool:
    """Whether the sum of the question stands in the response."""
    total = sum(map(int, re.findall(r"\d+", question)))
    return re.search(rf"(?<!\d){total}(?!\d)", response) is not None


def prefer_the_right_one(system: str, user: str) -> str:
    question = fenced("prompt", user) or ""
    a, b = (right(question, text) for _, _, text in BLOCK.findall(user))
    better = "tie" if a == b else "R1" if a else "R2"
    return json.dumps({"reason": f"R1 {a}, R2 {b}.", "better_response": better})


def test_a_run_compares_with_the_model_that_it_started_with(tmp_path: Path) -> None:
    """With a critic, stopped after two steps and resumed: the same responses are the measure."""
    out, env = tmp_path / "run", environment(tmp_path)
    with JudgeServer(prefer_the_right_one) as server:
        server.keys = {KEY}
        args = [*RUN[: RUN.index("--adv_estimator")], *RUN[RUN.index("data.val_max_samples=32") :]]
        args = [word for word in args if word not in ("--rm_compare_calls", "8")]
        args += ["--rm_compare", "base", "--rm_base_url", server.url("openai")]
        args += ["--rollout_n", "2", "--output_dir", str(out)]
        train(env, [*args, "--max_steps", "2"])
        output = train(env, [*args, "--max_steps", "3"])
    lines = metrics(out)
    assert [line["step"] for line in lines if line["step"]] == [1, 2, 3]
    assert all(0.2 < line["judge/win_rate"] < 0.8 for line in lines if line["step"])
    assert "time/first_responses_s" in lines[0] | lines[1]
    assert "time/first_responses_s" not in lines[3] and "after step 2" in output.stdout


def test_a_run_learns_from_comparisons_alone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with JudgeServer(prefer_the_right_one) as server:
        server.keys = {KEY}
        where = ["--rm_base_url", server.url("openai"), "--output_dir", str(out)]
        train(environment(tmp_path), [*RUN, *where])
    lines = metrics(out)
    steps = [line for line in lines if line["step"] > 0]
    assert all(line["reward_mean"] == pytest.approx(0.5, abs=0.03) for line in steps)
    assert all(line.get("judge/place_followed", 0) == 0 for line in steps)
    assert lines[0]["val/judge/win_rate"] == 0.5 and lines[-1]["val/judge/win_rate"] > 0.55

    def share(step: int) -> float:
        mine: list[dict[str, Any]] = [line for line in rollouts(out) if line["step"] == step]
        return fmean(right(line["prompt"], line["response"]) for line in mine)

    first, last = fmean(map(share, (1, 2, 3))), fmean(map(share, (8, 9, 10)))
    assert last > first + 0.1
    judged = next(line for line in rollouts(out) if line.get("compared"))
    assert {"wins", "compared", "strength"} <= judged.keys() and "R1" in judged["reason"]
