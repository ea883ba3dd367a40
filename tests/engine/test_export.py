"""One folder from the pieces of many ranks or from an adapter, read back and compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo_cli.config.schema.run import Model
from ppo_cli.engine import export
from ppo_cli.engine.export import write_model
from ppo_cli.engine.models.lora import (
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
    actual_weights, expected_weights = actual.state_dict(), expected.state_dict()
    assert actual_weights.keys() == expected_weights.keys()
    assert [
        name
        for name in actual_weights
        if not torch.equal(actual_weights[name], expected_weights[name])
    ] == []
    dtype = next(expected.parameters()).dtype
    assert_near(logits(actual), logits(expected.eval()), terms=TERMS, dtype=dtype)


def save_in_pieces(model: Any, folder: Path, ranks: int) -> None:
    """As many ranks save: each some whole tensors, in a file of its own, and an index."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for rank in range(ranks):
        file = f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        share = {name: t for i, (name, t) in enumerate(tensors.items()) if i % ranks == rank}
        save_file(share, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(share, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """An adapter as a run saves it; returns the adapted model."""
    inject = adapt(Model.model_validate({"lora_rank": 2, **settings}), 42)
    assert inject is not None
    model = inject(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    torch.manual_seed(7)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(std=0.3)
    folder.mkdir(parents=True)
    write_adapter_config(folder, model, str(base))
    tensors = {name: t.detach().clone() for name, t in adapter_tensors(model)}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return model


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_pieces_of_ranks_become_one_file(
    ranks: int, tmp_path: Path, out: Path, tokenizer: Any
) -> None:
    source = tmp_path / "actor"
    save_in_pieces(llama(), source, ranks)
    tokenizer.save_pretrained(source)
    (source / ".half-written").write_text("x")
    written = write_model(source, out)
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), llama())
    assert written.parameters == sum(p.numel() for p in llama().parameters())
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
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 20_000)
    source = tmp_path / "actor"
    save_in_pieces(llama(), source, 2)
    written = write_model(source, out)
    count = len(written.files)
    assert count > 2
    assert written.files[0] == f"model-00001-of-{count:05d}.safetensors"
    assert all((out / file).stat().st_size < 20_000 + 4096 for file in written.files)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(written.files)
    assert index["metadata"]["total_parameters"] == written.parameters
    assert index["metadata"]["total_size"] == 4 * written.parameters
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), llama())


def test_a_cast_model_loads_in_its_dtype(tmp_path: Path, out: Path) -> None:
    source = tmp_path / "actor"
    save_in_pieces(llama(), source, 2)
    written = write_model(source, out, dtype="bfloat16")
    assert written.dtype == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_same_model(model, llama().to(torch.bfloat16))


def test_tied_weights_stay_tied(tmp_path: Path, out: Path) -> None:
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True))
    save_in_pieces(model, tmp_path / "actor", 2)
    written = write_model(tmp_path / "actor", out)
    assert written.parameters == model.num_parameters()
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert_same_model(AutoModelForCausalLM.from_pretrained(out), model)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_adapter_is_merged(dtype: str | None, tmp_path: Path, out: Path, tokenizer: Any) -> None:
    base, source = tmp_path / "base", tmp_path / "actor"
    llama().to(torch.bfloat16).save_pretrained(base)
    model = save_adapter(base, source)
    tokenizer.save_pretrained(source)
    written = write_model(source, out, dtype=dtype)
    assert written.dtype == (dtype or "float32")
    assert written.base == str(base)
    assert written.parameters == sum(p.numel() for p in llama().parameters())
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
    base = tmp_path / "base"
    llama().save_pretrained(base)
    model = save_adapter(
        base, tmp_path / "actor", target_modules=("q_proj", "down_proj"), lora_alpha=5
    )
    with pytest.raises(ModelError, match="There is no tokenizer in"):
        write_model(tmp_path / "actor", out)
    (tmp_path / "actor" / "tokenizer_config.json").write_text("{}")
    write_model(tmp_path / "actor", out)
    exported = AutoModelForCausalLM.from_pretrained(out)
    assert_near(logits(exported), logits(model), terms=TERMS)


def test_the_tokenizer_of_the_base_fills_in(tmp_path: Path, out: Path, tokenizer: Any) -> None:
    llama().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "actor")
    write_model(tmp_path / "actor", out)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("changes", [{"hidden_size": 24}, {"num_hidden_layers": 1}])
def test_another_base_is_refused(changes: dict[str, int], tmp_path: Path, out: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "actor")
    llama(**changes).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"was not trained on .*other .*--base"):
        write_model(tmp_path / "actor", out, base=str(tmp_path / "other"))


@pytest.mark.parametrize("name", ["", "nobody/nothing"])
def test_a_base_that_nobody_has(name: str, tmp_path: Path, out: Path) -> None:
    llama().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "base", tmp_path / "actor")
    file = tmp_path / "actor" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": name}))
    with pytest.raises(ModelError, match="--base"):
        write_model(tmp_path / "actor", out)


@pytest.mark.parametrize("harm", ["missing file", "cut file", "nothing"])
def test_damage_is_named(harm: str, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "actor"
    save_in_pieces(llama(), source, 2)
    second = source / "model-00002-of-00002.safetensors"
    if harm == "missing file":
        second.unlink()
    elif harm == "cut file":
        second.write_bytes(second.read_bytes()[:-100])
    else:
        second.unlink()
        (source / "model-00001-of-00002.safetensors").unlink()
    fragment = "model.safetensors is missing" if harm == "nothing" else second.name
    with pytest.raises(ModelError, match=fragment):
        write_model(source, out)
    shutil.rmtree(source)
