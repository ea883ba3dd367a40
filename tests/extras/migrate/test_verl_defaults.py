"""A line in verl's spelling means what verl makes of it: the values that it leaves out, too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.schema.keys import find_key, table, value_of
from ppo_cli.errors import ConfigError
from ppo_cli.extras.migrate.verl import translator
from ppo_cli.planning.resolved import Resolved
from tests.config.settling import problems, remarks, settle, unused

FILE = Path(translator.__file__).with_name("verl_defaults.json")
READ = json.loads(FILE.read_text(encoding="utf-8"))
FACTS, ENGINES = READ["versions"], READ["engines"]
WRAPPER = "actor_rollout_ref."
LINE = f"{WRAPPER}rollout.n=1"
FILES = "data.train_files=a.parquet"
# Chosen for the machine: numbers of devices and sizes that change speed and memory alone; models
# and files of its own examples; and where metrics go.
NOT_TAKEN = {
    "actor.ppo_max_token_len_per_gpu", "algorithm.rollout_correction.bypass_mode",
    "critic.ppo_max_token_len_per_gpu",
    "critic.model.enable_gradient_checkpointing", "critic.model.path", "critic.strategy",
    "actor.strategy", "data.train_files", "data.val_files", "model.path", "model.packing",
    "model.enable_gradient_checkpointing",
    "ref.log_prob_max_token_len_per_gpu", "reward.model.path", "reward.num_workers",
    "rollout.enforce_eager", "rollout.max_num_seqs", "rollout.name",
    "rollout.tensor_model_parallel_size", "trainer.logger", "trainer.n_gpus_per_node",
}  # fmt: skip

# Settings that take another's value where they are unset.
COMES_TO = {
    # Unset, memory decides on the CPU, where verl does not train.
    "actor.fsdp_config.reshard_after_forward": lambda c: (
        c.actor.fsdp_config.reshard_after_forward is not False
    ),
    "critic.fsdp_config.reshard_after_forward": lambda c: (
        c.critic.fsdp_config.reshard_after_forward is not False
    ),
}  # fmt: skip


def versions() -> dict[str, dict[str, Any]]:
    """Every version's settings: a later one says what changed."""
    by_version: dict[str, dict[str, Any]] = {}
    now: dict[str, Any] = {}
    for version, row in FACTS.items():
        now = {k: v for k, v in now.items() if k not in row["gone"]} | row["set"]
        by_version[version] = now
    return by_version


def written(values: dict[str, Any]) -> list[str]:
    """Spell settings as overrides; `???` is for the user to set."""
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return [f"{key}={text}" for key, text in texts.items() if text != "???"]


def translated(values: dict[str, Any]) -> dict[str, Any]:
    """Settings that have our name, or one of the other names of a folder or a count."""
    return {
        k: v for k, v in values.items()
        if (name := k.removeprefix(WRAPPER)) not in NOT_TAKEN
        and (
            find_key(name)
            or name in ("trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep")
        )
    }  # fmt: skip


def test_verls_own_values_written_out_change_nothing() -> None:
    wrong = {}
    for version, values in versions().items():
        left_out = settle(FILES, LINE, f"verl={version}").config
        overrides = settle(FILES, LINE, f"verl={version}", *written(translated(values))).config
        for name in table():
            both = [
                COMES_TO.get(name, partial(value_of, key=name))(c) for c in (left_out, overrides)
            ]
            if both[0] != both[1]:
                wrong[version, name] = both
    assert wrong == {}


def test_all_that_verls_files_set_may_be_written_out() -> None:
    refused = {}
    for version, values in versions().items():
        # Its own examples of files, and micro-batches whose sizes it wants from the user.
        line = [
            word for word in written(values)
            if "use_dynamic_bsz" not in word and "input_tokenizer" not in word
            and not word.startswith(("reward_model.model.path", "trainer.device"))
        ]  # fmt: skip
        try:
            settle(LINE, *line)
        except ConfigError as error:
            refused[version] = error.problems
    assert refused == {}
    assert "only verl has it" in "".join(problems(LINE, "rollout.use_fire_sampling=True"))


def all_names() -> dict[str, Any]:
    """What verl's files set for any engine in any version, with the last value."""
    last_values = {name: values[-1] for name, values in ENGINES.items()}
    for values in versions().values():
        last_values |= values
    return last_values


def another(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2 if isinstance(value, float) and value else value + 2
    return 3 if value is None else ["a"] if isinstance(value, list) else "other"


def test_no_setting_of_verls_is_unknown_nor_taken_for_another() -> None:
    names = all_names()
    assert len(names) > 1400
    others = written({name: another(value) for name, value in names.items()})
    for expected in (written(names), others, [word.removeprefix(WRAPPER) for word in others]):
        message = problems(*expected)
        assert [line for line in message if "Did you mean" in line or "no setting" in line] == []


@pytest.mark.slow
def test_what_a_line_sets_arrives_or_is_noted() -> None:
    arrived, wrong = 0, {}
    for name, value in all_names().items():
        short = name.removeprefix(WRAPPER)
        (word,) = written({name: another(value)})
        if short not in table():
            continue
        try:
            resolved = settle(FILES, f"{WRAPPER}rollout.n=4", word)
        except ConfigError:
            continue
        arrived += 1
        got = value_of(resolved.config, short)
        got = got[0] if isinstance(got, tuple) and len(got) == 1 else got
        same = got == another(value) or [got] == another(value) or str(got) == str(another(value))
        if not same and short not in remarks_of(resolved):
            wrong[word] = got
    assert wrong == {}
    assert arrived > 80


def generation(*line: str, **layers: Any) -> str:
    """Return whose default algorithm.lam has."""
    return settle(FILES, *line, **layers).origins["algorithm.lam"]


def test_the_generation_is_read_from_the_keys_of_a_line_or_named(tmp_path: Path) -> None:
    old, middle = f"{WRAPPER}actor.fsdp_config.grad_offload=False", "critic.model.fsdp_config."
    both = "algorithm.use_kl_in_reward=False"
    assert generation("algorithm.gamma=1") == "default"
    assert generation(LINE) == generation(LINE, both) == "default of verl 0.8"
    assert generation(LINE, old) == "default of verl 0.2"
    assert generation(LINE, f"{middle}param_offload=False") == "default of verl 0.4"
    assert generation(LINE, f"{middle}param_offload=False", old, both) == "default of verl 0.4"
    for named, expected in {"0.3.1": "0.2", "v0.7": "0.4", "0.10": "0.8", "main": "0.8"}.items():
        assert generation(LINE, old, f"verl={named}") == f"default of verl {expected}"
        assert generation(f"verl={named}") == f"default of verl {expected}"
    assert generation(preset="verl") == "default of verl 0.8"
    assert generation("verl=0.4", preset="verl") == "default of verl 0.4"
    file = tmp_path / "a.yaml"
    file.write_text("actor_rollout_ref: {actor: {ppo_epochs: 2}}", encoding="utf-8")
    assert generation(files=(file,)) == "default of verl 0.8"
    assert "'x' is no version of verl; use 0.2, 0.4 or 0.8" in "".join(problems("verl=x"))


def test_what_differs_between_generations() -> None:
    def values(*line: str) -> tuple[object, ...]:
        config = settle(FILES, LINE, *line).config
        return (
            config.algorithm.use_kl_in_reward, config.actor.entropy_coeff,
            config.actor.clip_ratio_c,
        )  # fmt: skip

    assert values("verl=0.3") == (True, 0.001, None)
    assert values("verl=0.3", f"{WRAPPER}actor.use_kl_loss=True") == (False, 0.001, None)
    # The oldest had the KL in the reward unless it was in the loss, whatever compares rewards.
    assert values("verl=0.3", "algorithm.adv_estimator=grpo", f"{WRAPPER}rollout.n=2")[0]
    assert values("verl=0.5") == values() == (False, 0.0, 3.0)


def test_the_critic_follows_the_actor_and_the_folder_the_names() -> None:
    actor = {"ppo_epochs": "4", "loss_agg_mode": "seq-mean-token-sum", "shuffle": "True"}
    overrides = [f"{WRAPPER}actor.{key}={value}" for key, value in actor.items()]
    resolved = settle(FILES, *overrides, "trainer.experiment_name=x").config
    assert resolved.critic.ppo_epochs == 4 and resolved.critic.shuffle
    assert resolved.critic.loss_agg_mode == "seq-mean-token-sum"
    assert resolved.trainer.output_dir == "checkpoints/verl_examples/x"
    assert settle(FILES, *overrides, "critic.ppo_epochs=1").config.critic.ppo_epochs == 1


def test_a_line_may_follow_settings_of_its_own() -> None:
    resolved = settle(FILES, LINE, "data.max_prompt_length=64", f"{WRAPPER}actor.ppo_epochs=3",
                   f"critic.ppo_epochs=${{{WRAPPER}actor.ppo_epochs}}",
                   "trainer.default_local_dir=a/${data.max_prompt_length}").config  # fmt: skip
    assert (resolved.critic.ppo_epochs, resolved.trainer.output_dir) == (3, "a/64")


def test_verl_counts_the_warm_up_of_the_critic_from_step_one() -> None:
    resolved = settle(FILES, LINE, "trainer.critic_warmup=5")
    assert resolved.config.trainer.critic_warmup == 4
    assert any("trains from step 5 on" in note for note in resolved.notes)
    assert settle(FILES, "trainer.critic_warmup=5").config.trainer.critic_warmup == 5


def test_what_changes_nothing_in_verl_is_remarked_on() -> None:
    dead = ("algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.type=adaptive")
    resolved = settle(FILES, LINE, *dead)
    refused, noted = unused(resolved)
    assert refused == [] and "kl_coef has no effect" in "".join(noted)
    ours = settle(FILES, *dead, "algorithm.use_kl_in_reward=false")
    assert "is off" in "".join(unused(ours)[0])
    # From 0 the adaptive controller stays at 0, as a fixed one does.
    zero = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0", dead[1])
    assert settle(FILES, LINE, *zero).config.algorithm.kl_ctrl.type == "fixed"
    assert "stays 0" in "".join(problems(FILES, *zero))


def test_steps_and_frequencies_as_verl_takes_them() -> None:
    resolved = settle(FILES, LINE, "trainer.test_freq=False", "trainer.save_freq=0",
                   "actor.optim.lr_warmup_steps=null").config  # fmt: skip
    assert (resolved.trainer.test_freq, resolved.trainer.save_freq) == (-1, -1)
    assert resolved.actor.optim.lr_warmup_steps == -1
    assert (
        settle(FILES, LINE, "trainer.max_actor_ckpt_to_keep=null").config
        == settle(FILES, LINE).config
    )


def remarks_of(resolved: Resolved) -> str:
    return "\n".join([*resolved.notes, *remarks(resolved, {})])


def test_what_is_not_as_in_verl_is_noted() -> None:
    clip = f"{WRAPPER}actor.clip_ratio=0.3"
    resolved = settle(FILES, "data.val_files=b.parquet", clip)
    assert resolved.config.trainer.test_freq == -1  # as there, not at the end either
    for fragment in ("end of the run is saved", "0.3 changes nothing"):
        assert fragment in remarks_of(resolved), fragment
    resolved = settle(FILES, clip, "actor.clip_ratio_high=0.3", "trainer.save_freq=5")
    assert not [f for f in ("verl would", "changes nothing") if f in remarks_of(resolved)]
    assert "changes nothing" not in remarks_of(settle(FILES, clip, "verl=0.2"))


def test_both_kls_are_noted_in_a_line_of_verl() -> None:
    loss, reward = f"{WRAPPER}actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"
    assert "counts twice" in remarks_of(settle(FILES, loss, reward))
    assert "counts twice" not in remarks_of(settle(FILES, loss))
    grpo = settle(FILES, reward, "algorithm.adv_estimator=grpo", f"{WRAPPER}rollout.n=4")
    assert "the scores alone are compared" in remarks_of(grpo)
    assert "the scores alone are compared" not in remarks_of(settle(FILES, reward))


def test_token_budgets_leave_the_sizes_of_micro_batches_out_of_account() -> None:
    part = f"{WRAPPER}actor."
    size = f"{part}ppo_micro_batch_size_per_gpu=2"
    rows = f"{WRAPPER}rollout.log_prob_micro_batch_size_per_gpu=1"
    budget = f"{WRAPPER}ref.log_prob_max_token_len_per_gpu=9000"
    for overrides in ([f"{part}use_dynamic_bsz=True", size], [size, f"{part}use_dynamic_bsz=True"]):
        resolved = settle(FILES, *overrides, rows, budget)
        assert resolved.config.actor.ppo_micro_batch_size_per_gpu is None
        assert resolved.config.ref.log_prob_max_token_len_per_gpu == 9000
        assert "actor.ppo_max_token_len_per_gpu counts" in remarks_of(resolved)
    resolved = settle(FILES, size, rows, budget)
    assert resolved.config.actor.ppo_micro_batch_size_per_gpu == 2
    assert resolved.config.ref.log_prob_max_token_len_per_gpu == 1024


def test_keys_of_one_reason_are_refused_in_one_sentence_without_a_guess() -> None:
    keys = [f"{WRAPPER}actor.megatron.{key}=1" for key in ("a", "b", "c", "d", "e", "f")]
    (line,) = problems(*keys)
    assert "actor.megatron.c, actor.megatron.d and 2 more cannot" in line
    guesses = problems(
        f"{WRAPPER}rollout.nodes=2", f"{WRAPPER}actor.optim.lr_decay_style=x",
        f"{WRAPPER}rollout.over_sample_rate=0.1", f"{WRAPPER}actor.clip_ratoi=0.1",
    )  # fmt: skip
    assert [line for line in guesses if "Did you mean" in line] == [
        "override: there is no setting 'actor.clip_ratoi'. Did you mean 'actor.clip_ratio'?"
    ]
