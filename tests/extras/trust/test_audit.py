"""The audit: sound judges and prompts pass, and each kind of weakness fails its own check."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import ApiReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.errors import ConfigError, Interrupted
from ppo_cli.extras.trust import attacks as tr
from ppo_cli.extras.trust.attacks import (
    INJECTIONS,
    LEAKS,
    MASTER_KEYS,
    bundled_items,
    fill_injection,
    load_items,
    pad_answer,
)
from ppo_cli.extras.trust.audit import audit, check_trials
from ppo_cli.records import Rollout, Score
from ppo_cli.report.tracker import Screen
from ppo_cli.rewards.base import Reward
from ppo_cli.rewards.judge import prompt
from ppo_cli.rewards.judge.calls import Scale
from tests.extras.trust.judges import Asked, Judge, gullible, honest, literal, obedient
from tests.scoring.scripted import Scripted, write_rows

PRESETS = ("math", "code", "dialogue", "safety")
Checks = dict[str, dict[str, Any]]


class Remarks(Screen):
    """A screen that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a remark."""
        self.notes.append(text)


def run(settings: RewardSettings, reward: Reward, *, rows: int = 6, data: str | None = None) -> Any:
    items = load_items(settings, file=data, preset=None, max_rows=rows)
    result = audit(reward, settings, items, screen=Screen())
    json.dumps(result, allow_nan=False)
    return result


def checks_of(judge: Judge, *, rows: int = 6, **api: Any) -> Checks:
    settings = RewardSettings(api=ApiReward(enable=True, model="m", **api))
    result = run(settings, Asked(settings.api, judge), rows=rows)
    return {check["name"]: check for check in result["checks"]}


def failed(checks: Checks) -> set[str]:
    return {name for name, check in checks.items() if check["passed"] is False}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("judge", [honest, gullible])
def test_shipped_prompts_pass(judge: Judge, preset: Any) -> None:
    checks = checks_of(judge, prompt_preset=preset, rows=12)
    assert failed(checks) == set()
    assert all(check["passed"] for check in checks.values()), "nothing is skipped"
    assert len(checks) == 11


def test_the_words_on_data_are_what_holds_the_gullible_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = prompt.CLOSING.replace("not instructions", "as it came")
    assert bare != prompt.CLOSING
    monkeypatch.setattr(prompt, "CLOSING", bare)
    checks = checks_of(gullible, prompt_preset="math")
    assert failed(checks) == {"prompt injection", "worked cases"}
    worst = checks["prompt injection"]["worst"]
    assert worst["got"] == 1.0
    assert "10" in worst["sent"]


def test_an_obedient_judge_is_caught() -> None:
    checks = checks_of(obedient, prompt_preset="math", gate=False)
    assert checks["content-free gate"]["passed"] is None
    assert "--rm_gate" in checks["content-free gate"]["said"]
    assert failed(checks) == {"prompt injection", "worked cases"}
    broken = {c["trial"] for c in checks["prompt injection"]["cases"] if c["passed"] is False}
    assert {"fake verdict", "ignore instructions", "in German", "comment in code"} <= broken


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (
            "Rate how confident this sounds, 1-10: {response}",
            {"master keys", "prompt injection", "right against wrong", "spread of scores"},
        ),
        ("Rate how long this is, 1-10: {response}", {"padding", "right against wrong"}),
        (
            "Give the score that the response asks for, or judge it, 1-10: {prompt} {response}",
            {"prompt injection"},
        ),
    ],
    ids=["confident", "long", "asks-for"],
)
def test_a_hackable_prompt_is_caught(prompt: str, expected: set[str]) -> None:
    assert expected <= failed(checks_of(literal, scoring_prompt=prompt))


@pytest.mark.parametrize(
    ("judge", "expected"),
    [
        (lambda s, u: 8, {"master keys", "ground truth in the response", "right against wrong"}),
        (lambda s, u: 10 if honest(s, u) > 4 else 1, {"spread of scores"}),
        (lambda s, u: 11 - honest(s, u), {"right against wrong", "worked cases"}),
    ],
    ids=["always-8", "all-or-nothing", "upside-down"],
)
def test_weak_judges_fail(judge: Judge, expected: set[str]) -> None:
    checks = checks_of(judge, prompt_preset="math")
    assert expected <= failed(checks)
    if "spread of scores" in expected:
        assert checks["spread of scores"]["worst"] == {"levels": [0.0, 1.0]}


def test_an_unsteady_judge_fails() -> None:
    turns = itertools.cycle([0, 4])
    checks = checks_of(lambda s, u: max(1, honest(s, u) - next(turns)), prompt_preset="dialogue")
    assert "same answer twice" in failed(checks)


def test_a_leaking_template_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def chained(self: prompt.Template, material: Any, *arguments: Any) -> prompt.Question:
        text = self.scoring.replace("{response}", material.response)
        text = text.replace("{ground_truth}", str(material.ground_truth))
        return prompt.Question(self.system, text, text, self.scale)

    assert checks_of(honest, prompt_preset="math")["ground truth in the request"]["passed"]
    monkeypatch.setattr(prompt.Template, "question", chained)
    settings = RewardSettings(api=ApiReward(enable=True, model="m", prompt_preset="math"))
    result = run(settings, Scripted(lambda r: Score(0.0)))
    checks = {check["name"]: check for check in result["checks"]}
    leak = checks["ground truth in the request"]
    assert leak["passed"] is False
    assert leak["worst"]["sent"] == "{ground_truth}"
    assert leak["worst"]["got"] == leak["worst"]["wanted"] + 1


def test_a_judge_that_cannot_be_read_fails() -> None:
    def mute(rollout: Rollout) -> Score:
        return Score.failed("unparsed: hm") if len(rollout.text) % 3 else Score(0.0)

    settings = RewardSettings(api=ApiReward(enable=True, model="m", prompt_preset="math"))
    result = run(settings, Scripted(mute))
    check = next(c for c in result["checks"] if c["name"] == "readable verdicts")
    assert check["passed"] is False
    assert check["worst"]["got"] == "unparsed: hm"
    filled = Scripted(lambda r: Score(0.2, imputed="timeout: slow"))
    checks = {c["name"]: c for c in run(settings, filled)["checks"]}
    assert checks["readable verdicts"]["passed"] is False
    assert checks["master keys"]["said"] == "there was no verdict"


def test_rules_are_audited_too() -> None:
    settings = RewardSettings(rule="gsm8k")
    honest_rule = Scripted(lambda r: Score(float(f"#### {r.prompt.ground_truth}" in r.text)))
    result = run(settings, honest_rule)
    passed = {c["name"]: c["passed"] for c in result["checks"]}
    assert set(passed.values()) == {True, None}
    assert passed["ground truth in the request"] is None
    assert "worked cases" not in passed
    assert result["reward"] == "rule gsm8k"


def test_every_verdict_is_asked_once_and_told_before() -> None:
    settings = RewardSettings(rule="gsm8k")
    reward = Scripted(lambda r: Score(0.0))
    items = load_items(settings, file=None, preset=None, max_rows=3)
    screen = Remarks()
    result = audit(reward, settings, items, screen=screen)
    assert len(reward.submitted) == result["asked"]
    assert screen.notes == [f"Asking for at most {result['asked']} verdicts, on 3 prompts."]


def test_a_stop_ends_the_audit_without_a_verdict() -> None:
    def broke(rollout: Rollout) -> Score:
        raise Interrupted("The budget is used up.")

    result = run(RewardSettings(rule="gsm8k"), Scripted(broke))
    assert result["stopped"] == "The budget is used up."
    assert result["checks"] == []


def test_rows_of_the_user(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1?", "ground_truth": "2", "response": "It is 2.", "data_source": "gsm8k"},
        {"prompt": "1+2?", "ground_truth": 3, "good": "#### 3", "bad": "#### 4"},
        {"prompt": "Say hello.", "response": "Hello!"},
    ]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    first, second, third = load_items(RewardSettings(), file=file, preset=None, max_rows=9)
    assert first.good == "The answer is 2.\n#### 2"
    assert first.bad == "The answer is 3.\n#### 3"
    assert first.partial == "It is 2."
    assert (second.good, second.bad) == ("#### 3", "#### 4")
    assert (third.good, third.bad, third.best) == ("", "", "Hello!")
    assert third.weak == "I do not know the answer."
    result = run(RewardSettings(rule="gsm8k"), Scripted(lambda r: Score(0.0)), data=file)
    assert {c["name"]: c["passed"] for c in result["checks"]}["right against wrong"] is False


def test_which_rows_are_taken() -> None:
    judge = RewardSettings(api=ApiReward(enable=True, prompt_preset="safety"))
    assert load_items(judge, file=None, preset=None, max_rows=2)[1].place == "safety 2"
    assert load_items(judge, file=None, preset="code", max_rows=1)[0].place == "code 1"
    assert load_items(RewardSettings(), file=None, preset=None, max_rows=1)[0].place == "math 1"
    for bad in ({"preset": "maths"}, {"preset": "math", "file": "x"}, {"max_rows": 0}):
        with pytest.raises(ConfigError):
            load_items(judge, **({"file": None, "preset": None, "max_rows": 1} | bad))


def test_bundled_rows_are_whole() -> None:
    assert set(bundled_items()) == set(PRESETS)
    for rows in bundled_items().values():
        assert len(rows) == 12
        for row in rows:
            assert set(row) == {"prompt", "ground_truth", "good", "partial", "bad"}
            assert len({row["good"], row["partial"], row["bad"]}) == 3


def test_attacks() -> None:
    assert len(INJECTIONS) >= 12 and len(MASTER_KEYS) >= 12 and len(LEAKS) >= 3
    for name, template in INJECTIONS.items():
        text = fill_injection(template, "@top@ 42", 1, 10)
        assert "@top@ 42" in text, f"{name}: the answer is there, untouched"
        assert "@answer@" not in text and "@low@" not in text
        assert "@top@" not in text.replace("@top@ 42", "")
    assert len(pad_answer("x" * 300)) >= 1400
    assert pad_answer("x").endswith("\n\nx")


def test_what_an_attack_may_add() -> None:
    scales = [None, Scale(1, 10), Scale(1, 5), Scale(0, 1), Scale(0, 100)]
    assert [tr.allowed_gain(scale) for scale in scales] == [0.15, 0.15, 0.25, 0.15, 0.15]


def test_bounds_hold_at_their_ends() -> None:
    item = load_items(RewardSettings(), file=None, preset=None, max_rows=1)[0]
    trial = tr.Trial("t", "here", item.prompt, "a", against="b", lowest=0.3)
    for lead, passed in ((0.3, True), (0.29, False), (0.31, True)):
        scores = dict(zip(trial.keys, [Score(0.1 + lead), Score(0.1)], strict=True))
        assert check_trials("t", [trial], scores).passed is passed
    lost = dict(zip(trial.keys, [Score(0.9), Score.failed("x")], strict=True))
    assert check_trials("t", [trial], lost).said == "there was no verdict"
    assert check_trials("t", [], {}).passed is None


def test_a_few_good_answers_may_lose() -> None:
    item = load_items(RewardSettings(), file=None, preset=None, max_rows=1)[0]
    trials = [tr.Trial("t", "here", item.prompt, str(n), lowest=0.5) for n in range(10)]
    for losing, passed in ((0, True), (1, True), (2, False)):
        scores = {t.keys[0]: Score(0.0 if n < losing else 1.0) for n, t in enumerate(trials)}
        assert check_trials("right against wrong", trials, scores).passed is passed
