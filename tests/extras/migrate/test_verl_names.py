"""Other names for settings, one by one: honoured, tied, told or refused, never dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.config.schema.keys import find_key, table, value_of
from ppo_cli.extras.migrate.verl.translations import TRANSLATIONS
from ppo_cli.extras.migrate.verl.translator import foreign_names
from ppo_cli.planning.batches import batch_arithmetic
from ppo_cli.planning.placement import data_ranks
from tests.config.settling import load_table, problems, refusals, remarks, settle
from tests.settings import with_gpus

NAMES = foreign_names()
ROWS = load_table("../extras/migrate/verl_names.yaml")


def refusal(*overrides: str) -> str:
    return "\n".join(problems(*overrides))


def test_another_name_sets_our_setting() -> None:
    wrong = {}
    for overrides, ((key, value),) in (
        (text, row.items()) for text, row in ROWS["becomes"].items()
    ):
        resolved = settle(*overrides.split())
        raw = value_of(resolved.config, key)
        outcome = (list(raw) if isinstance(raw, tuple) else raw, resolved.origins[key])
        if outcome != (value, "override"):
            wrong[overrides] = outcome
    assert wrong == {}
    assert "FILE:NAME" in refusal("custom_reward_function.name=grade")
    for first, other in (("actor", "critic"), ("critic", "actor")):
        config = settle(f"{first}.optim.clip_grad=2").config
        assert getattr(config, first).grad_clip == 2 and getattr(config, other).grad_clip == 1


@pytest.mark.parametrize("override", ROWS["changes_nothing"])
def test_what_is_done_here_anyway_is_taken(override: str) -> None:
    assert settle(override).config == settle().config


def test_a_function_of_a_file_gives_way_to_a_flag(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("custom_reward_function: {path: low.py, name: grade}\n")
    resolved = settle(
        files=[file], flags={"reward.function": ("high.py", "flag --reward_function")}
    )
    assert resolved.config.reward.function == "high.py"


def test_what_verl_leaves_empty_says_nothing() -> None:
    overrides = (
        "custom_reward_function.path=null", "custom_reward_function.name=null",
        "actor_rollout_ref.model.lora_alpha=0", "actor_rollout_ref.model.lora_rank=0",
        "trainer.resume_from_path=x", "actor_rollout_ref.actor.optim.warmup_style=null",
    )  # fmt: skip
    line = "actor_rollout_ref.rollout.n=1"
    assert settle(line, *overrides).config == settle(line).config
    assert "lora_alpha must be above 0" in refusal("model.lora_alpha=0", "model.lora_rank=8")


def test_resuming_from_a_path_takes_both_of_verls_keys() -> None:
    resolved = settle("trainer.resume_mode=resume_path", "trainer.resume_from_path=ck/step_4")
    assert resolved.config.trainer.resume_mode == "ck/step_4"
    assert "--resume PATH" in refusal("trainer.resume_mode=resume_path")
    assert "--resume ck" in refusal("trainer.resume_from_path=ck")


NODES = ("trainer.nnodes=2", "trainer.node_rank=0", "trainer.n_gpus_per_node=4")


@pytest.mark.parametrize(
    ("devices", "each"),
    [
        (("trainer.n_gpus_per_node=4",), 2),
        (NODES, 1),
        ((*NODES, "trainer.tensor_parallel_size=2"), 2),
        (("trainer.placement=train:0-3,rollout:4-7", "trainer.n_gpus_per_node=8"), 2),
    ],
)
def test_the_old_global_micro_batch_is_shared_over_ranks(
    devices: tuple[str, ...], each: int
) -> None:
    config = settle("critic.ppo_micro_batch_size=8", *devices, machine=with_gpus(8)).config
    assert config.critic.ppo_micro_batch_size_per_gpu == each
    assert data_ranks(config) == 8 // each


def test_a_global_micro_batch_that_ranks_cannot_share_is_refused() -> None:
    message = refusal("critic.ppo_micro_batch_size=6", "trainer.n_gpus_per_node=4")
    assert "6 is not divisible by 4 ranks" in message


MESH = ("distributed.data_parallel_size=4", "distributed.tensor_parallel_size=2")


@pytest.mark.parametrize(
    ("visible", "extra", "gpus", "workers"),
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
    visible: int, extra: tuple[str, ...], gpus: int | None, workers: int | None
) -> None:
    resolved = settle(*MESH, *extra, machine=with_gpus(visible))
    trainer = resolved.requested.trainer
    assert (trainer.n_gpus_per_node, trainer.num_workers) == (gpus, workers)
    assert trainer.tensor_parallel_size == 2
    assert resolved.config.rollout.tensor_model_parallel_size == 1
    assert data_ranks(resolved.config) == 4
    (note,) = (n for n in resolved.notes if n.startswith("override: distributed"))
    assert "the sampler has --rollout_tp" in note


def test_a_mesh_that_is_not_the_runs_is_refused() -> None:
    message = refusal(*MESH, "trainer.num_workers=4")
    assert "data_parallel_size 4 times trainer.tensor_parallel_size is not" in message
    assert "'x' is not a whole number" in refusal("distributed.data_parallel_size=x")


def test_two_names_in_one_layer_must_agree() -> None:
    both = settle("actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs=2")
    assert both.config.actor.ppo_epochs == 2
    message = refusal("actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs=3")
    assert "both set actor.ppo_epochs, differently" in message


def test_one_seed_draws_everything() -> None:
    resolved = settle("data.seed=7", "actor.data_loader_seed=3", "critic.fsdp.seed=null")
    assert resolved.config.trainer.seed == 7
    assert any("actor.data_loader_seed: trainer.seed draws everything" in n for n in resolved.notes)
    assert settle("data.seed=7", "trainer.seed=8").config.trainer.seed == 8


def test_what_stands_behind_a_switch_of_verl_is_refused_only_where_that_is_on() -> None:
    overrides = {
        "rollout.multi_turn.max_user_turns=3": "rollout.multi_turn.enable=True",
        "critic.fsdp.qat.mode=w8": "critic.fsdp.qat.enable=True",
        "reward_model.rollout.temperature=0.5": "reward_model.enable=True",
        "actor.veomni.fsdp_size=4": "model_engine=veomni",
        "trainer.v1.separate_async.parameter_sync_step=5": "trainer.v1.trainer_mode=separate_async",
    }
    for key, switch in overrides.items():
        name = key.partition("=")[0].replace("critic.fsdp.", "critic.fsdp_config.")
        (note,) = [n for n in settle(key).notes if name in n]
        assert "it changes nothing, as in verl" in note
        assert f"{name} cannot be set here" in refusal(key, switch), key


def test_several_turns_need_an_environment_of_ours() -> None:
    turns = "actor_rollout_ref.rollout.multi_turn.enable=True"
    assert "name what the model talks to, with --environment" in refusal(turns)
    settled = settle(turns, "environment.path=game.py:Game", "rollout.multi_turn.format=hermes")
    assert settled.config.environment.is_set
    assert "--tools FILE.py" in refusal(turns, "rollout.multi_turn.tool_config_path=tools.yaml")


def test_gdpo_takes_the_parts_and_no_kl_in_the_reward() -> None:
    algorithm = settle(
        "algorithm.adv_estimator=gdpo", "rollout.n=4", "reward.reward_manager.name=gdpo",
        "algorithm.gdpo_reward_keys=[accuracy,format]", "algorithm.gdpo_reward_weights=[1,0.5]",
    ).config.algorithm  # fmt: skip
    assert algorithm.gdpo_reward_keys == ("accuracy", "format")
    assert algorithm.gdpo_reward_weights == (1.0, 0.5)
    assert not algorithm.use_kl_in_reward


def test_dynamic_sampling_counts_the_batches_that_it_samples() -> None:
    on = ("algorithm.filter_groups.enable=True", "data.gen_batch_size=768", "rollout.n=4")
    sums = batch_arithmetic(settle(*on, "algorithm.filter_groups.max_num_gen_batches=10").config)
    assert sums["reward_calls_per_step"] == 768 * 4
    assert sums["reward_calls_per_step_at_most"] == 10 * 768 * 4


def test_limits_of_the_gap_between_sampler_and_trainer_are_read_as_verls() -> None:
    at = "algorithm.rollout_correction"
    resolved = settle(f"{at}.rollout_is=token", f"{at}.rollout_is_threshold=0.5_2.0").config
    correction = resolved.algorithm.rollout_correction
    assert correction.rollout_is_threshold_lower == 0.5 and correction.rollout_is_threshold == 2.0

    def read(names: str, limits: str) -> str:
        overrides = settle(f"{at}.rollout_rs='{names}'", f"{at}.rollout_rs_threshold='{limits}'")
        refused = refusals(overrides)
        correction = overrides.config.algorithm.rollout_correction
        return refused[0] if refused else str(correction.rejections())

    assert read("token_k1,seq_max_k2", "0.6_1.6,0.3") == (
        "[('token_k1', 0.6, 1.6), ('seq_max_k2', None, 0.3)]"
    )
    assert read("seq_mean_k1", "4") == "[('seq_mean_k1', 0.25, 4.0)]"
    for names, limits, message in (
        ("geometric", "1", "'geometric' is not one of token_k1"),
        ("token_k2", "", "belong together"),
        ("token_k2", "0.5_2", "one number"),
        ("token_k2", "-1", "one number"),
        ("token_k1", "2_0.5", "0.5_2.0 or 2.0"),
        ("token_k1", "0.5", "must be 1 or more"),
        ("token_k1,token_k2", "1,2,3", "3 values for 2"),
    ):
        assert message in read(names, limits), (names, limits)


@pytest.mark.parametrize(
    ("weights", "loss"),
    [
        ("loss_type=reinforce rollout_is=token rollout_is_threshold=0.2_4.0", ("dis", 0.8, 3.0)),
        ("loss_type=reinforce rollout_is=token rollout_is_threshold=2", ("cispo", 1.0, 1.0)),
        ("loss_type=reinforce", ("gpg", 0.2, 0.2)),
        ("loss_type=ppo_clip rollout_is=token", ("vanilla", 0.2, 0.2)),  # its ratio corrects
    ],
)
def test_a_bypass_of_verl_beside_training_is_ours(
    weights: str, loss: tuple[str, float, float]
) -> None:
    at = "algorithm.rollout_correction"
    resolved = settle(
        "algorithm.adv_estimator=gae", "rollout.n=1", "trainer.v1.trainer_mode=separate_async",
        f"{at}.bypass_mode=true", *(f"{at}.{word}" for word in weights.split()),
    )  # fmt: skip
    config = resolved.config
    assert refusals(resolved) == []
    assert config.trainer.async_steps == 1 and config.algorithm.rollout_correction.bypass_mode
    assert config.algorithm.rollout_correction.rollout_is == "off"
    actor = config.actor
    assert actor.policy_loss.loss_mode == loss[0]
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == pytest.approx(loss[1:])


def test_arguments_of_vllm_are_passed_on_but_not_those_that_have_settings() -> None:
    at = "rollout.engine_kwargs.vllm"
    graph = "+actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode"
    resolved = settle(
        f"{graph}=FULL", f"{at}.block_size=64", f"{at}.max_model_len=4096",
        f"{at}.mm_processor_cache_gb=0", "rollout.name=vllm",
    )  # fmt: skip
    passed = {"compilation_config": {"cudagraph_mode": "FULL"}, "block_size": 64}
    assert resolved.config.rollout.engine_kwargs.vllm == passed
    assert any("mm_processor_cache_gb" in note for note in resolved.notes)
    for overrides, message in (
        ("tensor_parallel_size=2", "set rollout.tensor_model_parallel_size instead"),
        ("load_format=dummy", "leave it out"),
    ):
        assert any(message in line for line in refusals(settle(f"{at}.{overrides}")))
    assert "lower one of these" in refusal(f"{at}.max_model_len=100")


def test_dr_grpo_by_name_gives_way_to_what_is_said_beside_it() -> None:
    config = settle("algorithm.adv_estimator=dr_grpo", "rollout.n=4").config
    assert config.algorithm.adv_estimator == "grpo"
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert config.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    for order in (1, -1):
        overrides = ["algorithm.adv_estimator=dr_grpo", "actor.loss_agg_mode=token-sum"][::order]
        assert settle(*overrides, "rollout.n=4").config.actor.loss_agg_mode == "token-sum"


def test_policy_losses_have_verls_names_and_ranges() -> None:
    wide = ["actor.clip_ratio_low=10", "actor.clip_ratio_high=0.2"]
    cispo = settle("actor.policy_loss.loss_mode=cispo", *wide).config.actor
    assert (cispo.policy_loss.loss_mode, cispo.clip_ratio_low) == ("cispo", 10)
    assert refusal(*wide)
    narrow = ["actor.clip_ratio_low=3e-4", "actor.clip_ratio_high=4e-4"]
    loss = "actor.policy_loss.loss_mode=gspo"
    assert settle(loss).config.actor.loss_agg_mode == "seq-mean-token-mean"
    gspo = settle(loss, *narrow, "actor.loss_agg_mode=token-mean", "data.train_files=x.jsonl")
    (note,) = [n for n in remarks(gspo) if "clip" in n or "GSPO" in n]
    assert "actor.loss_agg_mode=seq-mean-token-mean" in note
    # With what suits plain PPO, hardly any sequence would be clipped.
    usual = settle(loss, "data.train_files=x.jsonl")
    (note,) = [n for n in remarks(usual) if "clip" in n or "GSPO" in n]
    assert "actor.clip_ratio_low=3e-4 actor.clip_ratio_high=4e-4" in note


@pytest.mark.parametrize(
    "override",
    [
        "rollout.free_cache_engine=True", "model.use_shm=True", "reward_model.param_offload=True",
        "actor.fsdp_config.grad_offload=True", "actor.checkpoint.save_contents=[model]",
        "ray_kwargs.ray_init.runtime_env.py_executable=python3",
    ],
)  # fmt: skip
def test_what_is_taken_without_effect_is_remarked_on(override: str) -> None:
    (note,) = settle(override, "data.train_files=x.jsonl").notes
    assert note.split(": ")[1] == override.partition("=")[0]


def test_critic_enable_is_taken_where_it_says_what_we_do() -> None:
    rpp = "algorithm.adv_estimator=reinforce_plus_plus"
    assert settle("critic.enable=False", rpp).config == settle(rpp).config
    assert "gae has a critic, and the others have none" in refusal("critic.enable=True", rpp)


QUICKSTART = """
data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=256
actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4
critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.model.enable_gradient_checkpointing=True
critic.ppo_micro_batch_size_per_gpu=4 algorithm.kl_ctrl.kl_coef=0.001 trainer.logger=['console']
trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.total_epochs=15
"""


def test_the_quickstart_command_line_works() -> None:
    resolved = settle(*QUICKSTART.split())
    defaults, rollout, ref, *_ = resolved.notes
    assert "left out are as in verl 0.8" in defaults and "--verl 0.2" in defaults
    assert rollout.split(": ")[1] == "rollout.log_prob_micro_batch_size_per_gpu"
    assert "the tokens of 8 of the longest sequences" in rollout and "smallest holds" in rollout
    assert ref.split(": ")[1] == "ref.log_prob_micro_batch_size_per_gpu"
    assert resolved.config.ref.log_prob_max_token_len_per_gpu == 4 * 1024
    assert (resolved.config.model.packing, resolved.config.rollout.name) == (True, "vllm")


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
    resolved = settle(files=(path,))
    assert resolved.config.algorithm.kl_ctrl.type == "adaptive"
    assert resolved.origins["actor.ppo_epochs"] == f"{path} line 2"
    assert any("--critic_lr" in note for note in resolved.notes)


def test_the_tables_do_not_overlap_and_point_at_settings() -> None:
    tables = (NAMES.renamed, NAMES.tied, NAMES.same, NAMES.remarked, NAMES.refused, TRANSLATIONS)
    names = [name for names in tables for name in names]
    assert len(names) == len(set(names))
    plain = [n for n in names if n not in TRANSLATIONS and not n.endswith(".*")]
    assert [n for n in plain if find_key(n) is not None] == []
    assert {switch.partition("=")[0] for switch in NAMES.behind.values()} <= set(names)
    targets = [target for new in NAMES.renamed.values() for target in new]
    assert [
        t for t in [*targets, *NAMES.tied.values()] if not t.endswith(".*") and t not in table()
    ] == []


@pytest.mark.parametrize(
    "place",
    [
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
        "reward.overlong_buffer",
    ],
)
def test_the_over_long_penalty_of_dapo_is_ours(place: str) -> None:
    overrides = [f"{place}.len=64", f"{place}.penalty_factor=0.5", f"{place}.log=False"]
    resolved = settle(*overrides, f"{place}.enable=True", "reward.reward_manager.name=dapo")
    shaping = resolved.config.reward.shaping
    assert (shaping.overlong_buffer, shaping.overlong_penalty) == (64, 0.5)
    assert any("reward.shaping.overlong_buffer" in note for note in resolved.notes)
    off = settle(*overrides, f"{place}.enable=False")
    assert (off.config.reward.shaping.overlong_buffer, refusals(off)) == (None, [])
    assert settle(*overrides).config.reward.shaping.overlong_buffer is None


def test_the_tokenizer_of_the_responses_is_not_the_reward_models() -> None:
    key = "reward_model.model.input_tokenizer"
    resolved = settle("reward_model.model.path=rm", f"{key}=some/model")
    assert resolved.config.reward.model.tokenizer is None
    assert "is model.path here" in refusal(f"{key}=other/model")
