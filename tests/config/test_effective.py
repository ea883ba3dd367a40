"""What a setting comes to when others stand in for it, where each has its effect, and limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ppo_cli.config.schema.run import Config
from tests.config.settling import problems, settle, unchecked, unused

LORA = "model.lora_rank=8"


# Settings, and a value that follows from them.
DERIVED: list[tuple[str, Callable[[Config], object], object]] = [
    ("actor.use_kl_loss=true algorithm.use_kl_in_reward=false", lambda c: c.uses_reference, True),
    ("algorithm.use_kl_in_reward=true", lambda c: c.uses_reference, True),
    ("algorithm.use_kl_in_reward=false", lambda c: c.uses_reference, False),
]


@pytest.mark.parametrize(("overrides", "function", "value"), DERIVED)
def test_what_follows_from_other_settings(
    overrides: str, function: Callable[[Config], object], value: object
) -> None:
    assert function(unchecked(overrides)) == value


# One that is not enough, and the setting that still changes nothing.
IDLE = [
    ("algorithm.kl_ctrl.horizon=7", "algorithm.kl_ctrl.horizon"),
    (f"{LORA} model.lora_merge=true", "model.lora_merge"),
    ("trainer.engine=ray model.lora_merge=true", "model.lora_merge"),
    (f"{LORA} critic.model.lora_alpha=8", "critic.model.lora_alpha"),
    (
        "actor.use_kl_loss=true actor.kl_loss_coef=0.01 algorithm.kl_ctrl.kl_coef=0.02",
        "algorithm.kl_ctrl.kl_coef",
    ),
    ("algorithm.use_kl_in_reward=false ref.path=a/b", "ref.path"),
]


@pytest.mark.parametrize(("overrides", "key"), IDLE)
def test_a_setting_without_its_effect_is_refused(overrides: str, key: str) -> None:
    (line,) = unused(settle(*overrides.split()))[0]
    assert line.split()[1] == key


# What is just refused, and what is just taken, where a declared conflict does not show the edge.
EDGES = [
    ("data.train_batch_size=8 actor.ppo_mini_batch_size=9",
     "data.train_batch_size=8 actor.ppo_mini_batch_size=8"),
    ("actor.clip_ratio_low=0.21", "actor.clip_ratio_low=0.2"),
    ("actor.clip_ratio=0.5 actor.clip_ratio_c=1.5", "actor.clip_ratio=0.5 actor.clip_ratio_c=1.6"),
    *[(f"{who}.optim.betas={wrong}", f"{who}.optim.betas=[0,0.5]")
      for who in ("actor", "critic")
      for wrong in ("[1.0,0.9]", "[0.9,1.0]", "[-0.1,0.9]", "[0.9,-0.1]")],
    ("trainer.save_freq=0", "trainer.save_freq=-1"),
    ("trainer.test_freq=-2", "trainer.test_freq=-1"),
    ("trainer.patience=2 data.val_files=x trainer.test_freq=-1",
     "trainer.patience=2 data.val_files=x trainer.test_freq=1"),
    ("data.train_max_samples=0", "data.train_max_samples=1"),
    ("data.max_response_length=32 reward.shaping.overlong_buffer=33",
     "data.max_response_length=32 reward.shaping.overlong_buffer=32"),
    *[(f"trainer.profile_steps={wrong}", f"trainer.profile_steps={right}")
      for wrong, right in (("0", "1"), ("3-2", "2-2"), ("x", "2-3"), ("2-x", "10-11"), ("-3", "3"),
                           ("2-", "2"), ("0-1", "1-2"), ("²", "12"))],
]  # fmt: skip


def test_what_clashes_is_refused_up_to_its_edge_and_no_further() -> None:
    for refused, accepted in EDGES:
        assert (len(problems(*refused.split())), problems(*accepted.split())) == (1, ()), refused
