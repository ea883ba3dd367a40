"""Models that load, and models that do not, each in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from ppo_cli.engine.models import (
    OwnHead,
    load_policy,
    stop_token_ids,
)
from ppo_cli.engine.value_models import load_value_model
from ppo_cli.errors import ModelError

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


OUTPUTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "cap": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 2.0}),
    "scale": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.0625}),
    "division": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 8.0}),
    "projection": (OPTForCausalLM, OPTConfig, {"ffn_dim": 32, "word_embed_proj_dim": 8}),
    "no prefix": (Llama4ForCausalLM, Llama4TextConfig, {"num_local_experts": 2}),
    "plain": (LlamaForCausalLM, LlamaConfig, {}),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_backbone_and_head_give_the_models_own_logits(name: str, tmp_path: Path) -> None:
    """With gradients; a model without weights, as ranks build it, chooses the same head."""
    model_class, config_class, options = OUTPUTS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**TINY, **options))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.randint(1, 60, (2, 7))
    results = []
    for logits in (policy.head(policy.hidden_BLH(ids)), policy.model(input_ids=ids).logits):
        policy.model.zero_grad()
        logits.square().sum().backward()
        gradient = policy.model.get_input_embeddings().weight.grad.clone()
        results.append((logits.detach(), gradient))
    torch.testing.assert_close(*results)
    changed = name in ("cap", "scale", "division")
    for other in (policy, load_policy(str(tmp_path), empty=True)):
        assert isinstance(other.head, OwnHead) == changed


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        load_policy(str(tmp_path))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the weight file of a model after `change` has edited its tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def wrap(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"module.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight)"),
        (lambda t: t.pop("model.norm.weight"), "missing tensors: model.norm.weight)"),
        (wrap, "(unexpected tensors: module.lm_head.weight, "),
        (lambda t: t.update(other=torch.zeros(1)), "unexpected tensors: other)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8)}),
            "tensors of another shape: model.norm.weight [8] instead of [16])",
        ),
    ],
    ids=["no head", "no norm", "wrapped", "one too many", "another shape"],
)
def test_weights_that_do_not_fit_the_config_are_named(
    change: Callable[[dict[str, Tensor]], object], named: str, tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(ModelError, match=re.escape(named)):
        load_policy(str(tmp_path))
    with nullcontext() if "lm_head.weight)" in named else pytest.raises(ModelError):
        load_value_model(str(tmp_path))


def test_an_expert_that_the_files_lack_is_named(tmp_path: Path) -> None:
    MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2)).save_pretrained(tmp_path)

    def lose(tensors: dict[str, Tensor]) -> None:  # of both layers, so that the headers agree
        for layer in range(2):
            tensors.pop(f"model.layers.{layer}.block_sparse_moe.experts.1.w1.weight")

    change_weights(tmp_path, lose)
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.experts.gate_up_proj"):
        load_policy(str(tmp_path))


def test_buffers_that_older_versions_saved_are_no_weights(tmp_path: Path) -> None:
    GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=64, hidden_size=16, num_layers=1, num_heads=2,
            attention_types=[[["global"], 1]],
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    attention = "transformer.h.0.attn.attention"
    masks = {f"{attention}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
             f"{attention}.masked_bias": torch.tensor(-1e9)}  # fmt: skip
    change_weights(tmp_path, lambda t: t.update(masks))
    load_policy(str(tmp_path), attn_implementation="eager")


def test_weights_saved_in_bfloat16_are_trained_in_float32(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(str(tmp_path)).model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_value_model(str(tmp_path)).model.parameters()} == {torch.float32}


def test_a_hub_name_without_a_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing could not be loaded.*--model"):
        load_policy("nobody/nothing")


def test_all_stop_tokens_count() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.generation_config.eos_token_id = [5, 6]

    class Tokenizer:
        eos_token_id = 2

    assert stop_token_ids(model, Tokenizer()) == {2, 5, 6}
