"""Settings that clash, and parts that are not there."""

from __future__ import annotations

import pytest

from ppo_cli.config.models.bundled import preset_names
from ppo_cli.errors import ConfigError
from ppo_cli.planning.run_plan import make_plan
from tests.config.settling import refusals, remarks, settle

FILE = "data.train_files=x.jsonl"


def test_a_kl_loss_takes_the_kl_out_of_the_reward_unless_it_is_asked_for() -> None:
    loss, reward = "actor.use_kl_loss=true", "algorithm.use_kl_in_reward"
    assert settle().config.algorithm.use_kl_in_reward
    resolved = settle(loss)
    assert not resolved.config.algorithm.use_kl_in_reward
    assert "KL is in the loss" in resolved.why[reward]
    assert resolved.config.uses_reference
    assert not settle(f"{reward}=false").config.uses_reference
    assert remarks(resolved, {}) == remarks(settle(f"{reward}=true"), {}) == []
    both = settle(loss, f"{reward}=true", "actor.kl_loss_coef=0.002")
    assert both.config.algorithm.use_kl_in_reward
    (note,) = remarks(both, {})
    assert "counts twice" in note and "weight 0.001" in note and "weight 0.002" in note
    (note,) = remarks(settle(loss, "actor.kl_loss_coef=0"), {})
    assert "only reported" in note


def test_the_plain_run_misses_nothing_but_prompts() -> None:
    assert refusals(settle()) == refusals(settle()) == []
    (message,) = refusals(settle("data.train_files=[]"))
    assert "--train_files" in message
    assert "ppo data prepare gsm8k" in message
    assert refusals(settle(FILE)) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("actor.optim.lr=0.5", "actor.optim.lr 0.5 is far from what is usual: 1e-08 to 0.001."),
        ("critic.optim.lr=0.5", "usual: 1e-08 to 0.01."),
        ("actor.clip_ratio=0.9", "usual: 0.05 to 0.5."),
        ("actor.clip_ratio_high=0.9", "usual: 0.05 to 0.5."),
        ("actor.entropy_coeff=5", "usual: 0 to 0.1."),
        ("algorithm.kl_ctrl.kl_coef=3", "usual: 0 to 0.5."),
        ("algorithm.gamma=0.5", "usual: 0.9 to 1."),
        ("algorithm.lam=0.1", "usual: 0.8 to 1."),
        ("rollout.temperature=4", "usual: 0.3 to 1.5."),
    ],
)
def test_a_value_far_from_the_usual_is_taken_with_a_remark(overrides: str, message: str) -> None:
    (note,) = remarks(settle(overrides), {})
    assert note.startswith("override: ") and note.endswith(message)
    assert note in make_plan(settle(overrides)).notes


def test_usual_values_and_presets_are_not_remarked_on() -> None:
    usual = "actor.optim.lr=1e-6 actor.clip_ratio=0.28 algorithm.lam=0.97 rollout.temperature=0.7"
    assert remarks(settle(*usual.split()), {}) == []
    far = {preset: remarks(settle(preset=preset), {}) for preset in preset_names()}
    assert [message for message in far.values() if "usual" in " ".join(message)] == []


def test_a_plan_refuses_what_a_run_would_refuse_on_any_machine() -> None:
    overrides = ("actor.kl_loss_coef=0.01", "trainer.engine=verl")
    with pytest.raises(ConfigError) as caught:
        make_plan(settle(*overrides))
    assert caught.value.problems == tuple(refusals(settle(*overrides), {}))
    assert "the KL loss is off; set actor.use_kl_loss=true" in str(caught.value)
    assert make_plan(settle("actor.kl_loss_coef=0.01", "actor.use_kl_loss=true")).notes
