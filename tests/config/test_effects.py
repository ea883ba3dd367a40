"""Settings that would change nothing are refused where typed, and noted where a preset has them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_origin

import pytest

from ppo_cli.config.schema.keys import table
from ppo_cli.planning.findings.unused import UNUSED
from tests.config.settling import refusals, remarks, settle, unused
from tests.settings import with_gpus

OFF = "algorithm.adv_estimator=rloo rollout.n=2 algorithm.use_kl_in_reward=false data.val_files=[]"
JUDGE = "reward.api.enable=true reward.api.model=m"
DECISION = f"{JUDGE} reward.api.mode=decision reward.api.type=openai"
# What else must be set for a condition to apply, as well as OFF.
NEEDED = {
    **dict.fromkeys(
        (
            "no_monitor",
            "no_labels",
            "no_cascade",
            "no_other_judge",
            "judge_elsewhere",
            "no_rule",
            "no_built_in_rule",
        ),
        JUDGE,
    ),
    **dict.fromkeys(("no_rubric", "no_comparison", "none_held_out"), JUDGE),
    **dict.fromkeys(("decision_endpoint", "fixed_output"), DECISION),
    **dict.fromkeys(
        ("every_rule_its_own", "every_model_its_own"), "reward.parts=[judge:1] reward.api.model=m"
    ),
    "no_panel": JUDGE,
    "votes_show_noise": f"{JUDGE} reward.api.votes=3",
    "own_judge_prompt": f"{JUDGE} reward.api.scoring_prompt=x",
    "fixed_scale": f"{JUDGE} reward.api.rubric=extra_info.r",
    "not_in_pairs": f"{JUDGE} reward.api.mode=compare reward.api.compare=list",
    "own_prices": f"{JUDGE} reward.api.price_input=1 reward.api.price_output=2",
    "hedge_after_timeout": f"{JUDGE} reward.api.timeout=1",
    "all_kept": f"{JUDGE} trainer.on_hacking=restrain algorithm.use_kl_in_reward=true",
    "nothing_to_share": "model.packing=false",
    "nothing_in_float32": "model.dtype=bfloat16",
    "nothing_to_spread": "model.dtype=float32",
    "no_dual_clip": "actor.policy_loss.loss_mode=cispo",
    "no_clip": "actor.policy_loss.loss_mode=gpg",
    "model_is_served": "reward.model.path=http://h",
    "model_is_local": "reward.model.path=a/b",
    "no_code": "reward.rule=exact",
    "mixture_off": "reward.composite.enable=false",
}
# One setting of each section that a condition covers as a whole.
OF_SECTIONS = (
    "reward.api.votes", "reward.model.self_test", "reward.code.score", "critic.optim.lr",
    "reward.api.local.devices", "algorithm.lam", "algorithm.whiten_advantages",
)  # fmt: skip
SECTIONS = {"no_judge", "no_reward_model", "no_code", "no_critic", "judge_elsewhere"}
ROWS = [
    name
    for name, key in table().items()
    if name in OF_SECTIONS or (key.unused and key.unused[0] not in SECTIONS)
]
# Values of settings for which one of the right type is not enough.
VALUES = {
    "algorithm.rollout_correction.rollout_is_threshold_lower": "0.5", "trainer.node_rank": "0",
    "actor.clip_ratio_low": "0.1", "actor.clip_ratio_high": "0.4", "reward.api.scale": "0-5",
    "reward.api.compare": "list", "reward.api.monitor.base_url": "http://host/v1",
    "reward.model.device": "cpu", "reward.model.template": "{response}", "reward.rule": "exact",
    "reward.parts": "judge:1", "reward.composite.weights": "{judge: 1}",
    "reward.composite.parts": "{judge: 1}", "reward.api.cascade.band": "0-1",
    "reward.api.cascade.spread": "0.1", "reward.api.rubric_held_out": "0.5",
}  # fmt: skip


def changed(name: str) -> str:
    """Return an override with another value than the default."""
    key = table()[name]
    others = [choice for choice in key.choices if choice != key.default]
    if key.kind is float:
        plain = str((key.default or 2) / 2)
    else:
        by_kind = {bool: str(not key.default).lower(), int: "32", dict: "{a: 1}", tuple: "[1, 2]"}
        plain = by_kind.get(get_origin(key.kind) or key.kind, "x")
    return f"{name}={VALUES.get(name) or next(iter(others), plain)}"


@pytest.mark.parametrize("key", ROWS)
def test_a_setting_without_effect_is_refused_or_noted(key: str) -> None:
    condition = table()[key].unused[0]
    reason = UNUSED[condition]
    overrides = (*OFF.split(), *NEEDED.get(condition, "").split(), changed(key))
    resolved = settle(*overrides, machine=with_gpus(int(condition == "on_gpus")))
    refused, remarked = unused(resolved)
    (line,) = [*refused, *remarked]
    assert line == f"override: {key} has no effect: {reason.text}."
    assert bool(remarked) == reason.tuning
    assert set(refused) <= set(refusals(resolved))
    preset = replace(resolved, origins={**resolved.origins, key: "preset x line 1"})
    assert unused(preset)[0] == []
    assert any(note.startswith("preset x line 1: ") for note in remarks(preset))
    file = replace(resolved, origins={**resolved.origins, key: "my.yaml line 1"})
    refused, remarked = unused(file)
    assert (len(refused), len(remarked)) == ((1, 0) if reason.absent else (0, 1))


def test_every_condition_belongs_to_a_setting() -> None:
    assert {name for key in table().values() for name in key.unused} == set(UNUSED)
    assert {name for name, reason in UNUSED.items() if reason.tuning} == {
        "hf_sampler", "nothing_sharded", "nothing_to_share", "nothing_in_float32",
        "nothing_to_spread", "nothing_to_offload", "no_workers",
    }  # fmt: skip


def test_while_no_judge_scores_that_is_the_reason_given() -> None:
    (line,) = refusals(settle("reward.api.monitor.share=0.5"))
    assert "no LLM judge scores this run" in line
