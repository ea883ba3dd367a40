"""The flags are made from the schema; their list is part of the public contract."""

from __future__ import annotations

import re

import pytest

from ppo_cli.cli.app import load_foreign_flags, main, replace_aliases
from ppo_cli.cli.flags import format_help_line, list_flag_keys, repeat_list_flags
from ppo_cli.config.layers import DATA_FOLDER
from ppo_cli.config.schema.keys import table
from ppo_cli.config.verl.translator import VERSION

# Each flag with the setting that it gives, written down by hand: people rely on every pair.
FLAGS = """
model model.path                          dtype model.dtype
lora_rank model.lora_rank                 lora_alpha model.lora_alpha
quantization model.quantization
train_files data.train_files              val_files data.val_files
batch_size data.train_batch_size          system_prompt data.system_prompt
max_prompt_length data.max_prompt_length
max_response_length data.max_response_length
policy_loss actor.policy_loss.loss_mode   filter_groups algorithm.filter_groups.enable
adv_estimator algorithm.adv_estimator     kl_coef algorithm.kl_ctrl.kl_coef
gamma algorithm.gamma                     lam algorithm.lam
lr actor.optim.lr                         clip_ratio actor.clip_ratio
mini_batch_size actor.ppo_mini_batch_size ppo_epochs actor.ppo_epochs
critic_model critic.model.path            critic_lr critic.optim.lr
critic_epochs critic.ppo_epochs           cliprange_value critic.cliprange_value
rollout_name rollout.name                 rollout_n rollout.n
temperature rollout.temperature           top_p rollout.top_p
top_k rollout.top_k                       num_samplers rollout.num_samplers
partial_tokens rollout.partial_tokens
rollout_tp rollout.tensor_model_parallel_size
gpu_memory_utilization rollout.gpu_memory_utilization
epochs trainer.total_epochs               max_steps trainer.total_training_steps
output_dir trainer.output_dir             resume trainer.resume_mode
seed trainer.seed                         patience trainer.patience
save_freq trainer.save_freq               test_freq trainer.test_freq
logger trainer.logger                     engine trainer.engine
n_gpus trainer.n_gpus_per_node            nnodes trainer.nnodes
node_rank trainer.node_rank               num_workers trainer.num_workers
master_addr trainer.master_addr           master_port trainer.master_port
placement trainer.placement               async_steps trainer.async_steps
max_restarts trainer.max_restarts         worker_timeout trainer.worker_timeout
node_timeout trainer.node_timeout         profile trainer.profile_steps
tensor_parallel_size trainer.tensor_parallel_size
pipeline_parallel_size trainer.pipeline_parallel_size
reward reward.parts                       reward_config reward.config_file
reward_function reward.function           rule reward.rule
reward_model reward.model.path            reward_model_adapter reward.model.adapter
reward_model_device reward.model.device   reward_model_max_length reward.model.max_length
reward_model_offload reward.model.offload reward_model_self_test reward.model.self_test
code_score reward.code.score              code_sandbox reward.code.sandbox
allow_unsandboxed reward.code.allow_unsandboxed
overlong_buffer reward.shaping.overlong_buffer
overlong_penalty reward.shaping.overlong_penalty
missing_eos_penalty reward.shaping.missing_eos_penalty
repetition_penalty reward.shaping.repetition_penalty
thought_budget reward.shaping.thought_budget
answer_budget reward.shaping.answer_budget
budget_penalty reward.shaping.budget_penalty
reward_clip reward.shaping.reward_clip    reward_normalize reward.shaping.normalize
use_api_reward reward.api.enable          rm_api_type reward.api.type
rm_model reward.api.model                 rm_base_url reward.api.base_url
rm_key_env reward.api.key_env             rm_prompt_preset reward.api.prompt_preset
rm_prompt_file reward.api.prompt_file     rm_system_prompt reward.api.system_prompt
rm_scoring_prompt reward.api.scoring_prompt
rm_rubric reward.api.rubric               rm_rubric_calls reward.api.rubric_calls
rm_scale reward.api.scale                 rm_mode reward.api.mode
rm_reasoning reward.api.reasoning         rm_gate reward.api.gate
rm_output reward.api.output               rm_compare reward.api.compare
rm_compare_calls reward.api.compare_calls
rm_max_response_chars reward.api.max_response_chars
rm_temperature reward.api.temperature     rm_max_tokens reward.api.max_tokens
rm_votes reward.api.votes                 rm_timeout reward.api.timeout
rm_deadline reward.api.deadline           rm_concurrency reward.api.concurrency
rm_max_rpm reward.api.max_rpm             rm_max_tpm reward.api.max_tpm
rm_hedge_after reward.api.hedge_after     rm_on_failure reward.api.on_failure
rm_max_failure_rate reward.api.max_failure_rate
rm_outage_wait reward.api.outage_wait     rm_cache reward.api.cache
rm_budget_usd reward.api.budget_usd       rm_budget_tokens reward.api.budget_tokens
rm_prices reward.api.prices               rm_price_input reward.api.price_input
rm_price_output reward.api.price_output   rm_canary_every reward.api.canary_every
rm_monitor_type reward.api.monitor.type   rm_monitor_model reward.api.monitor.model
rm_monitor_base_url reward.api.monitor.base_url
rm_monitor_share reward.api.monitor.share rm_monitor_labels reward.api.monitor.labels
rm_monitor_labels_every reward.api.monitor.labels_every
"""
VARIABLES = """
MODEL_PATH model.path                     TRAIN_FILES data.train_files
VAL_FILES data.val_files                  BATCH_SIZE data.train_batch_size
MAX_PROMPT_LENGTH data.max_prompt_length  MAX_RESPONSE_LENGTH data.max_response_length
LR actor.optim.lr                         CRITIC_LR critic.optim.lr
MINI_BATCH_SIZE actor.ppo_mini_batch_size PPO_EPOCHS actor.ppo_epochs
CLIP_RATIO actor.clip_ratio               CRITIC_MODEL_PATH critic.model.path
CRITIC_EPOCHS critic.ppo_epochs           CLIPRANGE_VALUE critic.cliprange_value
KL_COEF algorithm.kl_ctrl.kl_coef         ADV_ESTIMATOR algorithm.adv_estimator
GAE_GAMMA algorithm.gamma                 GAE_LAMBDA algorithm.lam
ROLLOUT_N rollout.n                       ROLLOUT_TEMPERATURE rollout.temperature
ROLLOUT_TP_SIZE rollout.tensor_model_parallel_size
GPU_MEMORY_UTILIZATION rollout.gpu_memory_utilization
TOTAL_EPOCHS trainer.total_epochs         MAX_STEPS trainer.total_training_steps
OUTPUT_DIR trainer.output_dir             SEED trainer.seed
N_GPUS trainer.n_gpus_per_node            NNODES trainer.nnodes
NODE_RANK trainer.node_rank               MASTER_ADDR trainer.master_addr
MASTER_PORT trainer.master_port           REWARD_FUNCTION reward.function
REWARD_MODEL_PATH reward.model.path       RM_API_TYPE reward.api.type
RM_MODEL reward.api.model                 RM_BASE_URL reward.api.base_url
RM_PROMPT_PRESET reward.api.prompt_preset RM_CACHE reward.api.cache
RM_PRICES reward.api.prices
"""


def pairs(text: str) -> dict[str, str]:
    tokens = text.split()
    return dict(zip(tokens[::2], tokens[1::2], strict=True))


def test_every_flag_gives_its_setting_and_there_are_no_others() -> None:
    assert {name: key.name for name, key in list_flag_keys().items()} == pairs(FLAGS)


def test_every_variable_gives_its_setting_and_there_are_no_others() -> None:
    assert {k.env: k.name for k in table().values() if k.env} == pairs(VARIABLES)


def test_every_alias_and_every_pointer_leads_to_what_there_is() -> None:
    known_names = {key.flag for key in table().values() if key.flag} | set(table())
    known_names |= {DATA_FOLDER, VERSION}
    aliases, pointers = load_foreign_flags()["aliases"], load_foreign_flags()["pointers"]
    assert {name: to for name, to in aliases.items() if to not in known_names} == {}
    assert set(aliases) & set(list_flag_keys()) == set()
    assert set(pointers) & (set(list_flag_keys()) | set(aliases)) == set()
    names = re.findall(r"--\w+|[a-z_]+(?:\.[a-z_]+)+", " ".join(pointers.values()))
    assert {word for word in names if word not in known_names} == {"actor.fsdp_config", "--config"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--learning_rate 1e-5", "--lr 1e-5"),
        ("--learning-rate=1e-5 --max-new-tokens 8", "--lr=1e-5 --max_response_length 8"),
        ("--run_name a --seed 1", "trainer.experiment_name=a --seed 1"),
        ("--warmup_ratio=0.1", "actor.optim.lr_warmup_steps_ratio=0.1"),
        ("--lr 1 -- --learning_rate", "--lr 1 -- --learning_rate"),
        ("--run_name", "--run_name"),
        ("--model_path m --data_path=d", "--model m data.path=d"),
    ],
)
def test_flags_of_other_programs(typed: str, meant: str) -> None:
    assert replace_aliases(typed.split()) == meant.split()


def test_no_flag_and_no_variable_serves_two_settings() -> None:
    flags = [k.flag for k in table().values() if k.flag]
    variables = [k.env for k in table().values() if k.env]
    assert len(flags) == len(set(flags))
    assert len(variables) == len(set(variables))


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("lr", "learning rate. (actor.optim.lr; at least 0, at most 1; default 1e-06; env LR"),
        ("engine", "one of local, ray, verl; default unset"),
        ("train_files", "(data.train_files; default unset; env TRAIN_FILES; e.g. --train_files"),
        ("logger", "one of console, tensorboard, wandb, trackio, mlflow, swanlab; default console"),
        ("gamma", "Discount. (algorithm.gamma; at least 0, at most 1; default 1.0; env GAE_GAMMA)"),
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


def test_the_help_is_whole_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert [name for name in list_flag_keys() if f"  --{name}" not in out] == []
    assert "Model:" in out and "Reward:" in out
