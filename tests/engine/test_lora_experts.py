"""LoRA on experts and routers: what is adapted, merged, published and read back by PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.run import Model
from ppo_cli.engine.export import write_model
from ppo_cli.engine.models.lora import (
    ADAPTER_WEIGHTS,
    LoRA,
    adapt,
    adapter_tensors,
    load_merged,
    merged_tensors,
    name_as_files,
    write_adapter_config,
)
from ppo_cli.errors import ModelError
from tests.engine.adapted_models import gathered, trained
from tests.engine.tiny_families import make_model, save_model

ALL = "all-linear"
EXPERTS = ["gate_up_proj", "down_proj"]
MIXED = {"mlp_only_layers": [0], "num_hidden_layers": 3}  # the first layer has no experts
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "mixtral": ("mixtral", ALL, {}),
    "mixtral, old names": ("mixtral", ["w1", "w2", "w3", "q_proj"], {}),
    "qwen2_moe": ("qwen2_moe", ALL, {}),
    "qwen2_moe, words": ("qwen2_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], {}),
    "qwen2_moe, experts": ("qwen2_moe", ["gate_up_proj", "experts.down_proj"], {}),
    "qwen3_moe": ("qwen3_moe", ALL, {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", ALL, MIXED),
    "qwen3_moe, words": ("qwen3_moe", ["q_proj", "gate_proj", "up_proj", "down_proj"], MIXED),
    "qwen3_moe, a layer": ("qwen3_moe", r".*layers\.1\..*(q_proj|down_proj)", {}),
    "qwen3_moe, router": ("qwen3_moe", "gate", {}),
    "qwen3_next": ("qwen3_next", ALL, {}),
    "olmoe": ("olmoe", ALL, {}),
    "granitemoe": ("granitemoe", ALL, {}),
    "granitemoe, experts": ("granitemoe", [*EXPERTS, "router", "q_proj"], {"attention_bias": True}),
    "gpt_oss": ("gpt_oss", ALL, {}),
    "gpt_oss, experts": ("gpt_oss", [*EXPERTS, "router"], {}),
    "gpt_oss, square": ("gpt_oss", EXPERTS, {"intermediate_size": 32}),
    "phimoe": ("phimoe", ALL, {}),
    "phimoe, router": ("phimoe", ["router", "down_proj"], {}),
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 40, 41, 200]])


def adapted(kind: str, expected: Any, changes: dict[str, Any]) -> Any:
    inject = adapt(Model(lora_rank=2, lora_alpha=6, target_modules=expected), 42)
    assert inject is not None
    model = make_model(kind, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return inject(model)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    results: Tensor = model(input_ids=IDS, use_cache=False).logits
    return results


def names_adapted(model: Any) -> set[str]:
    return {name.partition(".lora_")[0] for name, _ in adapter_tensors(model)}


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_have_the_names_of_the_model_and_its_logits(case: str) -> None:
    kind, expected, changes = CASES[case]
    model, base = trained(adapted(kind, expected, changes)), make_model(kind, **changes)
    tensors = dict(merged_tensors(model, gathered))
    assert list(tensors) == [name for name, _ in base.named_parameters()]
    plain = logits(base)
    base.load_state_dict(tensors, strict=False)
    torch.testing.assert_close(logits(base), logits(model), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, logits(model), atol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_peft_reads_the_adapter(case: str, tmp_path: Path) -> None:
    kind, expected, changes = CASES[case]
    model = trained(adapted(kind, expected, changes))
    tensors = {name: tensor.detach().clone() for name, tensor in adapter_tensors(model)}
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    write_adapter_config(tmp_path, model, save_model(tmp_path, kind, **changes))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")
        warnings.filterwarnings("error", ".*adapter keys")
        reference = PeftModel.from_pretrained(make_model(kind, **changes), str(tmp_path))
    assert torch.equal(logits(reference), logits(model))
    merged = load_merged(make_model(kind, **changes), tmp_path)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "leaves", "count"),
    [
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts", "base_layer"}, 14),
        ("qwen2_moe, words", {"q_proj", "gate_proj", "up_proj", "down_proj"}, 8),
        ("qwen2_moe, experts", {"experts", "base_layer"}, 4),
        ("qwen3_moe, a layer", {"q_proj", "experts"}, 2),
        (
            "qwen3_moe, words",
            {"q_proj", "gate_proj", "up_proj", "down_proj", "experts", "base_layer"},
            10,
        ),
        ("gpt_oss", {"q_proj", "k_proj", "v_proj", "o_proj"}, 8),
        ("phimoe", {"q_proj", "k_proj", "v_proj", "o_proj"}, 8),
        ("phimoe, router", {"router", "experts"}, 4),
    ],
)
def test_words_mean_what_they_mean_in_peft(case: str, leaves: set[str], count: int) -> None:
    """Of experts the outer wrapper goes by the name of their module, the inner is a base layer."""
    names = names_adapted(adapted(*CASES[case]))
    assert {name.rpartition(".")[2] for name in names} == leaves
    assert len(names) == count


@pytest.mark.parametrize(
    ("kind", "names"),
    [("gpt_oss", "(down_proj, gate_up_proj)"), ("mixtral", ""), ("mamba2", "leaves out_proj of")],
)
def test_what_all_linear_leaves_out_is_named(kind: str, names: str) -> None:
    notes: list[str] = []
    inject = adapt(Model(lora_rank=2), 42, notes.append)
    assert inject is not None
    inject(make_model(kind))
    assert len(notes) == bool(names)
    assert all(names in note for note in notes)


def test_half_of_a_fused_weight_is_refused() -> None:
    with pytest.raises(ModelError, match=r"gate_proj .* are one weight .*name up_proj as well"):
        adapted("olmoe", ["gate_proj", "q_proj"], {})


def test_gate_and_up_projection_have_a_rank_each() -> None:
    shapes = {n: tuple(t.shape) for n, t in adapter_tensors(adapted("olmoe", ALL, {}))}
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert shapes[f"{experts}.base_layer.lora_A.weight"] == (4 * 2 * 2, 32)
    assert shapes[f"{experts}.lora_A.weight"] == (4 * 2, 48)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_memory_is_counted_for_an_adapter_of_this_size(kind: str) -> None:
    model = adapted(kind, ALL, {})
    shape = Shape.from_config(model.config.to_dict())
    assert shape is not None
    size = sum(tensor.numel() for _, tensor in adapter_tensors(model))
    assert shape.adapter(2) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_vllm_gets_an_adapter_of_the_weights_in_the_files(case: str) -> None:
    """Added to each weight by its name, it gives the file of the merged one."""
    kind, expected, changes = CASES[case]
    model, base = trained(adapted(kind, expected, changes)), make_model(kind, **changes)
    before = revert_weight_conversion(base, dict(base.named_parameters()))
    after = revert_weight_conversion(base, dict(merged_tensors(model, gathered)))
    with torch.device("meta"):
        skeleton = type(base)(base.config)
    tensors = name_as_files(skeleton, dict(adapter_tensors(model)))
    owners = {key.partition(".lora_")[0] for key in tensors}
    files = {owner.removeprefix("base_model.model.") + ".weight" for owner in owners}
    if kind != "gpt_oss" and kind != "granitemoe":  # their files hold all experts in one
        assert files == {n for n, old in before.items() if not torch.equal(old, after[n])}
    for name in files & before.keys():
        a, b = (tensors[f"base_model.model.{name[:-7]}.lora_{x}.weight"] for x in "AB")
        torch.testing.assert_close(before[name] + 3.0 * b @ a, after[name], rtol=1e-5, atol=1e-5)


def test_vllm_holds_an_adapter_of_experts_in_twice_its_rank() -> None:
    ranks = [LoRA(rank, 1.0, fused).padded_rank() for rank, fused in ((5, False), (5, True))]
    assert ranks == [8, 16]
    with pytest.raises(ModelError, match="up to rank 512, not 600"):
        LoRA(300, 1.0, fused=True).padded_rank()


def test_an_export_has_the_tensors_of_its_bases_files(tmp_path: Path) -> None:
    model, base = trained(adapted("mixtral", ALL, {})), save_model(tmp_path, "mixtral")
    AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(base)
    for folder in ("adapter", "out"):
        (tmp_path / folder).mkdir()
    save_file(
        {name: tensor.detach().clone() for name, tensor in adapter_tensors(model)},
        tmp_path / "adapter" / ADAPTER_WEIGHTS,
    )
    write_adapter_config(tmp_path / "adapter", model, base)
    write_model(tmp_path / "adapter", tmp_path / "out")
    stored, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "out", Path(base))
    )
    assert stored.keys() == expected.keys()


def test_vllm_gets_stacked_experts_where_the_files_have_them() -> None:
    model = trained(adapted("gpt_oss", EXPERTS, {}))
    tensors = dict(adapter_tensors(model))
    results = name_as_files(make_model("gpt_oss"), tensors)
    assert results.keys() == tensors.keys()
    assert all(torch.equal(results[name], tensor) for name, tensor in tensors.items())
