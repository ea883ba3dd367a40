"""Layers, origins, and every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ppo_cli.config.layers import (
    EMBEDDED_NOTE,
    PROMPTS_NOTE,
)
from ppo_cli.config.schema.keys import nest_values, table, value_of
from tests.config.settling import problems, settle
from tests.settings import with_gpus


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_setting_has_an_origin() -> None:
    origins = settle().origins
    assert list(origins) == list(table())
    assert origins["model.path"] == "env MODEL_PATH"
    bundled = {"data.train_files", "data.val_files"}
    assert {origins[k] for k in bundled} == {"bundled prompts (no --train_files)"}
    assert {o for k, o in origins.items() if k not in {"model.path", *bundled}} == {"default"}


def test_later_layers_win_and_are_named() -> None:
    write(Path("a.yaml"), "actor:\n  optim:\n    lr: 2e-6\n  ppo_epochs: 2\n")
    write(Path("b.yaml"), "actor:\n  optim:\n    lr: 3e-6\n")
    files = [Path("a.yaml"), Path("b.yaml")]
    key = "actor.optim.lr"
    flag = {key: ("5e-6", "flag --lr")}
    env = {"PPO_LR": "4e-6", "LR": "1"}
    seen = [
        settle(),
        settle(preset="gsm8k"),
        settle(preset="embedded"),
        settle(preset="embedded", files=files[:1]),
        settle(preset="embedded", files=files),
        settle(preset="embedded", files=files, env=env),
        settle(preset="embedded", files=files, env=env, flags=flag),
        settle(f"{key}=6e-6", preset="embedded", files=files, env=env, flags=flag),
    ]
    assert [r.config.actor.optim.lr for r in seen[2:]] == [1e-4, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6]
    origins = [r.origins[key] for r in seen]
    assert origins[0] == "default"
    assert origins[1].startswith("preset gsm8k line ")
    assert origins[2].startswith("preset embedded line ")
    assert origins[3:] == ["a.yaml line 3", "b.yaml line 3", "env PPO_LR", "flag --lr", "override"]
    assert seen[-1].origins["actor.ppo_epochs"] == "a.yaml line 4"


# Variables of the original scripts. Any other name may be set by a scheduler or a container.
WITHOUT_PREFIX = {
    "MODEL_PATH", "REWARD_MODEL_PATH", "CRITIC_LR", "KL_COEF", "CLIP_RATIO", "GAE_GAMMA",
    "GAE_LAMBDA", "CRITIC_EPOCHS", "CLIPRANGE_VALUE", "ROLLOUT_N", "ROLLOUT_TEMPERATURE",
    "ROLLOUT_TP_SIZE", "GPU_MEMORY_UTILIZATION", "N_GPUS", "NNODES", "NODE_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


def test_variables_of_other_programs_set_nothing() -> None:
    names = {key.env for key in table().values() if key.env}
    assert {name for name in names if not name.startswith("PPO_")} == WITHOUT_PREFIX
    others = {name.removeprefix("PPO_"): "BATCH" for name in names} | {"PPO_SEED": "7"}
    env = {name: value for name, value in others.items() if name not in names - {"PPO_SEED"}}
    before, origins = settle().origins, settle(env=env).origins
    assert {key for key in origins if origins[key] != before[key]} == {"trainer.seed"}


def test_without_gpu_and_model_the_embedded_preset_lies_lowest() -> None:
    resolved = settle("rollout.n=8", env={"MODEL_PATH": ""})
    assert resolved.config.model.path == "embedded"
    assert resolved.origins["model.path"].startswith("preset embedded line ")
    assert resolved.config.rollout.n == 8
    assert resolved.notes == (EMBEDDED_NOTE,)


def test_with_a_model_or_preset_nothing_is_embedded() -> None:
    for resolved in (
        settle(env={"MODEL_PATH": ""}, flags={"model.path": ("x/y", "flag --model")}),
        settle(env={"MODEL_PATH": "x/y"}),
        settle(env={"MODEL_PATH": ""}, preset="gsm8k"),
        settle("actor_rollout_ref.model.path=x/y", env={"MODEL_PATH": ""}),
    ):
        assert resolved.config.model.path != "embedded"
        assert EMBEDDED_NOTE not in resolved.notes


def test_with_a_gpu_the_schema_default_stands() -> None:
    resolved = settle(env={"MODEL_PATH": ""}, machine=with_gpus(1))
    assert resolved.config.model.path == "Qwen/Qwen2.5-0.5B"
    assert resolved.config.data.train_files == resolved.config.data.val_files == ("embedded",)
    assert resolved.notes == (PROMPTS_NOTE,)


def test_own_prompts_stay_alone() -> None:
    """Nobody wants to validate on sums after training on something else."""
    resolved = settle("data.train_files=mine.jsonl")
    data = resolved.config.data
    assert (data.train_files, data.val_files) == (("mine.jsonl",), ())
    assert settle("data.val_files=mine.jsonl").config.data.val_files == ("mine.jsonl",)
    assert settle(preset="lora").config.data.train_files == ()


def test_everything_wrong_is_told_at_once() -> None:
    write(Path("my.yaml"), "actor:\n  clip_ratio: 1.5\n  clip_ratoi: 0.2\nrollout:\n  n: two\n")
    lines = problems(
        "trainer.seed=nan", "lr=1", "junk", flags={"actor.optim.lr": ("1e-5x", "flag --lr")},
        files=[Path("my.yaml"), Path("no.yaml")], env={"CRITIC_LR": "-1", "PPO_BATCH_SIZE": "100"},
    )  # fmt: skip
    for start in (
        "flag --lr: actor.optim.lr: '1e-5x' is not a number",
        "env CRITIC_LR: critic.optim.lr must be at least 0, at most 1, but is -1.0.",
        "my.yaml line 2: actor.clip_ratio must be above 0, below 1, but is 1.5.",
        "my.yaml line 3: there is no setting 'actor.clip_ratoi'. Did you mean 'actor.clip_ratio'?",
        "my.yaml line 5: rollout.n: 'two' is not a number (at least 1).",
        "no.yaml: there is no such file. Did you mean 'my.yaml'?",
        "override: trainer.seed: 'nan' is not a finite number",
        "override: there is no setting 'lr'. Did you mean 'actor.optim.lr' (--lr)?",
        "'junk' is neither a flag nor an override",
        "env PPO_BATCH_SIZE: data.train_batch_size 100 is not divisible",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor.optim.lr=1e-6", "actor.optim.lr", 1e-6),
        ("trainer.seed=1e3", "trainer.seed", 1000),
        ("data.shuffle=off", "data.shuffle", False),
        ("trainer.logger=console,wandb", "trainer.logger", ("console", "wandb")),
        ("trainer.logger=['console',wandb]", "trainer.logger", ("console", "wandb")),
        ("trainer.logger=[]", "trainer.logger", ()),
        ("actor.optim.betas=[0.8,0.9]", "actor.optim.betas", (0.8, 0.9)),
        ("model.target_modules=[q_proj,v_proj]", "model.target_modules", ("q_proj", "v_proj")),
        ("model.target_modules=all-linear", "model.target_modules", "all-linear"),
        ("trainer.total_training_steps=none", "trainer.total_training_steps", None),
        ("reward.function_kwargs.k=2", "reward.function_kwargs", {"k": 2}),
        ("reward.function_kwargs={a: b}", "reward.function_kwargs", {"a": "b"}),
        ("+actor.ppo_epochs=2", "actor.ppo_epochs", 2),
        ("++actor.ppo_epochs=2", "actor.ppo_epochs", 2),
        ("data.system_prompt='none'", "data.system_prompt", "none"),
        ("data.system_prompt=a=b", "data.system_prompt", "a=b"),
        ('rollout.stop=["\\n\\n"," x"]', "rollout.stop", ("\n\n", " x")),
    ],
)
def test_one_right_value(override: str, key: str, value: object) -> None:
    resolved = settle(override)
    assert value_of(resolved.requested, key) == value
    assert resolved.origins[key] == "override"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("trainer.logger", '["console","wandb"]', ("console", "wandb")),
        ("trainer.logger", "console, tensorboard", ("console", "tensorboard")),
        ("data.train_files", "['a.jsonl', b.jsonl]", ("a.jsonl", "b.jsonl")),
        ("data.train_batch_size", "64", 64),
        ("actor.optim.lr", "1e-5", 1e-5),
        ("actor.optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("data.shuffle", "false", False),
        ("trainer.total_training_steps", "null", None),
        ("actor.ppo_micro_batch_size", "None", None),
        ("rollout.name", "null", None),
        ("model.target_modules", "[q_proj, v_proj]", ("q_proj", "v_proj")),
        ("model.target_modules", "q_proj|v.{1,2}", "q_proj|v.{1,2}"),
        ("data.system_prompt", "[be brief]", "[be brief]"),
        ("data.system_prompt", "null", "null"),
        ("data.system_prompt", "1e-5", "1e-5"),
        ("data.train_files", "a,b.jsonl", ("a,b.jsonl",)),
    ],
)
def test_quotes_in_a_file_a_variable_and_an_override_mean_the_same(
    key: str, text: str, value: object, tmp_path: Path
) -> None:
    group, _, leaf = key.rpartition(".")
    nested = "".join(f"{'  ' * i}{part}:\n" for i, part in enumerate(group.split(".")))
    per_gpu = key.replace("micro_batch_size", "micro_batch_size_per_gpu")
    for mark in "'\"":
        quoted = mark + text.replace(mark, mark * 2 if mark == "'" else f"\\{mark}") + mark
        file = write(tmp_path / "q.yaml", f"{nested}{'  ' * (key.count('.'))}{leaf}: {quoted}\n")
        assert value_of(settle(files=[file]).requested, per_gpu) == value
        if mark in text:
            continue
        assert value_of(settle(f"{key}={mark}{text}{mark}").requested, per_gpu) == value
        if variable := table().get(key) and table()[key].env:
            resolved = settle(env={variable: f"{mark}{text}{mark}"})
            assert value_of(resolved.config, per_gpu) == value


def test_a_null_leaves_to_its_rule_what_has_one(tmp_path: Path) -> None:
    keys = {name for name, key in table().items() if key.rule}
    lines = nest_values(dict.fromkeys(keys))
    resolved = settle(files=[write(tmp_path / "nulls.yaml", yaml.safe_dump(lines))])
    assert resolved.config == settle().config
    assert {resolved.origins[key] for key in keys} == {"default"}


def test_quotes_inside_a_text_stay() -> None:
    resolved = settle("data.system_prompt='a' or 'b'")
    assert resolved.config.data.system_prompt == "'a' or 'b'"
    assert settle(env={"PPO_LR": "''"}).origins["actor.optim.lr"] == "default"


def test_a_tilde_takes_a_setting_back_to_its_default() -> None:
    resolved = settle("~actor.optim.lr", "~actor_rollout_ref.rollout.n", preset="embedded")
    assert resolved.config.actor.optim.lr == 1e-6
    assert resolved.config.rollout.n == 1
    assert resolved.origins["actor.optim.lr"] == "default"


def test_a_mini_batch_that_nobody_asked_for_follows_the_batch() -> None:
    resolved = settle("data.train_batch_size=8")
    assert resolved.config.actor.ppo_mini_batch_size == 8
    assert "--mini_batch_size is lowered to the batch of 8 prompts." in resolved.notes


def test_rows_that_just_fill_the_usual_batch_change_nothing(tmp_path: Path) -> None:
    for rows, batch, mini in ((256, 256, 64), (255, 252, 63)):
        file = write(tmp_path / "a.jsonl", '{"prompt": "a"}\n' * rows)
        resolved = settle(f"data.train_files={file}")
        assert resolved.config.data.train_batch_size == batch
        assert resolved.config.actor.ppo_mini_batch_size == mini
        assert (resolved.origins["data.train_batch_size"] == "default") is (rows == batch)
        assert any("is lowered" in note for note in resolved.notes) is (rows != batch)


def test_the_last_of_two_overrides_counts_and_is_noted() -> None:
    same = settle("rollout.n=2", "rollout.n=2")
    resolved = settle("rollout.n=2", "rollout.n=3")
    assert (same.config.rollout.n, resolved.config.rollout.n) == (2, 3)
    note = "rollout.n is given as '2', then as '3'; the last one counts."
    assert note in resolved.notes and not any("last one" in line for line in same.notes)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert settle(env={"CRITIC_LR": "  "}).origins["critic.optim.lr"] == "default"


@pytest.mark.parametrize("key", [k.name for k in table().values() if k.env])
def test_every_variable_reaches_its_setting(key: str) -> None:
    key_facts = table()[key]
    assert key_facts.env is not None
    others = {
        "trainer.node_rank": "0", "reward.api.base_url": "http://host/v1",
        "algorithm.adv_estimator": "gae",
    }  # fmt: skip
    unset = others.get(key, "1")
    text = unset if key_facts.default in (None, ()) else str(key_facts.default)
    assert settle(env={key_facts.env: text}).origins[key] == f"env {key_facts.env}"


def test_a_reward_file_lies_below_what_names_it(tmp_path: Path) -> None:
    reward = write(tmp_path / "r.yaml", "api:\n  votes: 3\n  model: m\n  timeout: 5\n")
    main = write(tmp_path / "m.yaml", f"reward:\n  config_file: {reward}\n  api:\n    timeout: 9\n")
    resolved = settle(files=[main])
    assert (resolved.config.reward.api.votes, resolved.config.reward.api.timeout) == (3, 9.0)
    assert resolved.origins["reward.api.votes"] == f"{reward} line 2"
    by_flag = {"reward.config_file": (str(reward), "flag --reward_config")}
    resolved = settle("reward.api.votes=5", files=[main], flags=by_flag)
    assert (resolved.config.reward.api.votes, resolved.config.reward.api.timeout) == (5, 5.0)


def test_secrets_do_not_reach_messages() -> None:
    env = {"OPENAI_API_KEY": "top-secret-value"}
    (problem,) = problems("actor.optim.lr=top-secret-value", env=env)
    assert "top-secret" not in problem
    assert "***" in problem


def test_a_group_is_reset_with_all_that_a_file_says_below_it(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("reward: {function_kwargs: {a: 1, b: {c: 2}}}\n")
    for overrides, remaining in (
        ("reward.function_kwargs.b=3", {"a": 1, "b": 3}),
        ("reward.function_kwargs={d: 4}", {"d": 4}),
        ("~reward.function_kwargs", {}),
    ):
        resolved = settle(overrides, files=[file])
        assert resolved.config.reward.function_kwargs == remaining, overrides
