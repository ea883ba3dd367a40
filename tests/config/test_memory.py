"""What a step needs of memory: counted from config.json, compared with models and with autograd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.shape import Device, Shape
from ppo_cli.config.schema.keys import with_settings
from ppo_cli.config.schema.run import Config
from ppo_cli.config.settle import settle
from ppo_cli.engine.cpu.lean_layers import use_lean_layers
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.memory import host_memory
from ppo_cli.planning.memory.devices import (
    DeviceNeeds,
    ModelShapes,
    RunNeeds,
    read_shapes,
)
from ppo_cli.planning.memory.plan import (
    estimate_memory,
    find_smallest_change,
    fit_memory,
    memory_plan,
)
from tests.config.settling import load_table
from tests.settings import CPU, GIB, complete, with_gpus

TABLES = load_table("families.yaml")
SIZES, FAMILIES = TABLES["sizes"], TABLES["families"]
GPT2 = {"vocab_size": 512, "n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 128}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
# How far the count of what autograd keeps may be off: the shape is exact for Llama's layer.
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama": (SIZES, 0.03),
    "qwen2": (SIZES, 0.03),
    "mistral": (SIZES | {"sliding_window": None}, 0.03),
    "qwen3": (SIZES, 0.03),
    "gemma2": (SIZES | {"attn_implementation": "eager"}, 0.1),
    "mixtral": (SIZES | ROUTED, 0.35),
    "gpt2": (GPT2 | ENDS, 0.5),
}
SMALL = with_gpus(8, GIB)
ALONE = replace(CPU, host_bytes=GIB)


def kept_by_autograd(model: Any, tokens: int) -> int:
    """Numbers that a forward pass of the backbone saves, each storage once, weights left out."""
    pointers = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in pointers:
            saved[storage.data_ptr()] = (storage.nbytes() // 4, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model.base_model(torch.arange(tokens)[None], use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(count for count, _ in saved.values())


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_that_autograd_keeps(name: str) -> None:
    sizes, allowed = MODELS[name]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes)).train()
    use_lean_layers(model)
    shape = Shape.from_config(model.config.to_dict())
    assert shape is not None
    plain = Device(half=False, gpu=False, shards=1, tensor=1, packed=False, keeps_freed=False)
    a_token = shape.layers * shape.layer_bytes(plain, 64) // 4 + 2 * shape.hidden
    counted, saved = a_token * 64, kept_by_autograd(model, 64)
    assert abs(counted - saved) <= allowed * saved, (counted, saved)


# Feed-forward layers without a gate are counted as if they had one.
UNGATED = {"opt", "bloom", "mpt", "falcon"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind](**FAMILIES[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = Shape.from_config(json.loads((tmp_path / "config.json").read_text()))
    assert shape is not None
    expected = sum(p.numel() for p in model.parameters())
    assert 0.97 * expected <= shape.parameters() <= (1.4 if kind in UNGATED else 1.03) * expected


def test_no_shape_is_guessed() -> None:
    assert Shape.from_config({}) is None
    assert (
        Shape.from_config(SIZES | {"num_experts": 8}) is None
    )  # nobody knows how many a token takes
    assert (
        Shape.from_config(SIZES | {"layer_types": ["full_attention", "linear_attention"]}) is None
    )
    for key in ("mamba_d_state", "conv_L_cache", "kv_lora_rank", "vocab_size_per_layer_input"):
        assert Shape.from_config(SIZES | {key: 16}) is None
    assert Shape.from_config({"text_config": SIZES}) == Shape.from_config(SIZES)
    assert Shape.from_config(SIZES | {"intermediate_size": [128, 256, 128]}) == Shape.from_config(
        SIZES
    )


def config(**parts: dict[str, Any]) -> Config:
    pointers: dict[str, dict[str, Any]] = {
        "model": {"path": "embedded"},
        "data": {"max_prompt_length": 100, "max_response_length": 28, "train_batch_size": 8},
        "actor": {"ppo_mini_batch_size": 4, "ppo_max_token_len_per_gpu": 300},
        "critic": {"ppo_max_token_len_per_gpu": 300},
        "trainer": {"engine": "local"},
    }
    return Config.model_validate(
        {k: pointers.get(k, {}) | parts.get(k, {}) for k in {**pointers, **parts}}
    )


SHAPE = Shape(hidden=10, inner=20, layers=2, heads=2, queries=10, keys=5, vocabulary=100, tied=True)
SHAPES = ModelShapes(SHAPE, SHAPE, SHAPE)
LAYER = 2 * 10 * 15 + 3 * 10 * 20
WEIGHTS = 4 * (2 * LAYER + 100 * 10)
# What autograd keeps of a token in a layer (with packed attention's own copy), and above them.
TOKEN, TOP = 4 * (60 + 30 + 2 + 10 + 80), 4 * 20


def count(config: Config, shapes: ModelShapes = SHAPES, machine: Machine = SMALL) -> Any:
    return RunNeeds(complete(config, machine), shapes, machine).devices()


def fits(config: Config, shapes: ModelShapes, machine: Machine) -> bool | None:
    return estimate_memory(settle(config, machine).config, shapes, machine).fits


def counted(**parts: dict[str, Any]) -> DeviceNeeds:
    keeps = {"enable_gradient_checkpointing": False} | parts.pop("model", {})
    (place,) = count(config(model=keeps, **parts), machine=ALONE)
    return place


# What differs from the settings above, the models in memory, and the tokens of a micro-batch.
STEPS: dict[str, tuple[dict[str, Any], str, int]] = {
    "the token budget": ({}, "actor critic reference", 300),
    "more rows": ({"rollout": {"n": 8}}, "actor critic reference", 300),
    "a mini-batch below the budget": (
        {"actor": {"ppo_mini_batch_size": 2}}, "actor critic reference", 256,
    ),
    "one row at a time": (
        {"actor": {"ppo_micro_batch_size_per_gpu": 1}}, "actor critic reference", 128,
    ),
    "LoRA: no reference": ({"model": {"lora_rank": 4}}, "actor critic", 300),
    "no reference": ({"algorithm": {"use_kl_in_reward": False}}, "actor critic", 300),
    "no critic": (
        {"algorithm": {"adv_estimator": "grpo"}, "rollout": {"n": 4}}, "actor reference", 300,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "roles", "tokens"), STEPS.values(), ids=STEPS)
def test_a_step_by_hand(parts: dict[str, Any], roles: str, tokens: int) -> None:
    place = counted(**parts)
    assert " ".join(place.roles) == f"{roles} sampler"
    actor = place.roles["actor"]
    trained = WEIGHTS
    if parts.get("model"):
        trained = 4 * 2 * 4 * (5 * 10 + 10 + 20 + 20 + 10 + 10 + 40)
        assert actor.parameters == WEIGHTS + trained
    else:
        assert actor.activations == tokens * (2 * TOKEN + TOP)
    assert (actor.gradients, actor.moments) == (trained, 2 * trained)
    rest = sum(role.parameters + role.moments for role in place.roles.values())
    assert place.phases["annotation"] > rest < place.needed == max(place.phases.values())


def test_a_critic_is_counted_by_its_adapter_and_moments_by_their_bits() -> None:
    eight = {"optim": {"optimizer": "AdamW8bit"}}
    place = counted(critic={"model": {"lora_rank": 4}}, actor=eight)
    adapter = 4 * 2 * 4 * (5 * 10 + 10 + 20 + 20 + 10 + 10 + 40)
    critic, actor = place.roles["critic"], place.roles["actor"]
    assert (critic.parameters, critic.gradients) == (WEIGHTS + adapter, adapter)
    assert critic.moments == 2 * adapter
    # A byte an element, and four bytes for each 256.
    assert actor.moments == int(2 * (WEIGHTS / 4 + WEIGHTS / 256))
    # Of two layers with MLPs of 3 x 10 x 20 only these are trained.
    frozen = counted(critic={"model": {"freeze_attention": True}}).roles["critic"]
    assert (frozen.parameters, frozen.gradients) == (WEIGHTS, 4 * 2 * 3 * 10 * 20)
    assert frozen.moments == 2 * frozen.gradients


def test_weights_in_4_bits_are_counted_as_bitsandbytes_holds_them() -> None:
    adapted = {"lora_rank": 4}
    plain, quantised = counted(model=adapted), counted(model=adapted | {"quantization": "nf4"})
    layers = 2 * (2 * 10 * (10 + 5) + 3 * 10 * 20)
    saved = plain.roles["actor"].parameters - quantised.roles["actor"].parameters
    # Half a byte a weight, a byte for each 64, and four bytes for each 256 of those.
    assert saved == pytest.approx(layers * (4 - (1 / 2 + 1 / 64 + 4 / 64 / 256)), abs=1)
    assert quantised.roles["critic"] == plain.roles["critic"]


def test_frozen_weights_take_two_bytes_in_bfloat16_on_gpus() -> None:
    """A reference, the base of an adapter and a separate sampler; experts of a reference four."""
    shape = Shape.from_config(HUGE)
    assert shape is not None

    def weights(role: str, **parts: Any) -> int:
        gpu = {"trainer": {"engine": "ray", "n_gpus_per_node": 1}, "rollout": {"name": "hf"}}
        machine = with_gpus(1, 80 * GIB)
        (place,) = count(config(**gpu | parts), ModelShapes(shape, shape, shape), machine)
        return place.roles[role].parameters

    adapted = {"model": {"lora_rank": 8}}
    assert weights("reference") == weights("sampler") == 2 * shape.parameters()
    assert weights("actor") == 4 * shape.parameters()
    assert weights("actor", **adapted) == 2 * shape.parameters() + 4 * shape.adapter(8)
    float32 = {"model": {"dtype": "float32"}}
    assert weights("reference", **float32) == 4 * shape.parameters()
    mixed = replace(shape, experts=4, expert_width=4 * shape.inner, routes=1)
    gpu = Device(half=True, gpu=True, shards=1, tensor=1, packed=True, keeps_freed=False)
    experts = mixed.layers * 3 * mixed.hidden * mixed.expert_width
    assert gpu.frozen(mixed) == 2 * mixed.parameters() + 2 * experts
    assert replace(gpu, shards=2).frozen(mixed) == mixed.parameters()


ATTENTION_WIDTHS = (10 + 10) + (10 + 5) + (10 + 5) + (10 + 10)  # q, k, v, o: given and taken


@pytest.mark.parametrize(
    ("targets", "widths"),
    [
        ("all-linear", 2 * (ATTENTION_WIDTHS + 3 * 30)),
        (("q_proj", "k_proj", "v_proj", "o_proj"), 2 * ATTENTION_WIDTHS),
        (("q_proj", "self_attn.v_proj"), 2 * (20 + 15)),
        ("down_proj", 2 * 30),
        (r".*\.1\..*_proj", ATTENTION_WIDTHS + 3 * 30),
        (r".*\.qkv_proj", 2 * (10 + 20)),
        (("q_proj", "odd"), 2 * (ATTENTION_WIDTHS + 3 * 30)),  # of unknown width: all are counted
        ("[", 2 * (ATTENTION_WIDTHS + 3 * 30)),
    ],
)
def test_an_adapter_has_the_modules_that_are_named(targets: Any, widths: int) -> None:
    assert SHAPE.adapter(4, targets) == 4 * widths
    place = counted(model={"lora_rank": 4, "target_modules": targets})
    assert place.roles["actor"].gradients == 4 * 4 * widths


def test_all_scores_of_a_row_are_held_where_attention_is_eager() -> None:
    """Gemma 2 in annotations and updates; models with sinks, whose config.json names no cap."""
    sizes = SIZES | {"num_key_value_heads": 6}
    gemma, sinks, llama = (
        Shape.from_config(sizes | lines)
        for lines in (
            {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
            {"model_type": "gpt_oss"},
            {"model_type": "llama"},
        )
    )
    assert gemma is not None and sinks is not None and llama is not None
    ranks = Device(half=True, gpu=True, shards=8, tensor=1, packed=False, keeps_freed=False)
    # Six heads at 10 bytes a pair, two masks; three states, queries three and keys two times.
    scores = 10 * 6 * 4096 + 2 * 2 * 4096
    assert gemma.attention_score_bytes(ranks, 4096) == scores + 2 * (3 * 96 + 5 * 96)
    assert sinks.attention_score_bytes(ranks, 4096) == gemma.attention_score_bytes(ranks, 4096)
    assert gemma.attention_score_gradients(ranks, 4096) == 6 * 6 * 4096
    assert (
        llama.attention_score_bytes(ranks, 4096)
        == llama.attention_score_gradients(ranks, 4096)
        == 0
    )


def test_eager_attention_is_counted_where_it_is_set(tmp_path: Path) -> None:
    path = write_model(tmp_path / "plain", **SIZES)
    for kernel, scores in ((None, False), ("sdpa", False), ("eager", True)):
        shapes = read_shapes(complete(config(model={"path": path, "attn_implementation": kernel})))
        assert isinstance(shapes, ModelShapes)
        assert shapes.actor.scores is scores


def test_a_gpu_computes_the_gradients_of_all_experts_at_once() -> None:
    shape = replace(SHAPE, experts=8, expert_width=160, routes=2)
    gpu = Device(half=True, gpu=True, shards=8, tensor=1, packed=True, keeps_freed=False)
    assert shape.expert_gradients(gpu) == 2 * 3 * 10 * 160
    assert shape.expert_gradients(replace(gpu, shards=1)) == 4 * 3 * 10 * 160


def test_recomputed_activations_are_the_inputs_of_layers() -> None:
    place = counted(model={"enable_gradient_checkpointing": True})
    assert place.roles["actor"].activations == 300 * (2 * 40 + TOP)


GPUS = {"engine": "ray", "n_gpus_per_node": 8}
WIDE = {
    "data": {"max_prompt_length": 100, "max_response_length": 28, "train_batch_size": 64},
    "actor": {"ppo_mini_batch_size": 64, "ppo_max_token_len_per_gpu": 16384},
    "critic": {"ppo_max_token_len_per_gpu": 16384},
    "rollout": {"name": "vllm", "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.5},
}


def test_gpus_share_weights_rows_and_layers() -> None:
    (place,) = count(config(trainer=GPUS, **WIDE))
    assert place.name == "a GPU that trains"
    actor, sampler = place.roles["actor"], place.roles["sampler"]
    assert (actor.parameters, actor.moments) == (WEIGHTS // 8, 2 * WEIGHTS // 8)
    # The sampler has its share of the GPU, weights in bfloat16 split over two.
    assert sampler.parameters == WEIGHTS // 2 // 2
    assert sampler.parameters + sampler.kv_cache == GIB // 2
    (split,) = count(config(trainer=GPUS | {"tensor_parallel_size": 2}, **WIDE))
    assert split.roles["actor"].parameters == (4 * (2 * LAYER // 2 + 1000)) // 4
    # Eight of 64 rows, or sixteen.
    assert split.roles["actor"].logits == 2 * actor.logits


def test_offload_leaves_weights_and_moments_to_the_host() -> None:
    away = {"fsdp_config": {"param_offload": True}}
    parts = {name: WIDE[name] | away for name in ("actor", "critic")}
    offloaded = config(trainer=GPUS, **WIDE | parts, ref={"param_offload": True})
    (place,), (capacity,) = (count(lone) for lone in (offloaded, config(trainer=GPUS, **WIDE)))
    assert place.phases["rollout"] < capacity.phases["rollout"]
    assert place.roles["actor"].moments == 0
    moments = {
        name: WIDE[name] | {"fsdp_config": {"optimizer_offload": True}}
        for name in ("actor", "critic")
    }
    (place,) = count(config(trainer=GPUS, **WIDE | moments))
    assert capacity.phases["annotation"] - place.phases["annotation"] == 2 * 2 * WEIGHTS // 8


def test_processes_of_a_machine_add_up() -> None:
    several = config(trainer={"engine": "ray", "num_workers": 4, "n_gpus_per_node": 0})
    alone = config(trainer={"engine": "ray", "num_workers": 1, "n_gpus_per_node": 0})
    (many,), (lone,) = (count(c, machine=ALONE) for c in (several, alone))
    assert many.roles["actor"].parameters == WEIGHTS // 4
    assert lone.roles["actor"].parameters == WEIGHTS
    assert many.phases["annotation"] > 3 * WEIGHTS


def test_the_smallest_change_makes_it_fit() -> None:
    shape = Shape.from_config(HUGE | {"hidden_size": 1024, "num_hidden_layers": 24, "head_dim": 64})
    assert shape is not None
    shapes = ModelShapes(shape, shape, shape)
    wide = config(
        trainer={"engine": "ray", "n_gpus_per_node": 1},
        rollout={"name": "hf", "max_num_seqs": 8},
        data={"max_response_length": 1000, "train_batch_size": 64},
        actor={"ppo_mini_batch_size": 64, "ppo_max_token_len_per_gpu": 65536},
        critic={"ppo_max_token_len_per_gpu": 65536},
    )
    seen = []
    for gib in (400, 140, 110, 60, 20, 5, 1):
        machine = with_gpus(8, gib * GIB)
        if fits(wide, shapes, machine):
            seen.append("fits")
            continue
        changes = find_smallest_change(wide, shapes, machine)
        if changes is None:
            seen.append("none")
            continue
        assert fits(with_settings(wide, changes), shapes, machine)
        seen.append(min(key.rpartition(".")[2] for key in changes))
    budget, gpus = "ppo_max_token_len_per_gpu", "n_gpus_per_node"
    assert seen == ["fits", "fits", budget, gpus, gpus, "none", "none"]


def write_model(folder: Path, **lines: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | lines))
    return str(folder)


HUGE = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def test_activations_are_kept_where_memory_is_ample(tmp_path: Path) -> None:
    huge = write_model(tmp_path / "huge", **HUGE)
    odd = write_model(tmp_path / "odd", model_type="own")
    for path, recomputed, fragment in (
        ("embedded", False, "gradient checkpointing: off (a step"),
        (huge, True, "gradient checkpointing: on (a step"),
        (odd, True, "gradient checkpointing: on (the memory of a step is unknown here)"),
        ("nobody/has-this-model", True, "unknown (no config.json"),
    ):
        fitted = fit_memory(settle(config(model={"path": path}), CPU))
        assert fitted.config.model.enable_gradient_checkpointing is recomputed, path
        sentences = memory_plan(config(model={"path": path}), fitted, CPU).sentences
        assert fragment in " ".join(sentences)


@pytest.mark.parametrize("setting", [True, False])
def test_what_was_set_stays(setting: bool, tmp_path: Path) -> None:
    for path in ("embedded", write_model(tmp_path / "huge", **HUGE)):
        settings = config(model={"path": path, "enable_gradient_checkpointing": setting})
        fitted = fit_memory(settle(settings, CPU))
        assert fitted.config.model.enable_gradient_checkpointing is setting
        sentences = memory_plan(settings, fitted, CPU).sentences
        assert f"gradient checkpointing: {'on' if setting else 'off'}, as set" in sentences


RANKS = {"engine": "ray", "n_gpus_per_node": 0, "num_workers": 2}


@pytest.mark.parametrize(
    ("path", "trainer", "setting", "actor", "critic", "fragment"),
    [
        ("embedded", RANKS, None, False, False, "gradients reduced once a step"),
        ("huge", RANKS, None, True, True, "gradients reduced in each micro-batch"),
        ("embedded", RANKS, True, True, False, None),
        ("huge", RANKS, False, False, True, None),
        ("embedded", RANKS | {"num_workers": 1}, None, True, True, None),
    ],
)
def test_ranks_keep_whole_weights_where_memory_is_ample(
    path: str, trainer: dict[str, Any], setting: bool | None, actor: bool | None,
    critic: bool | None, fragment: str | None, tmp_path: Path,
) -> None:  # fmt: skip
    path = path if path == "embedded" else write_model(tmp_path / path, **HUGE)
    settings = config(
        model={"path": path},
        trainer=trainer,
        actor={"fsdp_config": {} if setting is None else {"reshard_after_forward": setting}},
    )
    fitted = fit_memory(settle(settings, CPU))
    for part, expected in ((fitted.config.actor, actor), (fitted.config.critic, critic)):
        assert part.fsdp_config.reshard_after_forward is expected
    sentences = (*fitted.lines, *memory_plan(settings, fitted, CPU).sentences)
    lines = [line for line in sentences if "gather" in line]
    assert len(lines) == 2 * bool(fragment) and all(fragment in line for line in lines if fragment)


def test_whole_weights_are_counted() -> None:
    """Of two ranks: in an annotation the layers of all models, in an update all gradients."""
    shape = replace(SHAPE, layers=5)

    def phases(reshard: bool) -> Any:
        part = {
            "fsdp_config": {"reshard_after_forward": reshard}, "ppo_max_token_len_per_gpu": 128,
        }  # fmt: skip
        settings = config(trainer=RANKS, actor=part, critic=part)
        (host,) = count(settings, ModelShapes(shape, shape, shape), CPU)
        return host.phases

    gathered, freed = phases(False), phases(True)
    layers = 4 * 3 * shape.layer  # three more than two, in float32
    models = 4 * shape.parameters()  # actor, critic and reference at once, not one of them
    assert gathered["annotation"] - freed["annotation"] == 2 * (layers + 2 * models)
    others = models // 2  # gradients of the other rank's half
    update = gathered["update of the actor"] - freed["update of the actor"]
    assert update == 2 * (layers + others)


def test_a_control_group_may_leave_less_than_the_machine_has(tmp_path: Path) -> None:
    gathered = host_memory(tmp_path)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.write_text("max\n")
    assert host_memory(tmp_path) == gathered
    limit.write_text(f"{GIB}\n")
    assert host_memory(tmp_path) == GIB
