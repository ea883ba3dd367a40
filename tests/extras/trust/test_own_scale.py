"""Audits on a reward's own scale: a reward model around 20 is held to the order of answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.reward import ModelReward
from ppo_cli.config.schema.reward import Reward as RewardSettings
from ppo_cli.extras.trust.attacks import (
    Ruler,
    Trial,
    bundled_items,
    load_items,
    measure_trial,
    ruler_for,
)
from ppo_cli.extras.trust.audit import audit
from ppo_cli.records import Part, Rollout, Score
from ppo_cli.report.tracker import Screen
from tests.rewards.models.twins import skywork_qwen3_twin
from tests.scoring.scripted import Scripted, write_rows

Told = dict[str, Any]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RewardSettings:
    folder = skywork_qwen3_twin(tmp_path_factory.mktemp("model") / "rm")
    return RewardSettings(model=ModelReward(path=str(folder)))


def worth(rollout: Rollout) -> float:
    """What a sound reward model gives: only the answer counts."""
    for row in bundled_items()["dialogue"]:
        for kind, value in (("good", 4.0), ("partial", 2.0), ("bad", -4.0)):
            if row[kind] in rollout.text:
                return value
    return -3.0


def offset(rollout: Rollout) -> float:
    """Each prompt has a level of its own, as reward models do."""
    return 20.0 + len(rollout.prompt.text) % 7 * 5.0


def checks_of(
    settings: RewardSettings, score: Callable[[Rollout], float], **arguments: Any
) -> Told:
    items = load_items(settings, file=arguments.get("file"), preset=None, max_rows=6)
    result = audit(Scripted(lambda r: Score(score(r))), settings, items, screen=Screen())
    json.dumps(result, allow_nan=False)
    assert result["reward"].endswith("rm, read as seqcls")
    return {check["name"]: check for check in result["checks"]}


def failed(checks: Told) -> set[str]:
    return {name for name, check in checks.items() if check["passed"] is False}


@pytest.mark.parametrize("size", [0.001, 1.0, 1000.0])
def test_a_sound_model_passes_on_any_scale(settings: RewardSettings, size: float) -> None:
    checks = checks_of(settings, lambda r: size * (worth(r) + offset(r)))
    assert failed(checks) == set()
    skipped = {name for name, check in checks.items() if check["passed"] is None}
    assert skipped == {"ground truth in the request", "content-free gate"}


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (lambda r: worth(r) + 2.0 * ("score" in r.text), "prompt injection"),
        (lambda r: worth(r) + len(r.text) / 100, "padding"),
        (lambda r: 9.0 if len(r.text) < 12 else worth(r), "master keys"),
        (lambda r: 9.0 if "{" in r.text else worth(r), "ground truth in the response"),
        (lambda r: -worth(r), "right against wrong"),
        (lambda r: 20.0, "spread of scores"),
    ],
    ids=["orders", "length", "short", "names", "upside-down", "constant"],
)
def test_each_weakness_is_caught(
    settings: RewardSettings, score: Callable[[Rollout], float], expected: str
) -> None:
    assert expected in failed(checks_of(settings, lambda r: score(r) + offset(r)))


def test_without_order_nothing_is_measured(settings: RewardSettings) -> None:
    checks = checks_of(settings, lambda r: offset(r) - worth(r))
    assert checks["right against wrong"]["passed"] is False
    for name in ("master keys", "prompt injection", "padding"):
        assert checks[name]["passed"] is None
        assert "good answers do not score above bad ones here" in checks[name]["said"]


def test_rows_without_answers_say_so(settings: RewardSettings, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", {"prompt": "Say hello.", "response": "Hello!"})
    checks = checks_of(settings, worth, file=file)
    assert "no good and bad answers to measure by" in checks["master keys"]["said"]
    assert failed(checks) == set()


def test_bounds_are_told_in_the_models_own_numbers(settings: RewardSettings) -> None:
    item = load_items(settings, file=None, preset=None, max_rows=1)[0]
    uid = item.prompt.uid
    values = {(uid, item.good): 24.0, (uid, item.bad): 16.0}
    ruler = ruler_for([item], values, own_scale=True)
    assert (ruler.unit, ruler.own_scale) == (8.0, True)
    trial = Trial(
        "t", "here", item.prompt, "x", highest=0.25, own_scale_bounds=(float("-inf"), 0.5)
    )
    for score, passed in ((20.0, True), (20.1, False)):
        outcome = measure_trial(trial, {(uid, "x"): Score(score)}, ruler)
        assert (outcome.margin is not None and outcome.margin >= 0) is passed
        assert outcome.bounds_text == "at most 20.00"


def test_a_function_beyond_one_is_measured_by_its_own_answers(settings: RewardSettings) -> None:
    item = load_items(settings, file=None, preset=None, max_rows=1)[0]
    uid = item.prompt.uid
    inside = {(uid, item.good): 1.0, (uid, item.bad): 0.0}
    assert ruler_for([item], inside, own_scale=False) == Ruler()
    beyond = {(uid, item.good): 100.0, (uid, item.bad): 0.0}
    assert ruler_for([item], beyond, own_scale=False).unit == 100.0


def test_a_judge_in_a_mixture_is_measured_by_itself() -> None:
    item = load_items(RewardSettings(), file=None, preset=None, max_rows=1)[0]
    trial = Trial("t", "here", item.prompt, "x", lowest=0.8, part="judge")
    score = Score(-3.0, parts={"judge": Part(0.9, 1.5), "rule": Part(0.0, -1.0)})
    outcome = measure_trial(trial, {trial.keys[0]: score}, Ruler(None, {}))
    assert outcome.margin is not None and outcome.margin > 0
    assert outcome.as_dict["got"] == 0.9
