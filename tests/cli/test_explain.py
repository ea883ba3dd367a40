"""`ppo explain` lists groups of settings."""

from __future__ import annotations

import json

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.explain import MIXTURE_PARTS
from ppo_cli.config.schema.keys import table


def explain(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["explain", *words]) == 0, words
    return capsys.readouterr().out


def test_all_lists_every_setting_with_default_flag_and_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = explain(capsys, "--all").splitlines()
    assert set(table()) < set(text)
    lines = "\n".join(text[text.index("critic.optim.lr") :][:3])
    for fact in ("Learning rate", "1e-05", "at most 1", "--critic_lr", "CRITIC_LR", "run"):
        assert fact in lines


@pytest.mark.parametrize("group", ["critic", "reward.api", "reward.", MIXTURE_PARTS])
def test_a_group_lists_its_settings_alone(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads(explain(capsys, group, "--json"))
    assert len(settings) > 8
    assert all(key.startswith(group) and "default" in settings[key] for key in settings)


def test_a_metric_with_the_name_of_a_group_leads_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "explain reward." in explain(capsys, "reward")
