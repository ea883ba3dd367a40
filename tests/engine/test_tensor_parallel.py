"""Which models can be split over tensor-parallel ranks, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.engine.sharding.tensor_parallel import plan_tensor_parallel
from ppo_cli.errors import ModelError

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def build(kind: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**TINY | changes))


def plan(model: Any, size: int = 2) -> dict[str, str]:
    return plan_tensor_parallel(model, model.base_model, size)


def test_attention_and_mlp_are_split_and_the_rest_is_whole() -> None:
    styles = plan(build("qwen2", tie_word_embeddings=True))
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
    assert plan(build("qwen3", head_dim=8))["layers.0.self_attn.q_norm"] != ""


def test_a_norm_over_all_heads_is_not_split_as_one_over_a_head() -> None:
    model = build("qwen3", head_dim=8)
    model.model.layers[1].self_attn.q_norm = type(model.model.norm)(32)
    with pytest.raises(ModelError, match=r"normalises all heads together \(layers\.1\.self_attn"):
        plan(model)


def test_fused_projections_and_norms_over_all_heads_are_gathered() -> None:
    assert plan(build("phi3"))["layers.0.self_attn.qkv_proj"] == "colwise_gather_output"
    assert plan(build("olmo2"))["layers.0.self_attn.q_proj"] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("kind", "changes", "size", "message"),
    [
        ("llama", {}, 3, "3 does not divide the 4 attention heads of this llama model"),
        ("llama", {}, 4, "4 does not divide the 2 key-value heads .* divisor of 2"),
        ("llama", {"intermediate_size": 49}, 2, r"divide layers\.0\.mlp\.gate_proj \(49 x 32\)"),
        ("gpt2", {}, 2, "gpt2 model does not say"),
        ("mixtral", {"num_local_experts": 2}, 2, "in a way that is not known here"),
    ],
)
def test_what_cannot_be_split_is_refused_in_a_sentence(
    kind: str, changes: dict[str, Any], size: int, message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        plan(build(kind, **changes), size)
    assert f"--tensor_parallel_size {size}" in str(caught.value)
    assert "\n" not in str(caught.value)
