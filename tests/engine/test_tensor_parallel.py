"""Which models can be split over tensor-parallel ranks, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from ppo_cli.engine.sharding.tensor_parallel import plan_tensor_parallel
from ppo_cli.errors import ModelError

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def plan(config: Any, size: int) -> dict[str, str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return plan_tensor_parallel(model, model.base_model, size)


def test_attention_and_mlp_are_split_and_the_rest_is_whole() -> None:
    styles = plan(Qwen2Config(**TINY, tie_word_embeddings=True), 2)
    assert styles.keys() == {
        f"layers.{layer}.{part}"
        for layer in (0, 1)
        for part in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    }  # fmt: skip
    assert styles["layers.1.self_attn.o_proj"] == "rowwise"


def test_norms_over_one_head_are_known() -> None:
    assert plan(Qwen3Config(**TINY), 2)["layers.0.self_attn.q_norm"] != ""


def test_a_norm_over_all_heads_is_not_split_as_one_over_a_head() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY))
        model.model.layers[1].self_attn.q_norm = type(model.model.norm)(32)
    with pytest.raises(ModelError, match=r"normalises all heads together \(layers\.1\.self_attn"):
        plan_tensor_parallel(model, model.base_model, 2)


def test_fused_projections_and_norms_over_all_heads_are_gathered() -> None:
    fused = plan(Phi3Config(**{k: v for k, v in TINY.items() if k != "head_dim"}), 2)
    assert fused["layers.0.self_attn.qkv_proj"] == "colwise_gather_output"
    assert plan(Olmo2Config(**TINY), 2)["layers.0.self_attn.q_proj"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("config", "size", "fragment"),
    [
        (LlamaConfig(**TINY), 3, "3 does not divide the 4 attention heads of this llama model"),
        (LlamaConfig(**TINY), 4, "4 does not divide the 2 key-value heads .* divisor of 2"),
        (
            LlamaConfig(**TINY | {"intermediate_size": 49}), 2,
            r"does not divide layers\.0\.mlp\.gate_proj \(49 x 32\)",
        ),
        (GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2), 2, "gpt2 model does not say"),
        (MixtralConfig(**TINY, num_local_experts=2), 2, "in a way that is not known here"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_in_a_sentence(
    config: Any, size: int, fragment: str
) -> None:
    with pytest.raises(ModelError, match=fragment) as caught:
        plan(config, size)
    assert f"--tensor_parallel_size {size}" in str(caught.value)
    assert "\n" not in str(caught.value)
