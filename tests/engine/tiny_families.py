"""Tiny random models of many families, with the vocabulary of the embedded tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZE = {
    "vocab_size": 282, "bos_token_id": None, "eos_token_id": 281, "pad_token_id": 279,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MOE = EXPERTS | {"moe_intermediate_size": 24, "head_dim": 8, "mlp_only_layers": []}
# Windows that rows of tests reach beyond, in every other layer.
WINDOWS = {
    "head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.2},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "cohere2": WINDOWS | {"logit_scale": 0.5},
    "olmo2": {},
    "granite": {
        "logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},  # three dropouts of 0.1
    "opt": {"layerdrop": 0.5, "dropout": 0.1, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {
        "pad_token_id": 1,
        "layerdrop": 0.5, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4,
    },
    "mixtral": EXPERTS | {"router_jitter_noise": 0.3},
    "phimoe": EXPERTS,  # jitter of 0.01, and experts drawn at random
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24, "qkv_bias": True},
    "qwen3_moe": MOE,
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "gpt_oss": EXPERTS | {"head_dim": 8},
    "gemma4_text": {
        "num_hidden_layers": 3, "num_kv_shared_layers": 1, "head_dim": 8, "attention_dropout": 0.2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "vocab_size_per_layer_input": 282, "hidden_size_per_layer_input": 8,
    },
    "qwen3_next": MOE | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 24,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 4, "chunk_size": 8},
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2,
        "mamba_d_state": 4,
    },
    "granitemoehybrid": EXPERTS | {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 4, "shared_intermediate_size": 24,
    },
    "falcon_mamba": {"state_size": 4},
}  # fmt: skip


def make_model(kind: str, **changes: Any) -> Any:
    """A random model in evaluation mode, whose norms and biases are not all ones and zeros."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZE, **FAMILIES.get(kind, {}), **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += torch.randn(tensor.shape) * 0.1
    return model.eval()


def save_model(folder: Path, kind: str, **changes: Any) -> str:
    """Write such a model into a folder; returns its path."""
    make_model(kind, **changes).save_pretrained(folder / kind)
    return str(folder / kind)
