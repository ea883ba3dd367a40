"""Ways to get a judge wrong: each one message with its mend, exit 2, before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_cli.cli.app import main
from tests.cli.mistakes import KEY, ROW, TINY, TRAIN, Mistake, assert_told_once, set_desk

JUDGE = f"{TRAIN} --use_api_reward --rm_model qwen-plus"
FILES = {
    "tiny.yaml": TINY,
    "good.jsonl": f"{json.dumps(ROW)}\n" * 6,
    "empty.yaml": "",
    "reward.py": "def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n",
    "r_key.yaml": "api_reward:\n  model: qwen-plus\n  voets: 3\n",
    "r_secret.yaml": "type: openai\nmodel: m\napi_key: sk-hush-hush-hush\n",
    "r_type.yaml": "model: m\nvotes: many\n",
    "r_mixture.yaml": "composite_reward:\n  judge: 0.7\n",
}


MISTAKES = {
    "judge without model": Mistake(
        f"{TRAIN} --use_api_reward --rm_api_type gemini", "no model", "--rm_model gemini"
    ),
    "judge off": Mistake(f"{TRAIN} --rm_votes 3", "--rm_votes.*no LLM judge", "leave it out"),
    "judge and rule": Mistake(f"{JUDGE} --rule exact", "reward.rule", "Keep one.*--reward"),
    "judge and function": Mistake(
        f"{JUDGE} --reward_function reward.py", "reward.function", "Keep one.*--reward"
    ),
    "a rule's time-out": Mistake(
        f"{JUDGE} reward.timeout=3", "reward.timeout", "settings under reward.api", KEY
    ),
    "no key of dashscope": Mistake(JUDGE, "no key.*dashscope", "DASHSCOPE_API_KEY"),
    "no key of openai": Mistake(
        f"{JUDGE} --rm_api_type openai", "no key.*openai", "OPENAI_API_KEY", KEY
    ),
    "no key of gemini": Mistake(
        f"{JUDGE} --rm_api_type gemini", "no key.*gemini", "GEMINI_API_KEY or GOOGLE_API_KEY", KEY
    ),
    "no key of claude": Mistake(
        f"{JUDGE} --rm_api_type claude", "no key.*claude", "ANTHROPIC_API_KEY or CLAUDE", KEY
    ),
    "a blank key": Mistake(JUDGE, "no key", "DASHSCOPE_API_KEY", {"DASHSCOPE_API_KEY": " "}),
    "key_env": Mistake(f"{JUDGE} --rm_key_env MINE", "no key", "set MINE", KEY),
    "key for its name": Mistake(
        f"{JUDGE} --rm_key_env sk-hush-hush-hush", "--rm_key_env", "not the key itself", KEY
    ),
    "no key of the monitor": Mistake(
        f"{JUDGE} --rm_monitor_model m", "monitoring judge", "OPENAI_API_KEY", KEY
    ),
    "no monitor": Mistake(
        f"{JUDGE} --rm_monitor_share 0.5", "--rm_monitor_share", "--rm_monitor_model", KEY
    ),
    "judge prompt's preset": Mistake(
        f"{JUDGE} --rm_prompt_preset maths", "--rm_prompt_preset.*'maths'", "'math'", KEY
    ),
    "preset and own prompt": Mistake(
        f"{JUDGE} --rm_prompt_preset math --rm_scoring_prompt 'Rate {{response}}'",
        "prompt_preset has no effect",
        "leave one",
        KEY,
    ),
    "unknown variable": Mistake(
        f"{JUDGE} --rm_scoring_prompt 'Is {{response}} an answer to {{promt}}?'",
        "{promt}",
        "'prompt'",
        KEY,
    ),
    "prompt without response": Mistake(
        f"{JUDGE} --rm_scoring_prompt 'Rate the answer to {{prompt}}'",
        "--rm_scoring_prompt.*{response} is missing",
        "Answer: {response}",
        KEY,
    ),
    "judge prompt's file": Mistake(
        f"{JUDGE} --rm_prompt_file no.yaml", "no.yaml", "no such|there is no", KEY
    ),
    "scale": Mistake(f"{JUDGE} --rm_scale ten", "--rm_scale.*'ten'", "such as 1-10", KEY),
    "falling scale": Mistake(f"{JUDGE} --rm_scale 10-1", "'10-1' does not rise", "lower", KEY),
    "address": Mistake(f"{JUDGE} --rm_base_url h:80/v1", "--rm_base_url.*h:80", "http://", KEY),
    "decisions of claude": Mistake(
        f"{JUDGE} --rm_api_type claude --rm_mode decision", "--rm_mode", "--rm_mode text"
    ),
    "one price": Mistake(f"{JUDGE} --rm_price_input 1", "--rm_price_input", "--rm_price_output"),
    "budget without price": Mistake(
        f"{JUDGE} --rm_model of-nobody --rm_budget_usd 3", "budget of .3", "--rm_price_input", KEY
    ),
    "file of prices": Mistake(
        f"{JUDGE} --rm_prices no.yaml", "--rm_prices no.yaml", "there is no such file", KEY
    ),
    "failure rate": Mistake(f"{JUDGE} --rm_max_failure_rate 20", "20", "at most 1", KEY),
    "judge's variable": Mistake(
        "train", "env RM_API_TYPE.*'opnai'", "'openai'", {"RM_API_TYPE": "opnai"}
    ),
    "no reward file": Mistake(f"{TRAIN} --reward_config r_kee.yaml", "r_kee.yaml", "'r_key.yaml'"),
    "empty reward file": Mistake(f"{TRAIN} --reward_config empty.yaml", "empty.yaml", "'api:'"),
    "key of a reward file": Mistake(
        f"{TRAIN} --reward_config r_key.yaml", "r_key.yaml line 3.*voets", "'votes'"
    ),
    "type in a reward file": Mistake(
        f"{TRAIN} --reward_config r_type.yaml", "r_type.yaml line 2.*'many'", "number .at least 1"
    ),
    "secret in a reward file": Mistake(
        f"{TRAIN} --reward_config r_secret.yaml", "r_secret.yaml line 3", "set OPENAI_API_KEY there"
    ),
    "mixture in a reward file": Mistake(
        f"{TRAIN} --reward_config r_mixture.yaml",
        "r_mixture.yaml line 2.*'judge'",
        "below weights or parts",
    ),
}


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
