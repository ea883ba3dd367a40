"""Rewards as they are typed: what is wrong with them, and what plans show of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from tests.cli.mistakes import KEY, ROW, TINY, TRAIN, Mistake, assert_told_once, set_desk

JUDGE = f"{TRAIN} --use_api_reward --rm_model qwen-plus"
OLDER = "composite_reward:\n  enable: true\n  weights: {rm_score: 0.7, rule_score: 0.3}\n"
FILES = {
    "tiny.yaml": TINY,
    "good.jsonl": f"{json.dumps(ROW)}\n" * 6,
    "older.yaml": OLDER,
    "r_secret.yaml": "api_reward:\n  type: openai\n  api_key: sk-hush-hush-hush\n",
}


# One of each kind; the settings themselves are in tests/config.
MISTAKES = {
    "no key": Mistake(JUDGE, "no key.*dashscope", "DASHSCOPE_API_KEY"),
    "key for its name": Mistake(
        f"{JUDGE} --rm_key_env sk-hush-hush-hush", "--rm_key_env", "not the key itself", KEY
    ),
    "secret in a reward file": Mistake(
        f"{TRAIN} --reward_config r_secret.yaml", "r_secret.yaml line 3", "set OPENAI_API_KEY there"
    ),
    "unknown variable": Mistake(
        f"{JUDGE} --rm_scoring_prompt 'Is {{response}} an answer to {{promt}}?'",
        "{promt}",
        "'prompt'",
        KEY,
    ),
    "judge prompt's file": Mistake(
        f"{JUDGE} --rm_prompt_file no.yaml", "no.yaml", "no such|there is no", KEY
    ),
    "budget without price": Mistake(
        f"{JUDGE} --rm_model of-nobody --rm_budget_usd 3", "budget of .3", "--rm_price_input", KEY
    ),
    "file of prices": Mistake(
        f"{JUDGE} --rm_prices no.yaml", "--rm_prices no.yaml", "there is no such file", KEY
    ),
    "a variable's folder": Mistake(TRAIN, "folder ./nowhere", "--reward_model", {
        "REWARD_MODEL_PATH": "./nowhere"
    }),
    "model and judge": Mistake(
        f"{TRAIN} --reward_model a/b --use_api_reward",
        "flag --use_api_reward.*flag --reward_model",
        "--reward judge:0.5 --reward model:0.5",
    ),
    "no such rule": Mistake(f"{TRAIN} --reward rule:exakt:1", "exakt", "'exact'"),
    "who is rm_score": Mistake(
        f"{TRAIN} --reward_config older.yaml", "older.yaml line 3.*rm_score", "--reward_model PATH"
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    set_desk(tmp_path / "desk", FILES, monkeypatch)
    monkeypatch.setenv("RM_CACHE", str(tmp_path / "cache.sqlite"))
    return tmp_path / "desk"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_once_with_its_mend(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if "--use_api_reward" not in MISTAKES[name].typed:
        monkeypatch.delenv("RM_CACHE")
    assert_told_once(MISTAKES[name], monkeypatch, capfd)


def test_a_key_and_prompts_are_all_that_the_judge_preset_needs(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "judge"]) == 2
    err = capfd.readouterr().err
    assert "DASHSCOPE_API_KEY" in err and "--train_files" in err
    assert main(["plan", "--preset", "judge", "--train_files", "good.jsonl"]) == 0
    assert "DASHSCOPE_API_KEY" in capfd.readouterr().out
    monkeypatch.setenv("DASHSCOPE_API_KEY", "a-key-of-nobody")
    assert main(["plan", "--preset", "judge", "--train_files", "good.jsonl"]) == 0
    assert "DASHSCOPE_API_KEY" not in capfd.readouterr().out


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
