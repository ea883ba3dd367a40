"""A second judge that nobody asked for: when there is one, and whether it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.planning.resolved import Resolved
from ppo_cli.planning.run_plan import make_plan
from ppo_cli.planning.second_judge import add_second_judge, restore_second_judge
from tests.config.settling import refusals, settle, unused
from tests.settings import config_yaml

JUDGE = ("reward.api.enable=true", "reward.api.type=openai", "reward.api.model=m")
TWO_KEYS = {"OPENAI_API_KEY": "k-one", "GEMINI_API_KEY": "k-two"}
ALL_KEYS = TWO_KEYS | {"ANTHROPIC_API_KEY": "k-three", "DASHSCOPE_API_KEY": "k-four"}
CHECKPOINT = "checkpoints/step_000002"
MIXED = "reward.composite.parts.{}={{kind: judge, weight: 1, judge: {{type: {}, model: m}}}}"


def watched(*overrides: str, keys: dict[str, str] = TWO_KEYS) -> Resolved:
    return add_second_judge(settle(*JUDGE, *overrides), keys)


def second(resolved: Resolved) -> str:
    monitor = resolved.config.reward.api.monitor
    return f"{monitor.type}/{monitor.model}" if monitor.model else ""


def test_the_key_of_another_provider_brings_a_second_judge() -> None:
    resolved = watched("reward.api.monitor.share=0.25")
    assert second(resolved) == "gemini/gemini-3.5-flash-lite"
    assert not resolved.config.reward.api.monitor.required
    for name in ("type", "model", "required"):
        assert resolved.origins[f"reward.api.monitor.{name}"] == "default: GEMINI_API_KEY is set"
    (note,) = (n for n in resolved.notes if "GEMINI_API_KEY" in n)
    assert "25% of the responses are also sent to gemini" in note
    assert "--rm_monitor_model none" in note
    assert watched("reward.api.monitor.required=true").config.reward.api.monitor.required
    assert unused(resolved)[0] == []
    plan = make_plan(resolved)
    assert note in plan.notes
    text = config_yaml(resolved)
    assert 'model: "gemini-3.5-flash-lite"  # default: GEMINI_API_KEY is set' in text
    assert not any(key in text for key in ALL_KEYS.values())


@pytest.mark.parametrize(
    ("overrides", "keys", "expected"),
    [
        ((), ALL_KEYS, "claude/claude-haiku-5-5"),
        (("reward.api.monitor.type=dashscope",), ALL_KEYS, "dashscope/qwen-plus"),
        ((), {"OPENAI_API_KEY": "k", "GEMINI_API_KEY": " "}, ""),
        (("reward.api.monitor.model=none",), ALL_KEYS, ""),
        (("reward.api.monitor.model=own",), ALL_KEYS, "openai/own"),
        (("reward.api.monitor.base_url=http://h/v1",), ALL_KEYS, ""),
        (("reward.api.base_url=http://here/v1",), ALL_KEYS, ""),
        ((), ALL_KEYS | {"OPENAI_BASE_URL": "http://here/v1"}, ""),
        ((), TWO_KEYS | {"GOOGLE_GEMINI_BASE_URL": "http://here"}, ""),
        ((), TWO_KEYS | {"GOOGLE_GENAI_USE_VERTEXAI": "true"}, ""),
        (("reward.api.enable=false", "reward.rule=exact"), ALL_KEYS, ""),
        (("reward.api.key_env=ANTHROPIC_API_KEY",), ALL_KEYS, "gemini/gemini-3.5-flash-lite"),
        ((MIXED.format("a", "openai"), MIXED.format("b", "claude")), ALL_KEYS,
         "gemini/gemini-3.5-flash-lite"),
        ((MIXED.format("a", "openai"), MIXED.format("b", "local")), ALL_KEYS, ""),
    ],
)  # fmt: skip
def test_who_the_second_judge_is(
    overrides: tuple[str, ...], keys: dict[str, str], expected: str
) -> None:
    assert second(watched(*overrides, keys=keys)) == expected


@pytest.mark.parametrize("budget", ["budget_usd", "budget_tokens"])
def test_a_budget_is_not_spent_on_what_nobody_asked_for(budget: str) -> None:
    resolved = watched(f"reward.api.{budget}=5")
    assert second(resolved) == ""
    assert any("--rm_monitor_type gemini" in note for note in resolved.notes)


def test_verls_lines_get_no_second_judge() -> None:
    line = ("actor_rollout_ref.rollout.n=1", "data.train_files=x.parquet", *JUDGE)
    resolved = settle(*line)
    assert resolved.foreign and add_second_judge(resolved, ALL_KEYS) == resolved


def test_elsewhere_the_second_judge_of_a_file_may_lack_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_yaml(watched()), encoding="utf-8")
    reread = settle(files=(tmp_path / "config.yaml",))
    assert second(reread) == "gemini/gemini-3.5-flash-lite"
    assert not any("GEMINI" in message for message in refusals(reread, {"OPENAI_API_KEY": "k"}))


@pytest.mark.parametrize(
    ("began", "expected"),
    [
        (settle(*JUDGE), ""),
        (settle(*JUDGE, "reward.api.monitor.model=own"), ""),
        (watched(), "gemini/gemini-3.5-flash-lite"),
        (watched(keys=ALL_KEYS), "claude/claude-haiku-5-5"),
    ],
)
def test_a_run_that_goes_on_keeps_the_second_judge_it_began_with(
    tmp_path: Path, began: Resolved, expected: str
) -> None:
    (tmp_path / "config.yaml").write_text(config_yaml(began), encoding="utf-8")
    lines: list[str] = []
    plan = make_plan(watched(keys=ALL_KEYS))
    now = restore_second_judge(plan, tmp_path / CHECKPOINT, lines.append).resolved
    assert second(now) == expected
    assert bool(lines) == (expected != "claude/claude-haiku-5-5")
    assert 'type: "' in config_yaml(now)
    chosen = make_plan(settle(*JUDGE, "reward.api.monitor.model=own"))
    assert restore_second_judge(chosen, tmp_path / CHECKPOINT, lines.append) is chosen
    plan = make_plan(watched())
    assert restore_second_judge(plan, tmp_path / "none" / CHECKPOINT, lines.append) is plan
