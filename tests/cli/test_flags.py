"""The flags are made from the schema; their list is part of the public contract."""

from __future__ import annotations

import re

import pytest

from ppo_cli.cli.app import main
from ppo_cli.cli.flags import flag_keys, help_line, spread
from ppo_cli.cli.foreign_flags import ALIASES, POINTERS, translate, unknown_flag
from ppo_cli.config.keys import table

FROZEN = """
adv_estimator allow_unsandboxed async_steps batch_size clip_ratio cliprange_value code_sandbox
code_score critic_epochs critic_lr critic_model dtype engine epochs gamma gpu_memory_utilization
kl_coef lam logger lora_alpha lora_rank lr master_addr master_port max_prompt_length
max_response_length max_restarts max_steps mini_batch_size missing_eos_penalty model n_gpus nnodes
node_rank node_timeout num_samplers num_workers output_dir overlong_buffer overlong_penalty
patience pipeline_parallel_size placement ppo_epochs repetition_penalty resume reward reward_clip
reward_config reward_function reward_model reward_model_adapter reward_model_device
reward_model_max_length reward_model_offload reward_model_self_test reward_normalize rm_api_type
rm_base_url rm_budget_tokens rm_budget_usd rm_cache rm_canary_every rm_concurrency rm_deadline
rm_gate rm_hedge_after rm_key_env rm_max_failure_rate rm_max_response_chars rm_max_rpm
rm_max_tokens rm_max_tpm rm_mode rm_model rm_monitor_base_url rm_monitor_model rm_monitor_share
rm_monitor_type rm_on_failure rm_outage_wait rm_output rm_price_input rm_price_output rm_prices
rm_prompt_file rm_prompt_preset rm_reasoning rm_scale rm_scoring_prompt rm_system_prompt
rm_temperature rm_timeout rm_votes rollout_n rollout_name rollout_tp rule save_freq seed
system_prompt temperature tensor_parallel_size test_freq top_k top_p train_files use_api_reward
val_files worker_timeout
"""


def test_the_flags_are_these_and_no_others() -> None:
    assert sorted(flag_keys()) == FROZEN.split()


def test_every_alias_and_every_pointer_leads_to_what_there_is() -> None:
    known = {key.flag for key in table().values() if key.flag} | set(table())
    assert {name: to for name, to in ALIASES.items() if to not in known} == {}
    assert set(ALIASES) & set(flag_keys()) == set()
    assert set(POINTERS) & (set(flag_keys()) | set(ALIASES)) == set()
    words = re.findall(r"--\w+|[a-z_]+(?:\.[a-z_]+)+", " ".join(POINTERS.values()))
    assert {word for word in words if word not in known} == {"actor.fsdp_config"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning_rate 1e-5", "--lr 1e-5"),
        ("--learning-rate=1e-5 --max-new-tokens 8", "--lr=1e-5 --max_response_length 8"),
        ("--run_name a --seed 1", "trainer.experiment_name=a --seed 1"),
        ("--warmup_ratio=0.1", "actor.optim.lr_warmup_steps_ratio=0.1"),
        ("--lr 1 -- --learning_rate", "--lr 1 -- --learning_rate"),
        ("--run_name", "--run_name"),
    ],
)
def test_flags_of_other_programs(typed: str, meant: str) -> None:
    assert translate(typed.split()) == meant.split()


def test_an_unknown_flag_is_told_with_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [key.flag for key in table().values() if key.flag]
    monkeypatch.setenv("PPO_COMMAND", "/a/ppo")
    for flag, told in {
        "--nonsense": "there is no flag --nonsense.",
        "--xyz": "there is no flag --xyz.",
        "--learnin_rate": "Did you mean '--lr'?",
        "--batch-sise": "there is no flag --batch_sise. Did you mean '--batch_size'?",
        "--warmup_ration": "Did you mean 'actor.optim.lr_warmup_steps_ratio'?",
        "--per_device_train_batch_sizes": "actor.ppo_micro_batch_size_per_gpu=N",
        "--report_to": "use --logger console,wandb",
        "--beta": "actor.kl_loss_coef=X",
        "--push_to_hub": "`/a/ppo export`",
    }.items():
        said = unknown_flag(flag, known)
        assert told in said and said[-1] in ".?", said


def test_all_unknown_flags_are_told_at_once_with_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPO_COMMAND", "/a\\ b/ppo")
    line = "plan --nonsense 3 4 --bf16 --learnin_rate=1 lrr=3 --lr fast --system_prompt --foo"
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    for words in (
        "5 things are wrong", "no flag --nonsense.", "--bf16: use --dtype bfloat16", "'--lr'?",
        "no setting 'lrr'", "flag --lr: ", "See `/a\\ b/ppo plan --help`",
    ):  # fmt: skip
        assert words in err, words
    assert main(["data", "check"]) == 2
    assert "See `/a\\ b/ppo data check --help`" in capsys.readouterr().err


def test_no_flag_and_no_variable_serves_two_settings() -> None:
    flags = [k.flag for k in table().values() if k.flag]
    variables = [k.env for k in table().values() if k.env]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize("name", FROZEN.split())
def test_a_flag_tells_its_key_default_range_and_variable(name: str) -> None:
    key = flag_keys()[name]
    said = help_line(key)
    assert key.help in said
    assert key.name in said
    assert "default" in said
    if key.env:
        assert f"env {key.env}" in said
    if key.choices:
        assert "one of " in said
    elif any(word == "ge" for word, _ in key.limits):
        assert "at least" in said


@pytest.mark.parametrize(
    ("given", "meant"),
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
def test_a_list_flag_takes_several_values(given: str, meant: str) -> None:
    assert spread(given.split()) == meant.split()
