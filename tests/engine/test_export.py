"""One folder from the pieces of many ranks or from an adapter, read back and compared."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from ppo_cli.config.schema.run import Model
from ppo_cli.engine import export
from ppo_cli.engine.export import write_model
from ppo_cli.engine.export_check import compare_outputs, compute_outputs, limit_of_check
from ppo_cli.engine.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapt,
    adapter_tensors,
    merged_tensors,
    write_adapter_config,
)
from ppo_cli.errors import ModelError
from tests.rounding import allowed, assert_near

TINY = {
    "vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
TERMS = 7 * 32 * 2  # tokens, width, layers


def llama(**changes: Any) -> Any:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))
    model.generation_config.eos_token_id = [5, 7]
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS).logits
    return logits


def assert_same_model(actual: Any, expected: Any) -> None:
    """Every bit of the weights; what they compute may be rounded by where they lie in memory."""
    weights, expected_weights = actual.state_dict(), expected.state_dict()
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    dtype = next(expected.parameters()).dtype
    assert_near(logits(actual), logits(expected.eval()), terms=TERMS, dtype=dtype)


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A model in several files with an index, as ranks save theirs."""
    llama().save_pretrained(tmp_path / "actor", max_shard_size="20KB")
    assert len(list((tmp_path / "actor").glob("*.safetensors"))) > 2
    return tmp_path / "actor"


def save_adapter(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Save a base, and an adapter of it as a run saves it; returns the adapted model."""
    base, source = folder / "base", folder / "actor"
    llama().to(dtype).save_pretrained(base)
    inject = adapt(Model.model_validate({"lora_rank": 2, **settings}), 42)
    assert inject is not None
    model = inject(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    torch.manual_seed(7)
    for name, tensor in adapter_tensors(model):
        if "lora_B" in name:
            tensor.detach().normal_(std=0.3)
    source.mkdir()
    write_adapter_config(source, model, str(base), settings.get("quantization"))
    tensors = {name: t.detach().clone() for name, t in adapter_tensors(model)}
    save_file(tensors, source / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("in_pieces", [False, True])
def test_pieces_of_ranks_become_one_file(
    in_pieces: bool, pieces: Path, tmp_path: Path, out: Path, tokenizer: Any
) -> None:
    source = pieces if in_pieces else tmp_path / "one file"
    if not in_pieces:
        llama().save_pretrained(source)
    tokenizer.save_pretrained(source)
    (source / ".half-written").write_text("x")
    written = write_model(source, out)
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), llama())
    assert written.parameters == llama().num_parameters()
    assert written.files == ("model.safetensors",)
    assert written.bytes == (out / "model.safetensors").stat().st_size
    assert (written.dtype, written.base) == ("float32", None)
    assert names_in(out) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    tokenizer_again = AutoTokenizer.from_pretrained(out)
    assert tokenizer_again.chat_template == tokenizer.chat_template
    assert tokenizer_again("hello").input_ids == tokenizer("hello").input_ids
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [5, 7]


def test_a_large_model_gets_several_files(
    pieces: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    written = write_model(pieces, out)
    count = len(written.files)
    assert count > 2
    assert written.files[0] == f"model-00001-of-{count:05d}.safetensors"
    assert all((out / file).stat().st_size < 20_000 + 4096 for file in written.files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(written.files)
    assert index["metadata"]["total_parameters"] == written.parameters
    assert index["metadata"]["total_size"] == 4 * written.parameters
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), llama())


def test_a_cast_model_loads_in_its_dtype(pieces: Path, out: Path) -> None:
    assert write_model(pieces, out, dtype="bfloat16").dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_same_model(model, llama().to(torch.bfloat16))


def test_tied_weights_stay_tied(tmp_path: Path, out: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "actor", max_shard_size="20KB")
    assert write_model(tmp_path / "actor", out).parameters == model.num_parameters()
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), model)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_adapter_is_merged(dtype: str | None, tmp_path: Path, out: Path, tokenizer: Any) -> None:
    model = save_adapter(tmp_path, torch.bfloat16)
    tokenizer.save_pretrained(tmp_path / "actor")
    written = write_model(tmp_path / "actor", out, dtype=dtype)
    assert (written.dtype, written.base) == (dtype or "float32", str(tmp_path / "base"))
    assert written.parameters == llama().num_parameters()
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {p.dtype for p in exported.parameters()} == {getattr(torch, dtype or "float32")}
    weights = dict(exported.named_parameters())
    for name, tensor in merged_tensors(model, lambda t: t.detach().clone()):
        expected = tensor.to(weights[name].dtype)
        torch.testing.assert_close(weights[name], expected, atol=1e-6, rtol=1e-2 if dtype else 1e-6)
    atol = 0.1 if dtype else allowed(TERMS) * float(logits(model).abs().max())
    torch.testing.assert_close(logits(exported).float(), logits(model), atol=atol, rtol=0)
    assert not torch.allclose(logits(llama()), logits(model), atol=0.2)
    assert "adapter_config.json" not in names_in(out)
    assert {"generation_config.json", "chat_template.jinja", "tokenizer.json"} <= names_in(out)


def test_an_adapter_of_chosen_modules_and_scale(tmp_path: Path, out: Path) -> None:
    model = save_adapter(tmp_path, target_modules=("q_proj", "down_proj"), lora_alpha=5)
    with pytest.raises(ModelError, match="There is no tokenizer in"):
        write_model(tmp_path / "actor", out)
    (tmp_path / "actor" / "tokenizer_config.json").write_text("{}")
    write_model(tmp_path / "actor", out)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert_near(logits(exported), logits(model), terms=TERMS)


def test_the_tokenizer_of_the_base_fills_in(tmp_path: Path, out: Path, tokenizer: Any) -> None:
    save_adapter(tmp_path)
    tokenizer.save_pretrained(tmp_path / "base")
    write_model(tmp_path / "actor", out)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("changes", [{"hidden_size": 24}, {"num_hidden_layers": 1}])
def test_another_base_is_refused(changes: dict[str, int], tmp_path: Path, out: Path) -> None:
    save_adapter(tmp_path)
    llama(**changes).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"was not trained on .*other .*--base"):
        write_model(tmp_path / "actor", out, base=str(tmp_path / "other"))


@pytest.mark.parametrize("name", ["", "nobody/nothing"])
def test_a_base_that_nobody_has(name: str, tmp_path: Path, out: Path) -> None:
    save_adapter(tmp_path)
    file = tmp_path / "actor" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))
    with pytest.raises(ModelError, match="--base"):
        write_model(tmp_path / "actor", out)


def test_a_folder_that_computes_other_numbers_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0}
    llama(rope_parameters=rope, initializer_range=0.5).save_pretrained(tmp_path)
    expected = compute_outputs(llama(initializer_range=0.5).eval())  # of another base of RoPE
    with pytest.raises(ModelError, match="computes other log-probs"):
        compare_outputs(tmp_path, expected, expected, critic=False, trust_remote_code=False)


def test_a_large_model_is_not_compared_but_told() -> None:
    assert "more than 10 billion parameters" in limit_of_check(11_000_000_000)


@pytest.mark.parametrize("recorded", [None, "nf4"])
def test_an_adapter_of_a_base_in_4_bits_is_merged_into_what_was_trained(
    recorded: str | None, tmp_path: Path, out: Path, tokenizer: Any
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra quantised installs it")
    model = save_adapter(tmp_path, quantization="nf4")
    tokenizer.save_pretrained(tmp_path / "actor")
    if recorded:  # by the run alone: the adapter is older
        file = tmp_path / "actor" / ADAPTER_CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": None}))
    written = write_model(tmp_path / "actor", out, recorded=recorded)
    assert "rounded to nf4, as in training" in str(written.merged)
    assert_near(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model), terms=TERMS)


def test_a_base_that_is_quantised_on_the_disk_is_merged_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: Path
) -> None:
    save_adapter(tmp_path)
    base = SimpleNamespace(hf_quantizer=object())
    monkeypatch.setattr(export, "load_whole_model", lambda *_, **__: base)
    with pytest.raises(ModelError, match="leave --quantization out"):
        write_model(tmp_path / "actor", out, quantization="nf4")


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({"use_dora": True, "use_rslora": True, "bias": "all"}, False),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True),
        ({"trainable_token_indices": [5, 9]}, True),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of shared weights
def test_an_adapter_of_another_trainer_is_merged(
    settings: dict[str, Any], tied: bool, tmp_path: Path, out: Path, tokenizer: Any
) -> None:
    base, source = llama(tie_word_embeddings=tied, attention_bias=True), tmp_path / "actor"
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    grows = "modules_to_save" in settings and not tied
    if grows:  # tokens were added
        base.resize_token_embeddings(270)
    settings = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **settings}
    model = get_peft_model(base, LoraConfig(r=2, **settings)).eval()
    for tensor in model.parameters():
        tensor.detach().add_(torch.randn_like(tensor) * 0.1 * tensor.requires_grad)
    model.save_pretrained(source)
    written = write_model(source, out)
    assert "--quantization" in str(written.merged)  # the adapter does not say
    assert_near(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model), terms=TERMS)
    assert "README.md" not in names_in(out)  # the adapter's


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
)
def test_an_adapter_that_is_no_policy_is_refused(
    config: Any, tmp_path: Path, out: Path, tokenizer: Any
) -> None:
    llama().save_pretrained(tmp_path / "base")
    kind = AutoModelForSequenceClassification if config.task_type == "SEQ_CLS" else None
    base = (kind or AutoModelForCausalLM).from_pretrained(tmp_path / "base")
    get_peft_model(base, config).save_pretrained(tmp_path / "actor")
    with pytest.raises(ModelError, match=f"{config.task_type if kind else config.peft_type.value}"):
        write_model(tmp_path / "actor", out)


@pytest.mark.parametrize("damage", ["missing file", "cut file", "no files"])
def test_damage_is_named(damage: str, pieces: Path, out: Path) -> None:
    first, second, *others = sorted(pieces.glob("*.safetensors"))
    if damage == "cut file":
        second.write_bytes(second.read_bytes()[:-100])
    for file in {"missing file": [second], "no files": [first, second, *others]}.get(damage, ()):
        file.unlink()
    expected = "model.safetensors is missing" if damage == "no files" else second.name
    with pytest.raises(ModelError, match=expected):
        write_model(pieces, out)
