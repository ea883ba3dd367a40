"""The overrides of the bridge against verl 0.9.1's own Hydra files, and read again by us."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.config.models.bundled import preset_names
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.extras.bridge.overrides import (
    FILES,
    NEVER,
    NO_LIMIT,
    OUR_ENGINE_ONLY,
    REFUSED,
    WRITERS,
    VerlOverrides,
    build_overrides,
    is_verl_only,
    to_hydra,
    verl_names,
    verl_names_by_key,
)
from tests.extras.bridge.settled import GPUS, drawn, settled

FOLDER = Path("/shared/run one")
Compose = Callable[[list[str]], dict[str, Any]]


def flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def accepted_by_verl(config: Any) -> None:
    """Let verl's own checks have their say: its data classes, and validate_config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import omega_conf_to_dataclass, validate_config

        config.actor_rollout_ref.model.lora_rank = 0  # what it would ask vLLM, which is not here
        need = need_reference_policy(config), need_critic(config)
        validate_config(config, *need)
        omega_conf_to_dataclass(config.algorithm)


@pytest.fixture(scope="module")
def compose() -> Compose:
    hydra = pytest.importorskip("hydra", reason="verl 0.9.1's Hydra files are not here")
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl 0.9.1 is not installed here; see the oracle extra")
    from omegaconf import OmegaConf

    def composed(overrides: list[str]) -> dict[str, Any]:
        files = str(Path(spec.origin or "").parent / "trainer" / "config")
        with hydra.initialize_config_dir(files, version_base=None):
            config = hydra.compose("ppo_trainer", overrides=overrides)
        full_run = OmegaConf.to_container(config, resolve=False)
        if "model_engine=megatron" not in overrides:  # whose packages are not here
            accepted_by_verl(config)
        assert isinstance(full_run, dict)
        return dict(flat(full_run))

    return composed


def assert_arrives(bridged: VerlOverrides, compose: Compose) -> None:
    """Each override is a setting of verl's, and has our value there."""
    assert bridged.problems == ()
    composed = compose(bridged.lines(FOLDER))
    for name, value in bridged.values.items():
        message = str(FOLDER / value) if name in FILES else value
        message = list(message) if isinstance(message, tuple) else message
        got = (
            composed[name].replace(r"\${", "${")
            if isinstance(composed[name], str)
            else composed[name]
        )
        assert (name, got, type(got)) == (name, message, type(message))


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_composes_with_verls_files(preset: str, compose: Compose) -> None:
    local = ("reward.model.device=cpu",) if preset == "reward-model" else ()
    assert_arrives(build_overrides(settled(*local, preset=preset)), compose)


@pytest.mark.slow  # a second for each in Hydra
def test_sixty_drawn_configurations_compose_with_verls_files(compose: Compose) -> None:
    for seed in range(60):
        assert_arrives(build_overrides(drawn(seed)), compose)


# What a line of verl cannot say of ours: files of the folder, what is verl's only, what `OWN` has.
UNREAD = {
    "model.path", "data.train_files", "data.val_files", "data.val_max_samples",
    "data.train_max_samples", "trainer.output_dir", "critic.model.path", "model.dtype",
    "model.attn_implementation", "actor.optim.eps", "critic.optim.eps",
    "data.apply_chat_template_kwargs", "rollout.engine_kwargs.vllm", "trainer.test_freq",
    "ref.log_prob_max_token_len_per_gpu", "trainer.val_before_train",
}  # fmt: skip


# What stands for a word of ours.
INSTEAD: dict[str, dict[Any, Any]] = {
    "trainer.save_freq": {-1: NEVER}, "actor.grad_clip": {0.0: NO_LIMIT},
    "critic.grad_clip": {0.0: NO_LIMIT},
}  # fmt: skip


def test_read_as_a_line_of_verl_the_overrides_are_the_same_settings() -> None:
    for seed in range(60):
        config = drawn(seed)
        lines = [
            f"{name}={to_hydra(value) if isinstance(value, list) else value}"
            for name, value in build_overrides(config).values.items()
            if name in verl_names()
            and name not in FILES
            and not name.startswith("reward.")
            and not name.endswith(
                ("dtype", "load_format", "do_sample", "model.path", "tokenizer", "tokenizer_path")
            )
        ]
        lines += [*GPUS, f"trainer.seed={config.trainer.seed}"]
        read = resolve(flags={}, preset=None, config_files=[], overrides=lines, environ={}).config
        for name in table():
            arguments = value_of(config, name)  # what is unset is written as what it comes to
            message = INSTEAD[name].get(arguments, arguments) if name in INSTEAD else arguments
            if (
                arguments is not None
                and name not in UNREAD | OUR_ENGINE_ONLY
                and not name.startswith("reward.")
            ):
                assert (name, value_of(read, name)) == (name, message), seed


ACTOR, SAMPLER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
POLICY, CRITIC = "actor_rollout_ref.model", "critic.model"
CHECKPOINTS = "enable_gradient_checkpointing"
TOKENS = "ppo_max_token_len_per_gpu"
MICRO = "ppo_micro_batch_size_per_gpu"
CORRECTION = "algorithm.rollout_correction"
LONG = "reward.reward_kwargs"
WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("actor.clip_ratio_c=null", {f"{ACTOR}.clip_ratio_c": 1e9}),
    ("actor.clip_ratio_c=5 actor.clip_ratio=0.3", {
        f"{ACTOR}.clip_ratio_c": 5.0, f"{ACTOR}.clip_ratio": 0.3,
        f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.3}),
    ("actor.clip_ratio_low=0.1 actor.clip_ratio_high=0.4", {
        f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.4}),
    ("actor.grad_clip=0 critic.grad_clip=0.5", {
        f"{ACTOR}.grad_clip": 1e9, f"{ACTOR}.optim.clip_grad": 1e9,
        "critic.grad_clip": 0.5, "critic.optim.clip_grad": 0.5}),
    ("actor.optim.eps=1e-6 critic.optim.eps=1e-7 actor.loss_scale_factor=1024 "
     "actor.loss_agg_mode=seq-mean-token-sum-norm", {
        f"{ACTOR}.optim.override_optimizer_config.eps": 1e-6,
        "critic.optim.override_optimizer_config.eps": 1e-7,
        f"{ACTOR}.optim.optimizer_impl": "torch.optim", f"{ACTOR}.loss_scale_factor": 1024}),
    ("model.dtype=float32", {
        f"{ACTOR}.fsdp_config.dtype": "float32", "critic.fsdp.dtype": "float32",
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "float32",
        f"{SAMPLER}.dtype": "float32"}),
    ("", {
        f"{ACTOR}.fsdp_config.dtype": "bfloat16", "critic.fsdp.model_dtype": "float32",
        "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype": "bfloat16",
        "critic.fsdp.mixed_precision.reduce_dtype": "float32",
        "critic.fsdp.mixed_precision.buffer_dtype": "float32", f"{SAMPLER}.dtype": "bfloat16"}),
    ("model.attn_implementation=sdpa", {
        f"{POLICY}.override_config.attn_implementation": "sdpa",
        f"{POLICY}.use_remove_padding": False, f"{CRITIC}.use_remove_padding": False}),
    ("model.attn_implementation=flash_attention_2", {
        f"{CRITIC}.override_config.attn_implementation": "flash_attention_2",
        f"{POLICY}.use_remove_padding": True, f"{CRITIC}.use_remove_padding": True}),
    ("model.attn_implementation=flash_attention_2 model.packing=false", {
        f"{POLICY}.use_remove_padding": False}),
    ("model.attn_implementation=sdpa model.packing=true", {f"{POLICY}.use_remove_padding": True}),
    ("", {f"{POLICY}.{CHECKPOINTS}": True, f"{CRITIC}.{CHECKPOINTS}": True}),
    (f"model.{CHECKPOINTS}=false", {
        f"{POLICY}.{CHECKPOINTS}": False, f"{CRITIC}.{CHECKPOINTS}": False}),
    (f"critic.model.{CHECKPOINTS}=false", {
        f"{POLICY}.{CHECKPOINTS}": True, f"{CRITIC}.{CHECKPOINTS}": False}),
    (f"actor.{MICRO}=4 critic.{TOKENS}=5000 ref.log_prob_max_token_len_per_gpu=7000", {
        f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.{MICRO}": 4, "critic.use_dynamic_bsz": True,
        f"critic.{MICRO}": None, f"critic.{TOKENS}": 5000,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 7000,
        f"{SAMPLER}.log_prob_max_token_len_per_gpu": 7000,
        f"{SAMPLER}.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
        "critic.forward_max_token_len_per_gpu": 7000}),
    ("model.lora_rank=8 model.lora_alpha=16", {
        f"{POLICY}.lora_rank": 8, f"{POLICY}.lora_alpha": 16,
        f"{SAMPLER}.load_format": "safetensors"}),
    ("model.lora_rank=0", {f"{SAMPLER}.load_format": "dummy"}),
    ("trainer.test_freq=-1 trainer.save_freq=-1 data.val_files=v.jsonl", {
        "trainer.test_freq": 10**9, "trainer.save_freq": 10**9, "data.val_max_samples": -1,
        "data.val_files": "data/val.parquet", "trainer.val_before_train": True}),
    ("trainer.test_freq=5 trainer.save_freq=7 data.val_files=v.jsonl "
     "trainer.val_before_train=false", {
        "trainer.test_freq": 5, "trainer.save_freq": 7, "trainer.val_before_train": False}),
    ("trainer.test_freq=5", {
        "trainer.test_freq": -1, "trainer.val_before_train": False, "data.val_max_samples": 1,
        "data.val_files": "data/train.parquet"}),
    ("trainer.resume_mode=auto", {
        "trainer.resume_mode": "auto", "trainer.resume_from_path": None}),
    ("trainer.resume_mode=never", {
        "trainer.resume_mode": "disable", "trainer.resume_from_path": None}),
    ("trainer.resume_mode=/runs/global_step_4", {
        "trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/runs/global_step_4"}),
    ("", {
        "algorithm.filter_groups.metric": "score", f"{CORRECTION}.bypass_mode": False,
        f"{CORRECTION}.rollout_is_threshold": 2.0}),
    ("algorithm.filter_groups.metric=seq_reward", {"algorithm.filter_groups.metric": "reward"}),
    (f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=3 "
     f"{CORRECTION}.rollout_is_threshold_lower=0.5", {
        f"{CORRECTION}.rollout_is_threshold": "0.5_3.0", f"{CORRECTION}.rollout_is": "token"}),
    ("", {"reward.reward_manager.name": "naive"}),
    ("reward.shaping.overlong_buffer=64 reward.shaping.overlong_penalty=0.5 "
     "data.max_response_length=300", {
        "reward.reward_manager.name": "dapo", f"{LONG}.overlong_buffer_cfg.enable": True,
        f"{LONG}.overlong_buffer_cfg.len": 64, f"{LONG}.overlong_buffer_cfg.log": False,
        f"{LONG}.overlong_buffer_cfg.penalty_factor": 0.5, f"{LONG}.max_resp_len": 300}),
    ("rollout.val_kwargs.temperature=0.0 trainer.critic_warmup=0", {
        f"{SAMPLER}.val_kwargs.do_sample": False, "trainer.critic_warmup": 0}),
    ("rollout.val_kwargs.temperature=0.7 trainer.critic_warmup=5 rollout.seed=7", {
        f"{SAMPLER}.val_kwargs.do_sample": True, f"{SAMPLER}.val_kwargs.temperature": 0.7,
        "trainer.critic_warmup": 6, f"{SAMPLER}.seed": 7}),
    ("actor.ppo_mini_batch_size=64 critic.ppo_mini_batch_size=32", {
        f"{ACTOR}.ppo_mini_batch_size": 64, "critic.ppo_mini_batch_size": 32}),
    ("actor.ppo_mini_batch_size=64", {"critic.ppo_mini_batch_size": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), WRITTEN)
def test_what_differs_by_more_than_its_name(arguments: str, expected: dict[str, Any]) -> None:
    values = build_overrides(settled(*arguments.split())).values
    assert {name: values.get(name, "left out") for name in expected} == expected


def test_megatron_has_some_settings_under_names_of_its_own() -> None:
    config = settled(
        "actor.optim.lr=1e-5", "actor.optim.min_lr_ratio=0.2",
        "actor.optim.lr_scheduler_type=cosine",
    )  # fmt: skip
    plain = build_overrides(config).values
    values = build_overrides(config, ["model_engine=megatron", f"{ACTOR}.strategy=megatron"]).values
    assert values[f"{ACTOR}.optim.min_lr"] == pytest.approx(2e-6)
    assert values[f"{ACTOR}.optim.lr_decay_style"] == plain[f"{ACTOR}.optim.lr_scheduler_type"]
    assert values[f"{ACTOR}.megatron.dtype"] == "bfloat16"
    gone = (f"{ACTOR}.optim.min_lr_ratio", f"{ACTOR}.grad_clip", f"{ACTOR}.strategy",
            f"{ACTOR}.fsdp_config.dtype")  # fmt: skip
    assert not set(gone) & values.keys() and set(gone) <= plain.keys()
    refused = build_overrides(config, [f"{ACTOR}.strategy=megatron"]).problems
    assert "actor.strategy megatron needs verl's own model_engine=megatron as well." in refused


def test_every_setting_is_told_to_verl_or_said_to_be_ours_or_refused() -> None:
    silent = [
        name
        for name in table()
        if not (
            verl_names_by_key()[name]
            or name in WRITERS
            or name in OUR_ENGINE_ONLY
            or name in REFUSED
        )
        and not name.startswith("reward.")
    ]
    assert silent == []
    assert {*WRITERS, *OUR_ENGINE_ONLY, *REFUSED} <= set(table())
    assert not set(REFUSED) & (set(OUR_ENGINE_ONLY) | set(WRITERS))


OTHER: dict[str, Any] = {
    "data.apply_chat_template": False, "algorithm.whiten_advantages": False, "ref.path": "other",
    "reward.shaping.normalize": "batch", "model.quantization": "nf4",
    "critic.model.quantization": "nf4", "trainer.placement": "train:0-5,rollout:6-7",
    "reward.api.monitor.labels": "labels.jsonl",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_verl_cannot_be_told_is_refused_by_its_name(name: str) -> None:
    allowed, message = REFUSED[name]
    assert table()[name].default == allowed
    tree = settled().model_dump()
    *groups, leaf = name.split(".")
    section = tree
    for group in groups:
        section = section[group]
    section[leaf] = OTHER.get(name, ("2",) if allowed == () else 7)
    problems = build_overrides(Config.model_validate(tree)).problems
    assert [p for p in problems if p.startswith(f"{name} ") and message in p]


def test_what_only_verl_has_goes_there_untouched(compose: Compose) -> None:
    reference = (
        "model_engine=megatron", "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8",
        "critic.megatron.pipeline_model_parallel_size=2", "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.multi_turn.enable=True", "trainer.device=npu",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_grouped_gemm=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "trainer.v1.trainer_mode=sync",
    )  # fmt: skip
    assert [word for word in reference if not is_verl_only(word)] == []
    bridged = build_overrides(settled(), reference)
    assert_arrives(bridged, compose)
    composed = compose(bridged.lines(FOLDER))
    assert composed["actor_rollout_ref.rollout.name"] == "sglang"
    assert composed["actor_rollout_ref.actor.megatron.param_offload"] is False
    assert composed["actor_rollout_ref.actor.optim.lr_decay_style"] == "constant"
    assert composed["actor_rollout_ref.actor.megatron.expert_model_parallel_size"] == 8


@pytest.mark.parametrize(
    "word",
    ["actor.clip_ratio=0.3", "actor_rollout_ref.rollout.name=vllm", "actor.optim.warmup_step=3",
     "algorithm.lamm=1", "trainer.logger=[console]", "data.seed=3", "critic.strategy=fsdp2"],
)  # fmt: skip
def test_ours_and_what_nobody_knows_stay_here(word: str) -> None:
    assert not is_verl_only(word)


def test_verl_must_be_told_its_gpus() -> None:
    config = resolve(flags={}, preset=None, config_files=[], environ={},
                     overrides=["trainer.engine=verl", "rollout.name=hf"]).config  # fmt: skip
    problems = " ".join(build_overrides(config).problems)
    assert "--n_gpus 8" in problems and "rollout.name hf" in problems
