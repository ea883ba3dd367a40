"""What leaves an adapted model: merged weights, files that PEFT reads, tensors for samplers."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.core_model_loading import revert_weight_conversion

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.shape import Shape
from ppo_cli.config.schema.run import Model
from ppo_cli.engine.export import write_model
from ppo_cli.engine.models import load_policy, lora
from ppo_cli.errors import ModelError
from tests.engine import adapted_models as tiny
from tests.marks import quick_only

EXPERTS = ["gate_up_proj", "down_proj"]
WORDS = ["q_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MIXED = {"mlp_only_layers": [0], "num_hidden_layers": 3}  # the first layer has no experts
WITH_EXPERTS = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "granitemoe", "gpt_oss", "phimoe",
)  # fmt: skip
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{kind: (kind, tiny.ALL, {}) for kind in (*tiny.FAMILIES, *WITH_EXPERTS)},
    "mixtral, old names": ("mixtral", ["w1", "w2", "w3", "q_proj"], {}),
    "qwen2_moe, words": ("qwen2_moe", WORDS, {}),
    "qwen2_moe, experts": ("qwen2_moe", ["gate_up_proj", "experts.down_proj"], {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", tiny.ALL, MIXED),
    "qwen3_moe, words": ("qwen3_moe", WORDS, MIXED),
    "qwen3_moe, a layer": ("qwen3_moe", r".*layers\.1\..*(q_proj|down_proj)", {}),
    "qwen3_moe, router": ("qwen3_moe", "gate", {}),
    "granitemoe, experts": ("granitemoe", [*EXPERTS, "router", "q_proj"], {"attention_bias": True}),
    "gpt_oss, experts": ("gpt_oss", [*EXPERTS, "router"], {}),
    "gpt_oss, square": ("gpt_oss", EXPERTS, {"intermediate_size": 32}),
    "phimoe, router": ("phimoe", ["router", "down_proj"], {}),
}  # fmt: skip


def make_pair(case: str) -> tuple[Any, Any]:
    """A model with a trained adapter, and its base."""
    kind, targets, changes = CASES[case]
    return tiny.trained(tiny.adapted(kind, targets, **changes)), tiny.base(kind, **changes)


@pytest.mark.parametrize(
    "case", quick_only(CASES, *tiny.FAMILIES, "mixtral", "qwen2_moe, experts", "gpt_oss, experts")
)
def test_merged_weights_have_the_names_of_the_model_and_its_logits(case: str) -> None:
    model, plain = make_pair(case)
    before = copy.deepcopy(model.state_dict())
    tensors = dict(lora.merged_tensors(model, tiny.gathered))
    assert list(tensors) == [name for name, _ in plain.named_parameters()]
    assert not torch.allclose(tiny.logits(plain), tiny.logits(model), atol=1e-2)
    plain.load_state_dict(tensors, strict=False)
    torch.testing.assert_close(tiny.logits(plain), tiny.logits(model), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_merging_asks_for_whole_tensors_in_one_order() -> None:
    def requests(model: Any) -> list[torch.Size]:
        seen: list[torch.Size] = []

        def full(tensor: Tensor) -> Tensor:
            seen.append(tensor.shape)
            return tiny.gathered(tensor)

        list(lora.merged_tensors(model, full))
        return seen

    model = tiny.adapted()
    assert requests(model) == requests(tiny.trained(tiny.adapted()))
    assert len(requests(model)) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("other", "report"),
    [
        ({"rank": 4}, r"is \(4, "),
        ({"targets": ("q_proj",)}, "model.target_modules must be"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(other: dict[str, Any], report: str) -> None:
    with pytest.raises(ModelError, match=report):
        lora.load_adapter(
            tiny.adapted(), dict(lora.adapter_tensors(tiny.inject(tiny.base(), **other)))
        )


# Quick are a dense model, transposed weights, and experts in each of their forms.
@pytest.mark.parametrize(
    "case", quick_only(CASES, "llama", "gpt2", "mixtral", "qwen2_moe, experts", "gpt_oss, experts")
)
def test_peft_reads_what_is_saved(case: str, tmp_path: Path) -> None:
    model, plain = make_pair(case)
    folder, base = tmp_path / "adapter", tmp_path / "base"
    plain.save_pretrained(base)
    tiny.save_adapter(model, folder, base)
    report = json.loads((folder / "adapter_config.json").read_text())
    assert report["base_model_name_or_path"] == str(base)
    assert report["target_modules"] == sorted(report["target_modules"])
    assert (report["r"], report["lora_alpha"], report["lora_dropout"]) == (3, 6, 0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*_pattern keys did not match")
        warnings.filterwarnings("error", ".*adapter keys")
        reference = PeftModel.from_pretrained(plain, str(folder))
    assert torch.equal(tiny.logits(reference), tiny.logits(model))
    merged = lora.load_adapted(make_pair(case)[1], folder).merge_and_unload()
    torch.testing.assert_close(tiny.logits(merged), tiny.logits(model), rtol=1e-4, atol=1e-4)


def test_a_loaded_policy_keeps_its_split(tmp_path: Path) -> None:
    tiny.base("gemma2").save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    assert tiny.inject(policy.model) is policy.model
    tiny.trained(policy.model)
    torch.testing.assert_close(policy.head(policy.hidden_BLH(tiny.IDS)), tiny.logits(policy.model))


@pytest.mark.parametrize(
    ("kind", "targets", "changes", "leaves", "count"),
    [
        ("llama", ("q_proj", "v_proj"), {}, {"q_proj", "v_proj"}, 4),
        ("llama", "q_proj", {}, {"q_proj"}, 2),
        ("llama", r".*\.(up|down)_proj", {}, {"up_proj", "down_proj"}, 4),
        ("llama", "All-Linear", {}, {*ATTENTION, *WORDS}, 14),
        ("llama", ("self_attn.o_proj",), {}, {"o_proj"}, 2),
        (*CASES["mixtral"], {*ATTENTION, "gate", "experts", "base_layer"}, 14),
        (*CASES["qwen2_moe, words"], {*WORDS}, 8),
        (*CASES["qwen2_moe, experts"], {"experts", "base_layer"}, 4),
        (*CASES["qwen3_moe, a layer"], {"q_proj", "experts"}, 2),
        (*CASES["qwen3_moe, words"], {*WORDS, "experts", "base_layer"}, 10),
        (*CASES["gpt_oss"], ATTENTION, 8),
        (*CASES["phimoe"], ATTENTION, 8),
        (*CASES["phimoe, router"], {"router", "experts"}, 4),
    ],
)
def test_target_modules_mean_what_they_mean_in_peft(
    kind: str, targets: Any, changes: dict[str, Any], leaves: set[str], count: int
) -> None:
    """Of experts the outer wrapper goes by the name of their module, the inner is a base layer."""
    tensors = lora.adapter_tensors(tiny.adapted(kind, targets, **changes))
    names = {name.partition(".lora_")[0] for name, _ in tensors}
    assert {name.rpartition(".")[2] for name in names} == leaves
    assert len(names) == count


@pytest.mark.parametrize(
    ("kind", "targets", "report"),
    [
        ("llama", "q_porj", "no module 'q_porj'. Did you mean 'q_proj'?"),
        ("llama", ("q_proj", "v_prj"), "no module 'v_prj'. Did you mean 'v_proj'?"),
        ("llama", "q_proj,v_proj", "A list is written [a,b]."),
        ("llama", "*_proj", "is neither the name of a module nor a pattern"),
        ("llama", "lm_head", "lm_head, which LoRA cannot adapt. It adapts the linear"),
        ("llama", ("embed_tokens",), "embed_tokens, which LoRA cannot adapt"),
        ("llama", ("self_attn",), "output layer, here: down_proj, gate_proj"),
        ("llama", ".*", "which LoRA cannot adapt"),
        ("llama", (), "model.target_modules is empty"),
        ("olmoe", ["gate_proj", "q_proj"], "name up_proj as well"),  # half of a fused weight
    ],
)
def test_target_modules_that_fit_nothing(kind: str, targets: Any, report: str) -> None:
    with pytest.raises(ModelError) as error:
        tiny.adapted(kind, targets)
    assert report in str(error.value) and "model.target_modules" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("gpt_oss", "(down_proj, gate_up_proj)"), ("mixtral", ""), ("mamba2", "leaves out_proj of")],
)
def test_what_all_linear_leaves_out_is_named(kind: str, names: str) -> None:
    notes: list[str] = []
    put_in = lora.adapt(Model(lora_rank=2), 42, notes.append)
    assert put_in is not None
    put_in(tiny.base(kind))
    assert len(notes) == bool(names)
    assert all(names in note for note in notes)


def test_gate_and_up_projection_have_a_rank_each() -> None:
    shapes = {n: tuple(t.shape) for n, t in lora.adapter_tensors(tiny.adapted("olmoe"))}
    experts = "base_model.model.model.layers.0.mlp.experts"
    assert shapes[f"{experts}.base_layer.lora_A.weight"] == (4 * 2 * 3, 32)
    assert shapes[f"{experts}.lora_A.weight"] == (4 * 3, 48)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_memory_is_counted_for_an_adapter_of_this_size(kind: str) -> None:
    model = tiny.adapted(kind)
    shape = Shape.from_config(model.config.to_dict())
    assert shape is not None
    size = sum(tensor.numel() for _, tensor in lora.adapter_tensors(model))
    assert shape.adapter(3) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("case", CASES)
def test_vllm_gets_an_adapter_of_the_weights_in_the_files(case: str) -> None:
    """Added to each weight by its name, it gives the file of the merged one."""
    model, plain = make_pair(case)
    before = revert_weight_conversion(plain, dict(plain.named_parameters()))
    after = revert_weight_conversion(plain, dict(lora.merged_tensors(model, tiny.gathered)))
    with torch.device("meta"):
        skeleton = type(plain)(plain.config)
    tensors = lora.name_as_files(skeleton, dict(lora.adapter_tensors(model)))
    owners = {key.partition(".lora_")[0] for key in tensors}
    files = {owner.removeprefix("base_model.model.") + ".weight" for owner in owners}
    if CASES[case][0] not in ("gpt_oss", "granitemoe"):  # their files hold all experts in one
        assert files == {n for n, old in before.items() if not torch.equal(old, after[n])}
    for name in files & before.keys():
        a, b = (tensors[f"base_model.model.{name[:-7]}.lora_{x}.weight"] for x in "AB")
        product = (b @ a).T if CASES[case][0] == "gpt2" else b @ a
        torch.testing.assert_close(before[name] + 2.0 * product, after[name], rtol=1e-5, atol=1e-5)


def test_vllm_gets_stacked_experts_where_the_files_have_them() -> None:
    tensors = dict(lora.adapter_tensors(tiny.trained(tiny.adapted("gpt_oss", EXPERTS))))
    results = lora.name_as_files(tiny.base("gpt_oss"), tensors)
    assert results.keys() == tensors.keys()
    assert all(torch.equal(results[name], tensor) for name, tensor in tensors.items())


def test_vllm_pads_an_adapter_to_a_rank_that_it_has() -> None:
    """That of experts has twice the rank."""
    assert [lora.LoRA(rank, 16).padded_rank() for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    assert lora.LoRA(5, 1.0, fused=True).padded_rank() == 16
    for adapter, rank in ((lora.LoRA(513, 16), 513), (lora.LoRA(300, 1.0, fused=True), 600)):
        with pytest.raises(ModelError, match=f"up to rank 512, not {rank}.*lora_merge"):
            adapter.padded_rank()


def test_an_export_has_the_tensors_of_its_bases_files(tmp_path: Path) -> None:
    model, plain = make_pair("mixtral")
    plain.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(model_folder("embedded")).save_pretrained(tmp_path / "base")
    tiny.save_adapter(model, tmp_path / "adapter", tmp_path / "base")
    (tmp_path / "out").mkdir()
    write_model(tmp_path / "adapter", tmp_path / "out")
    stored, expected = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "base"))
    assert stored.keys() == expected.keys()
