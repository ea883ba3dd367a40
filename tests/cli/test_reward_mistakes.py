"""What plans show of rewards."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from tests.cli.mistakes import ROW, set_desk

OLDER = "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"
FILES = {
    "good.jsonl": f"{json.dumps(ROW)}\n" * 6,
    "older.yaml": OLDER,
}


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    set_desk(tmp_path / "desk", FILES, monkeypatch)
    monkeypatch.setenv("RM_CACHE", str(tmp_path / "cache.sqlite"))
    return tmp_path / "desk"


def test_the_plan_shows_the_mixture_and_what_its_judges_take(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RM_CACHE")
    typed = "plan --preset embedded --reward rule:0.5 --reward judge:tone:0.5 --max_steps 2"
    gate = "reward.composite.parts.tone.only_if='rule >= 1'"
    assert main(shlex.split(f"{typed} {gate}")) == 0
    out = capfd.readouterr().out
    assert "total = 0.5 x zscore(rule) + 0.5 x zscore(tone) (if rule >= 1)" in out
    assert "'tone': 1,024 calls for responses in the run at most: it is asked only if rule" in out
    assert "tone: judge: 1,026 calls" in out  # two of them have known answers
    assert "{tone: {only_if: rule >= 1}}" in out
    assert main(shlex.split(f"{typed} {gate} --json")) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["judge"]["only_if"] == "rule >= 1"
    assert document["reward"]["judge_calls"]["tone"] == 1024
    assert document["judge"]["run"]["calls"] == 1026


def test_the_plan_forecasts_each_of_several_judges(capfd: pytest.CaptureFixture[str]) -> None:
    typed = "plan --preset embedded --reward judge:a:1 --reward judge:b:1 --max_steps 2 --json"
    assert main([*typed.split(), "reward.composite.parts.b.judge.votes=3"]) == 0
    document = json.loads(capfd.readouterr().out)["judge"]["judges"]
    known_answers = 2  # questions of the start, asked once whatever the votes
    votes = {name: document[name]["run"]["calls"] - known_answers for name in "ab"}
    assert votes["b"] == 3 * votes["a"]


def test_the_plan_shows_how_a_reward_model_is_read(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RM_CACHE")
    name = "RLHFlow/ArmoRM-Llama3-8B-v0.1"
    assert main(["plan", "--preset", "embedded", "--reward_model", name]) == 0
    assert f"reward model: {name} is read as armorm (" in capfd.readouterr().out
    assert main(["plan", "--preset", "embedded", "--reward_config", "older.yaml",
                 "--reward_model", name]) == 0  # fmt: skip
    out = capfd.readouterr().out
    assert "total = 0.7 x zscore(model) + 0.3 x zscore(rule)" in out
    assert "is read as armorm" in out
