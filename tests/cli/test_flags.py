"""The flags are made from the schema; those of other programs are translated or answered."""

from __future__ import annotations

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.flags import format_help_line, list_flag_keys, repeat_list_flags
from ppo_cli.config.schema.keys import table


def test_no_flag_and_no_variable_serves_two_settings() -> None:
    flags = [k.flag for k in table().values() if k.flag]
    variables = [k.env for k in table().values() if k.env]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        (
            "lr",
            "rate of the actor. (actor.optim.lr; at least 0, at most 1; default 1e-06; env PPO_LR",
        ),
        ("engine", "one of local, ray, verl; default unset"),
        ("train_files", "(data.train_files; default unset; env PPO_TRAIN_FILES)"),
        ("logger", "one of console, tensorboard, wandb, trackio, mlflow, swanlab; default console"),
        (
            "gamma",
            "(algorithm.gamma; at least 0, at most 1; default 1.0; env GAE_GAMMA)",
        ),
        ("rm_gate", "(reward.api.gate; default True)"),
    ],
)
def test_a_flags_help_gives_key_range_default_and_variable(name: str, fragment: str) -> None:
    assert fragment in format_help_line(list_flag_keys()[name])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--train_files a b", "--train_files a --train_files b"),
        ("--train-files a b c", "--train-files a --train_files b --train_files c"),
        ("--train_files a k=v b", "--train_files a k=v b"),
        ("--train_files a ~actor.lr", "--train_files a ~actor.lr"),
        ("--train_files a ~/b.jsonl", "--train_files a --train_files ~/b.jsonl"),
        ("--train_files=a b", "--train_files=a b"),
        ("--lr 1 x", "--lr 1 x"),
        ("--train_files a --lr 1 b", "--train_files a --lr 1 b"),
        ("--train_files a -- b", "--train_files a -- b"),
        ("--reward rule:1 judge:2", "--reward rule:1 --reward judge:2"),
        ("--reward rule:format:0.2 rule:1", "--reward rule:format:0.2 --reward rule:1"),
    ],
)
def test_a_list_flag_takes_several_values(typed: str, meant: str) -> None:
    assert repeat_list_flags(typed.split()) == meant.split()


def test_help_all_has_every_flag_and_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert [name for name in list_flag_keys() if f"  --{name}" not in out] == []
    assert "Model and data:" in out and "Reward:" in out and "env PPO_BATCH_SIZE" in out
    assert main(["train", "--help"]) == 0
    screen = capsys.readouterr().out
    common = {key.flag for key in table().values() if key.common}
    assert {flag for flag in common if f"  {flag}" not in screen} == set()
    assert "Prompts per step [256]" in screen and "PPO_BATCH_SIZE" not in screen
    # Only commands that may open episodes have their numbers.
    flag = "--val_episodes N"
    assert flag in out and flag not in screen
    assert main(["reward", "score", "--help-all"]) == 0 and flag not in capsys.readouterr().out
