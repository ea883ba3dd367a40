"""A whole run that learns from nothing but a rubric: the real SDK, a judge on loopback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from tests.judge_server import JudgeServer
from tests.judge_server.wire import fenced
from tests.loop.test_judge_runs import KEY, environment, metrics, rollouts, train

RUBRIC = """
- {name: even, text: The response ends in an even digit., weight: 1}
- {name: one, text: The response begins with the digit 1., weight: 0}
"""
RUN = (
    "train", "--preset", "embedded", "--max_steps", "18", "--test_freq", "-1",
    "data.train_max_samples=256", "--use_api_reward",
    "--rm_api_type", "openai", "--rm_model", "judge-1", "--rm_canary_every", "0",
)  # fmt: skip
pytestmark = pytest.mark.slow


def decide(system: str, user: str) -> str:
    text = (fenced("response", user) or "").strip()
    even, first = bool(re.search(r"[02468]\Z", text)), text.startswith("1")
    return json.dumps(
        {"c1": {"reason": text[-9:], "met": even}, "c2": {"reason": text[:9], "met": first}}
    )


def test_a_run_learns_the_criterion_with_weight_and_not_the_one_without(tmp_path: Path) -> None:
    out, file = tmp_path / "run", tmp_path / "rubric.yaml"
    file.write_text(RUBRIC)
    with JudgeServer(decide) as server:
        server.keys = {KEY}
        where = ["--rm_base_url", server.url("openai"), "--output_dir", str(out)]
        train(environment(tmp_path), [*RUN, "--rm_rubric", str(file), *where])
    # Each step has the same 256 prompts; an empty response is scored without criteria.
    steps = [line for line in metrics(out) if line["step"] > 0]

    def rise(name: str) -> float:
        values = [line[f"rubric/{name}"] for line in steps]
        return fmean(values[-3:]) - fmean(values[:3])

    assert rise("even") > 0.1 and abs(rise("one")) < rise("even") / 2
    assert all(
        line["reward_mean"] == pytest.approx(line["rubric/even"], abs=0.02) for line in steps
    )
    judged = next(line for line in rollouts(out) if line.get("criteria"))
    assert set(judged["criteria"]) == {"even", "one"} and "even: " in judged["reason"]
