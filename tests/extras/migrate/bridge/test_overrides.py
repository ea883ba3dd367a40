"""The overrides of the bridge against verl 0.9.1's own Hydra files, and read again by us."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppo_cli.config.models.bundled import preset_names
from ppo_cli.config.schema.keys import table, value_of
from ppo_cli.config.schema.run import Config
from ppo_cli.extras.migrate.bridge import overrides as bridge
from ppo_cli.planning.resolve import resolve
from tests.extras.migrate.bridge.settled import GPUS, drawn, settled, verl_config_dir
from tests.settings import CPU

FOLDER = Path("/shared/run one")
Compose = Callable[[list[str]], dict[str, Any]]


def build_overrides(requested: Config, verl_words: Sequence[str] = ()) -> bridge.VerlOverrides:
    return bridge.build_overrides(requested, CPU, verl_words)


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
    files = verl_config_dir()
    import hydra
    from omegaconf import OmegaConf

    def composed(overrides: list[str]) -> dict[str, Any]:
        with hydra.initialize_config_dir(files, version_base=None):
            config = hydra.compose("ppo_trainer", overrides=overrides)
        tree = OmegaConf.to_container(config, resolve=False)
        if "model_engine=megatron" not in overrides:  # whose packages are not here
            accepted_by_verl(config)
        assert isinstance(tree, dict)
        return dict(flat(tree))

    return composed


def assert_arrives(bridged: bridge.VerlOverrides, compose: Compose) -> None:
    """Each override is a setting of verl's, and has our value there."""
    assert bridged.problems == ()
    composed = compose(bridged.lines(FOLDER))
    for name, value in bridged.values.items():
        expected = str(FOLDER / value) if name in bridge.FILES else value
        expected = list(expected) if isinstance(expected, tuple) else expected
        actual = composed[name]
        actual = actual.replace(r"\${", "${") if isinstance(actual, str) else actual
        assert (name, actual, type(actual)) == (name, expected, type(expected))


def test_a_distillation_is_not_handed_to_verl() -> None:
    problems = build_overrides(settled(preset="distillation")).problems
    assert [problem.split()[0] for problem in problems] == ["algorithm.score_coef", "ref.path"]


@pytest.mark.parametrize("preset", sorted({*preset_names()} - {"distillation"}))
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
# Values that verl's line writes in another way.
INSTEAD: dict[str, dict[Any, Any]] = {
    "trainer.save_freq": {-1: bridge.NEVER}, "actor.grad_clip": {0.0: bridge.NO_LIMIT},
    "critic.grad_clip": {0.0: bridge.NO_LIMIT},
}  # fmt: skip
# Ends of names that do not come from our settings alone.
DERIVED = ("dtype", "load_format", "do_sample", "model.path", "tokenizer", "tokenizer_path")


def test_read_as_a_line_of_verl_the_overrides_are_the_same_settings() -> None:
    for seed in range(20):
        config = drawn(seed)
        lines = [
            f"{name}={bridge.to_hydra(value) if isinstance(value, list) else value}"
            for name, value in build_overrides(config).values.items()
            if name in bridge.verl_names() - bridge.FILES
            if not name.startswith("reward.") and not name.endswith(DERIVED)
        ]
        lines += [*GPUS, f"trainer.seed={config.trainer.seed}"]
        read = resolve(flags={}, preset=None, config_files=[], overrides=lines, environ={}).config
        # A clip range of dis is a window of weights there.
        of_loss = config.actor.policy_loss.loss_mode == "dis"
        windows = {name for name in table() if of_loss and "rollout_is_threshold" in name}
        for name in table().keys() - UNREAD - bridge.OUR_ENGINE_ONLY - windows:
            value = value_of(config, name)
            if value is not None and not name.startswith("reward."):
                expected = INSTEAD[name].get(value, value) if name in INSTEAD else value
                assert (name, value_of(read, name)) == (name, expected), seed


WRITTEN = yaml.safe_load(Path(__file__).with_name("written.yaml").read_text())
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize("case", WRITTEN, ids=lambda case: case["settings"])
def test_what_differs_by_more_than_its_name(case: dict[str, Any]) -> None:
    values = build_overrides(settled(*case["settings"].split())).values
    assert {name: values.get(name, "left out") for name in case["verl"]} == case["verl"]


def test_megatron_has_some_settings_under_names_of_its_own() -> None:
    config = settled(
        "actor.optim.lr=1e-5", "actor.optim.min_lr_ratio=0.2",
        "actor.optim.lr_scheduler_type=cosine",
    )  # fmt: skip
    plain = build_overrides(config).values
    megatron = ["model_engine=megatron", f"{ACTOR}.strategy=megatron"]
    values = build_overrides(config, megatron).values
    assert values[f"{ACTOR}.optim.min_lr"] == pytest.approx(2e-6)
    assert values[f"{ACTOR}.optim.lr_decay_style"] == plain[f"{ACTOR}.optim.lr_scheduler_type"]
    assert values[f"{ACTOR}.megatron.dtype"] == "bfloat16"
    gone = (f"{ACTOR}.optim.min_lr_ratio", f"{ACTOR}.grad_clip", f"{ACTOR}.strategy",
            f"{ACTOR}.fsdp_config.dtype")  # fmt: skip
    assert not set(gone) & values.keys() and set(gone) <= plain.keys()
    refused = build_overrides(config, megatron[1:]).problems
    assert "actor.strategy megatron needs verl's own model_engine=megatron as well." in refused
    linear = settled("actor.optim.lr_scheduler_type=linear")
    assert build_overrides(linear).problems and not build_overrides(linear, megatron).problems


def test_every_setting_is_told_to_verl_or_said_to_be_ours_or_refused() -> None:
    declared = {*bridge.WRITERS, *bridge.OUR_ENGINE_ONLY, *bridge.REFUSED}
    silent = {name for name in table().keys() - declared if not bridge.verl_names_by_key()[name]}
    assert all(name.startswith("reward.") for name in silent)
    assert declared <= set(table())
    assert not set(bridge.REFUSED) & (set(bridge.OUR_ENGINE_ONLY) | set(bridge.WRITERS))


OTHER: dict[str, Any] = {
    "data.apply_chat_template": False, "algorithm.whiten_advantages": False, "ref.path": "other",
    "reward.shaping.normalize": "batch", "model.quantization": "nf4",
    "critic.model.quantization": "nf4", "trainer.placement": "train:0-5,rollout:6-7",
    "reward.api.monitor.labels": "labels.jsonl", "algorithm.subtract_group_mean": True,
    "critic.lam": 0.5, "algorithm.gamma_piece": 0.5, "algorithm.lam_piece": 0.5,
    "critic.model.freeze_attention": True, "model.float32_head": True,
    "reward.api.place": "line", "reward.rule_place": True, "critic.pretrain_until": 0.5,
    "trainer.on_hacking": "stop",
    "trainer.stop_on_hacking": True,
    "trainer.store": "file:///srv/run",
    "environment.path": "game.py:Game", "environment.tools": "tools.py",
    "environment.mcp_config": "mcp.json", "trainer.alert": "HOOK",
}  # fmt: skip


@pytest.mark.parametrize("name", bridge.REFUSED)
def test_what_verl_cannot_be_told_is_refused_by_its_name(name: str) -> None:
    allowed, message = bridge.REFUSED[name]
    assert table()[name].default == allowed
    tree = section = settled().model_dump(exclude_unset=True)
    *groups, leaf = name.split(".")
    for group in groups:
        section = section.setdefault(group, {})
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
        "actor_rollout_ref.actor.policy_loss.loss_mode=dro", "trainer.v1.trainer_mode=sync",
    )  # fmt: skip
    assert [word for word in reference if not bridge.is_verl_only(word)] == []
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
    assert not bridge.is_verl_only(word)
