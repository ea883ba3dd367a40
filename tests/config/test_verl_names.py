"""Other names for settings, one by one: honoured, tied, told or refused, never dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.derived import data_ranks
from ppo_cli.config.keys import find, table, value_of
from ppo_cli.config.requirements import missing_parts
from ppo_cli.config.verl import TURNED, foreign_names
from tests.config.settling import problems, settle

NAMES = foreign_names()


def refusal(*overrides: str) -> str:
    return "\n".join(problems(*overrides))


# One row for each way in which a name becomes ours, and for what is easily taken for another.
OTHER_NAMES = {
    "actor_rollout_ref.ref.fsdp_config.param_offload=True": ("ref.param_offload", True),
    "critic.model.fsdp_config.optimizer_offload=True": (
        "critic.fsdp_config.optimizer_offload", True,
    ),
    "actor_rollout_ref.actor.ppo_epochs=2": ("actor.ppo_epochs", 2),
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.5": ("rollout.val_kwargs.top_p", 0.5),
    "actor.optim.warmup_style=cosine": ("actor.optim.lr_scheduler_type", "cosine"),
    "critic.optim.clip_grad=2": ("critic.grad_clip", 2.0),
    "actor_rollout_ref.model.use_remove_padding=True": ("model.packing", True),
    "trainer.resume_mode=disable": ("trainer.resume_mode", "never"),
    "reward_model.path=rm": ("reward.model.path", "rm"),
    "reward.reward_model.model.path=rm": ("reward.model.path", "rm"),
    "reward_model.max_length=null": ("reward.model.max_length", None),
    "reward_model.forward_max_token_len_per_gpu=99": ("reward.model.batch_tokens", 99),
    "custom_reward_function.path=r.py": ("reward.function", "r.py"),
    "+reward.custom_reward_function.reward_kwargs.x=1": ("reward.function_kwargs", {"x": 1}),
    "trainer.logger=['console','file']": ("trainer.logger", ("console",)),
    "trainer.logger=file": ("trainer.logger", ()),
    "trainer.logger=[console,wandb]": ("trainer.logger", ("console", "wandb")),
    "rollout.val_kwargs.do_sample=False": ("rollout.val_kwargs.temperature", 0.0),
    "critic.forward_max_token_len_per_gpu=99": ("ref.log_prob_max_token_len_per_gpu", 99),
    "rollout.log_prob_micro_batch_size_per_gpu=8": (
        "ref.log_prob_max_token_len_per_gpu", 8 * 1024,
    ),
    "actor.ppo_micro_batch_size=8": ("actor.ppo_micro_batch_size_per_gpu", 8),
    "actor.use_dynamic_bsz=True": ("actor.ppo_micro_batch_size_per_gpu", None),
    "actor.fsdp_config.mixed_precision.param_dtype=bf16": ("model.dtype", "bfloat16"),
    "algorithm.learning_rate=2e-6": ("actor.optim.lr", 2e-6),
    "algorithm.epochs=4": ("critic.ppo_epochs", 4),
    "ppo.max_grad_norm=0.5": ("actor.grad_clip", 0.5),
    "ppo.normalize_advantages=false": ("algorithm.whiten_advantages", False),
    "ppo.kl_coef=0.2": ("algorithm.kl_ctrl.kl_coef", 0.2),
    "ppo.adaptive_kl=true": ("algorithm.kl_ctrl.type", "adaptive"),
    "training.offload_optimizer=on": ("critic.fsdp_config.optimizer_offload", True),
    "eval_steps=7": ("trainer.test_freq", 7),
    "distributed.data_parallel_size=2": ("trainer.num_workers", 2),
    "distributed.pipeline_parallel_size=1": ("trainer.pipeline_parallel_size", 1),
}  # fmt: skip


def test_another_name_sets_our_setting() -> None:
    wrong = {}
    for given, (key, value) in OTHER_NAMES.items():
        found = settle(given)
        if (value_of(found.config, key), found.origins[key]) != (value, "override"):
            wrong[given] = value_of(found.config, key), found.origins[key]
    assert wrong == {}


def test_path_and_name_of_a_function_are_joined() -> None:
    found = settle("custom_reward_function.path=r.py", "custom_reward_function.name=grade")
    assert found.config.reward.function == "r.py:grade"
    assert "FILE:NAME" in refusal("custom_reward_function.name=grade")


def test_resuming_from_a_path_takes_both_of_verls_keys() -> None:
    found = settle("trainer.resume_mode=resume_path", "trainer.resume_from_path=ck/step_4")
    assert found.config.trainer.resume_mode == "ck/step_4"
    assert "--resume PATH" in refusal("trainer.resume_mode=resume_path")
    assert "--resume ck" in refusal("trainer.resume_from_path=ck")


def test_the_tighter_of_two_log_prob_sizes_holds() -> None:
    rows = (
        "rollout.log_prob_micro_batch_size_per_gpu=8",
        "ref.log_prob_micro_batch_size_per_gpu=2",
    )
    found = settle(*rows, "data.max_prompt_length=100", "data.max_response_length=28")
    assert found.config.ref.log_prob_max_token_len_per_gpu == 2 * 128


NODES = ("trainer.nnodes=2", "trainer.node_rank=0", "trainer.n_gpus_per_node=4")


@pytest.mark.parametrize(
    ("devices", "each"),
    [
        (("trainer.n_gpus_per_node=4",), 2),
        (NODES, 1),
        ((*NODES, "trainer.tensor_parallel_size=2"), 2),
        (("trainer.num_workers=2",), 4),
        (("trainer.placement=train:0-3,rollout:4-7", "trainer.n_gpus_per_node=8"), 2),
    ],
)
def test_the_old_global_micro_batch_is_shared_over_ranks(
    devices: tuple[str, ...], each: int
) -> None:
    config = settle("critic.ppo_micro_batch_size=8", *devices).config
    assert config.critic.ppo_micro_batch_size_per_gpu == each
    assert data_ranks(config, 8) == 8 // each


def test_a_global_micro_batch_that_ranks_cannot_share_is_refused() -> None:
    said = refusal("critic.ppo_micro_batch_size=6", "trainer.n_gpus_per_node=4")
    assert "6 is not divisible by 4 ranks" in said


def test_the_old_global_log_prob_size_is_shared_over_ranks() -> None:
    sizes = ("data.max_prompt_length=100", "data.max_response_length=28")
    found = settle("rollout.log_prob_micro_batch_size=8", "trainer.n_gpus_per_node=4", *sizes)
    assert found.config.ref.log_prob_max_token_len_per_gpu == 2 * 128
    found = settle("rollout.log_prob_micro_batch_size=2", "trainer.n_gpus_per_node=4", *sizes)
    assert found.config.ref.log_prob_max_token_len_per_gpu == 128


def test_one_models_clip_leaves_the_other_alone() -> None:
    config = settle("critic.optim.clip_grad=2").config
    assert (config.actor.grad_clip, config.critic.grad_clip) == (1.0, 2.0)
    config = settle("actor.optim.clip_grad=2").config
    assert (config.actor.grad_clip, config.critic.grad_clip) == (2.0, 1.0)


MESH = ("distributed.data_parallel_size=4", "distributed.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("visible", "more", "gpus", "workers"),
    [
        (0, (), None, 8),
        (0, ("trainer.n_gpus_per_node=8",), 8, None),
        (0, ("trainer.nnodes=2", "trainer.node_rank=0"), None, 8),
        (8, (), 8, None),
        (8, ("trainer.nnodes=2", "trainer.node_rank=0"), 4, None),
        (8, ("trainer.placement=train:0-7,rollout:8-15", "trainer.n_gpus_per_node=16"), 16, None),
    ],
)
def test_the_older_styles_mesh_is_the_trainers(
    visible: int, more: tuple[str, ...], gpus: int | None, workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("ppo_cli.config.derived._devices_present", lambda root: visible)
    found = settle(*MESH, *more, env={"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(visible)))})
    trainer = found.config.trainer
    assert (trainer.n_gpus_per_node, trainer.num_workers) == (gpus, workers)
    assert trainer.tensor_parallel_size == 2
    assert found.config.rollout.tensor_model_parallel_size == 1
    assert data_ranks(found.config, visible) == 4
    (note,) = (n for n in found.notes if n.startswith("override: distributed"))
    assert "the sampler has --rollout_tp" in note


def test_a_mesh_that_is_not_the_runs_is_refused() -> None:
    said = refusal(*MESH, "trainer.num_workers=4")
    assert "data_parallel_size 4 times trainer.tensor_parallel_size is not" in said
    assert "'x' is not a whole number" in refusal("distributed.data_parallel_size=x")


def test_a_size_for_all_ranks_is_shared_by_a_mesh_wherever_that_stands() -> None:
    sizes = ("actor.ppo_micro_batch_size=8", "distributed.data_parallel_size=4")
    for given in (sizes, sizes[::-1]):
        assert settle(*given).config.actor.ppo_micro_batch_size_per_gpu == 2


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size",
        "actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size",
        "critic.megatron_config.tensor_model_parallel_size",
        "actor.megatron.param_offload",
        "reward_model.megatron.seed",
        "ref.megatron_config.x.y",
    ],
)
def test_a_setting_of_megatron_is_named_as_such(key: str) -> None:
    said = refusal(f"{key}=4")
    assert "it is a setting of Megatron, which is not offered" in said
    assert "rollout." not in said and "Did you mean" not in said


def test_two_names_in_one_layer_must_agree() -> None:
    both = settle("actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs=2")
    assert both.config.actor.ppo_epochs == 2
    said = refusal("actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs=3")
    assert "both set actor.ppo_epochs, differently" in said


@pytest.mark.parametrize(
    ("key", "same", "other", "own"),
    [
        ("actor.rollout_n", "1", "4", "rollout.n"),
        ("rollout.prompt_length", "512", "1024", "data.max_prompt_length"),
        ("rollout.response_length", "512", "256", "data.max_response_length"),
        ("data.gen_batch_size", "256", "512", "data.train_batch_size"),
        ("data.seed", "42", "7", "trainer.seed"),
        ("actor.fsdp_config.strategy", "fsdp2", "fsdp", "actor.strategy"),
        ("ref.strategy", "fsdp2", "fsdp", "actor.strategy"),
        ("critic.model.tokenizer_path", "some/model", "other/model", "model.path"),
        ("data.trust_remote_code", "False", "True", "model.trust_remote_code"),
    ],
)
def test_a_tied_setting_must_be_what_it_is_tied_to(
    key: str, same: str, other: str, own: str
) -> None:
    assert settle(f"{key}={same}").config == settle(f"{key}=null").config == settle().config
    assert f"{key} is {own} here" in refusal(f"{key}={other}")


@pytest.mark.parametrize(
    ("key", "ours", "other", "why"),
    [
        ("hybrid_engine", "True", "False", "--placement"),
        ("actor.policy_loss.loss_mode", "vanilla", "gspo", "clipped surrogate"),
        ("critic.optim.optimizer", "adamw", "sgd", "torch's AdamW"),
        ("model.use_shm", "False", "True", "read from where they lie"),
        ("critic.model.lora_rank", "0", "8", "LoRA adapts the actor"),
        ("rollout.do_sample", "True", "False", "rollout.temperature"),
        ("rollout.ignore_eos", "False", "True", "ends where the model ends it"),
        ("trainer.balance_batch", "True", "False", "balanced by tokens"),
        ("ref.ulysses_sequence_parallel_size", "1", "2", "sequence parallelism"),
        ("actor.fsdp_config.model_dtype", "fp32", "bf16", "kept in float32"),
        ("algorithm.name", "ppo", "dpo", "algorithm.adv_estimator"),
    ],
)
def test_what_we_do_anyway_is_taken_and_anything_else_refused(
    key: str, ours: str, other: str, why: str
) -> None:
    assert settle(f"{key}={ours}").config == settle().config
    assert why in refusal(f"{key}={other}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("actor.strategy=megatron", "sharded with FSDP2"),
        ("rollout.name=sglang", "none of it, verl has. Use vllm, or hf"),
        ("actor.strategy=veomni", "is not one of fsdp2, fsdp."),
        ("actor.policy_loss.loss_mode=gspo", "clipped surrogate"),
        ("algorithm.adv_estimator=gpg", "is not one of gae"),
        ("reward_model.reward_manager=prime", "reward manager 'prime' is not offered"),
        ("reward.reward_manager.name=gdpo", "reward.composite.parts.NAME.scaling=group"),
        ("algorithm.gdpo_reward_weights=[1,2]", "--reward KIND:NAME:WEIGHT"),
        ("reward.sandbox_fusion.url=http://h", "built-in sandbox: --rule code"),
        ("reward_model.sandbox_fusion.max_concurrent=3", "built-in sandbox: --rule code"),
        ("reward_model.trust_remote_code=True", "reward models run no code of their own"),
        ("reward_model.micro_batch_size_per_gpu=4", "batch_tokens"),
        ("reward.reward_kwargs.overlong_buffer_cfg.enable=True", "cfg.len=64"),
        ("reward_model.enable=True", "--reward_model PATH"),
        ("actor.use_dynamic_bsz=False", "actor.ppo_micro_batch_size_per_gpu=4"),
        ("rollout.val_kwargs.do_sample=True", "rollout.val_kwargs.temperature=0.7"),
        ("trainer.device=cuda", "no GPU"),
        ("trainer.logger=mlflow", "is not one of console, tensorboard, wandb"),
        ("actor.checkpoint.save_contents=[model]", "always holds model, optimizer and extra"),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_2.0", "a window"),
        ("distributed.pipeline_parallel_size=2", "not offered: models are sharded with FSDP2"),
        ("algorithm.name=grpo", "algorithm.adv_estimator"),
        ("critic.enable=False", "only gae trains a critic"),
        ("trainer.val_only=True", "trainer.val_before_train"),
        ("rollout.log_prob_micro_batch_size=x", "whole number"),
        ("custom_reward_function.pth=x", "--reward_function"),
    ],
)
def test_refusals_say_what_to_use(given: str, said: str) -> None:
    assert said in refusal(given)


def test_what_is_taken_without_effect_is_remarked_on() -> None:
    for given in ("critic.model.lora_alpha=8", "rollout.free_cache_engine=True"):
        notes = settle(given, "data.train_files=x.jsonl").notes
        assert [note.split(": ")[1] for note in notes] == [given.partition("=")[0]], given


def test_critic_enable_is_taken_where_it_says_what_we_do() -> None:
    assert settle("critic.enable=True").config == settle("critic.enable=null").config
    rpp = "algorithm.adv_estimator=reinforce_plus_plus"
    assert settle("critic.enable=False", rpp).config == settle(rpp).config
    assert "only gae trains a critic" in refusal("critic.enable=True", rpp)


def test_the_quickstart_command_line_works() -> None:
    found = settle(
        "data.train_files=train.parquet",
        "data.val_files=test.parquet",
        "data.train_batch_size=256",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "critic.model.enable_gradient_checkpointing=True",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=['console']",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_epochs=15",
    )
    assert [note.split(": ")[1] for note in found.notes] == [
        "rollout.log_prob_micro_batch_size_per_gpu",
        "ref.log_prob_micro_batch_size_per_gpu",
    ]
    assert "the tokens of 8 of the longest sequences" in found.notes[0]
    assert "the smallest holds" in found.notes[0]
    assert found.config.ref.log_prob_max_token_len_per_gpu == 4 * 1024
    assert found.config.model.packing
    assert found.config.rollout.name == "vllm"


OLDER = """
algorithm: {name: ppo, learning_rate: 1e-6, batch_size: 64, mini_batch_size: 16, epochs: 2,
            clip_range: 0.2, value_loss_coef: 0.5, entropy_coef: 0.01, max_grad_norm: 1.0}
ppo: {normalize_advantages: true, advantage_estimator: gae, gae_lambda: 0.95, kl_target: 0.05,
      kl_coef: 0.1, adaptive_kl: true, clip_grad_value: null}
training: {gradient_checkpointing: true, use_dynamic_batchsize: true, offload_optimizer: false}
distributed: {data_parallel_size: 1, tensor_parallel_size: 1, pipeline_parallel_size: 1}
"""


def test_a_whole_file_in_the_older_style(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(OLDER, encoding="utf-8")
    found = settle(files=(path,))
    assert found.config.algorithm.kl_ctrl.type == "adaptive"
    assert found.origins["actor.ppo_epochs"] == f"{path} line 2"
    assert any("--critic_lr" in note for note in found.notes)


def test_the_tables_do_not_overlap_and_point_at_settings() -> None:
    told = (NAMES.renamed, NAMES.tied, NAMES.same, NAMES.told, NAMES.refused, TURNED)
    names = [name for names in told for name in names]
    assert len(names) == len(set(names))
    plain = [n for n in names if n not in TURNED and not n.endswith(".*")]
    assert [n for n in plain if find(n) is not None] == []
    targets = [own for new in NAMES.renamed.values() for own in new]
    assert [
        t for t in [*targets, *NAMES.tied.values()] if not t.endswith(".*") and t not in table()
    ] == []


@pytest.mark.parametrize("group", ["reward_model.reward_kwargs", "reward.reward_kwargs"])
def test_the_over_long_penalty_of_dapo_is_ours(group: str) -> None:
    place = f"{group}.overlong_buffer_cfg"
    given = [f"{place}.len=64", f"{place}.penalty_factor=0.5", f"{place}.log=False"]
    found = settle(*given, f"{place}.enable=True", "reward.reward_manager.name=dapo")
    shaping = found.config.reward.shaping
    assert (shaping.overlong_buffer, shaping.overlong_penalty) == (64, 0.5)
    assert any("reward.shaping.overlong_buffer" in note for note in found.notes)
    off = settle(*given, f"{place}.enable=False")
    assert (off.config.reward.shaping.overlong_buffer, missing_parts(off, gpus=0)) == (None, [])
    assert settle(*given).config.reward.shaping.overlong_buffer is None


def test_both_spellings_of_the_buffer_may_stand_side_by_side() -> None:
    one, other = "reward.reward_kwargs.overlong_buffer_cfg", "reward_model.reward_kwargs"
    given = [f"{one}.len=64", f"{other}.overlong_buffer_cfg.len=32"]
    assert settle(*given).config.reward.shaping.overlong_buffer is None
    found = settle(*given, f"{one}.enable=True")
    assert found.config.reward.shaping.overlong_buffer == 32


def test_the_tokenizer_of_the_responses_is_not_the_reward_models() -> None:
    key = "reward_model.model.input_tokenizer"
    found = settle("reward_model.model.path=rm", f"{key}=some/model")
    assert found.config.reward.model.tokenizer is None
    assert "is model.path here" in refusal(f"{key}=other/model")
