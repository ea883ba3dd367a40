"""Tiny random models of the families that people train: small widths, all features on.

Every layer type appears, rows cross the sliding windows and chunks, soft caps and scalings differ
from 1, and norms, biases and sinks are moved off the values that they start from.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

IDS: dict[str, Any] = {
    "vocab_size": 282, "bos_token_id": None, "eos_token_id": 281, "pad_token_id": 279,
}  # fmt: skip
PLAIN: dict[str, Any] = IDS | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
SIZE = PLAIN | {"num_key_value_heads": 2}
HEADS = SIZE | {"head_dim": 16}
GPT = IDS | {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.1,
    "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
WINDOW = {"sliding_window": 8}
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
} | WINDOW
MIXED |= {"num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
# Random layers of this kind lose digits in float32; small weights and slow decay keep them.
LINEAR = {
    "initializer_range": 0.03,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8}
SCALED = {
    "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA3 = HEADS | MIXED | {"query_pre_attn_scalar": 24}
GEMMA3N = HEADS | MIXED | {
    "vocab_size_per_layer_input": 282, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    "final_logit_softcapping": 5.0,
}  # fmt: skip
GEMMA4 = HEADS | MIXED | {
    "final_logit_softcapping": 5.0, "vocab_size_per_layer_input": 282,
    "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
LLAMA4 = HEADS | LOCAL_EXPERTS | {
    "num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZE | {"attention_bias": True, "attention_dropout": 0.1},
    "qwen2": SIZE | {"attention_dropout": 0.1},
    "qwen2_moe": SIZE | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": HEADS | {"attention_bias": True},
    "qwen3_moe": HEADS | EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_next": HEADS | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": HEADS | LINEAR,
    "qwen3_5": {
        "text_config": HEADS | LINEAR, "vision_config": VISION | {"depth": 1, "num_heads": 2},
    },
    "qwen3_5_moe_text": HEADS | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32},
    "gemma": HEADS,
    "gemma2": HEADS | MIXED | CAPS | {"query_pre_attn_scalar": 24},
    "gemma3_text": GEMMA3,
    "gemma3": {"text_config": GEMMA3, "vision_config": VISION},
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4 | {
        "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    },
    "gemma4": {
        "text_config": GEMMA4 | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "attention_k_eq_v": True,
            "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        "vision_config": VISION | {"head_dim": 16, "num_key_value_heads": 2}, "audio_config": None,
    },
    "mistral": HEADS | WINDOW,
    "mixtral": SIZE | LOCAL_EXPERTS | {"router_jitter_noise": 0.1},
    "ministral": HEADS | MIXED,
    "ministral3": HEADS,
    "phi": PLAIN | {"qk_layernorm": True, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "phi3": SIZE | WINDOW | {"embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "phimoe": SIZE | LOCAL_EXPERTS | {"attention_bias": True, "lm_head_bias": True},
    "olmo": SIZE | {"clip_qkv": 0.5},
    "olmo2": SIZE,
    "olmo3": SIZE | MIXED,
    "olmo_hybrid": SIZE | LINEAR,
    "olmoe": SIZE | EXPERTS | {"clip_qkv": 0.5},
    "granite": SIZE | SCALED,
    "granitemoe": SIZE | SCALED | LOCAL_EXPERTS,
    "granitemoeshared": SIZE | SCALED | LOCAL_EXPERTS | {"shared_intermediate_size": 32},
    "granitemoehybrid": SIZE | SCALED | LOCAL_EXPERTS | MAMBA | {
        "shared_intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"],
    },
    "cohere": SIZE | {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": HEADS | MIXED | {"logit_scale": 0.3},
    "deepseek_v2": PLAIN | LATENT | ROUTED | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": PLAIN | LATENT | ROUTED,
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": HEADS | ROUTED | {"use_qk_norm": True, "attention_bias": True},
    "gpt2": GPT | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": GPT,
    "gpt_neo": IDS | {
        "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 512,
        "attention_dropout": 0.1, "initializer_range": 0.1,
    },
    "gpt_neox": PLAIN | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gptj": GPT | {"rotary_dim": 8},
    "opt": PLAIN | {"ffn_dim": 96, "word_embed_proj_dim": 48, "init_std": 0.1, "layerdrop": 0.2},
    "bloom": IDS | {
        "hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1,
        "initializer_range": 0.1,
    },
    "falcon": IDS | {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "new_decoder_architecture": True, "bias": True, "initializer_range": 0.1,
        "ffn_hidden_size": 96,
        "hidden_dropout": 0.1,
    },
    "falcon_h1": SIZE | MAMBA | {
        "mamba_d_ssm": 128, "lm_head_multiplier": 0.4, "embedding_multiplier": 3.0,
        "key_multiplier": 0.7,
        "mlp_multipliers": [0.8, 0.6], "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
        "attention_out_multiplier": 0.8, "ssm_out_multiplier": 0.6,
    },
    "falcon_mamba": IDS | {
        "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.1,
        "time_step_rank": 4,
    },
    "mamba": IDS | {
        "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "initializer_range": 0.1,
        "time_step_rank": 4,
    },
    "mamba2": IDS | {
        "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "initializer_range": 0.1,
        "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8,
    },
    "bamba": SIZE | MAMBA | {"attn_layer_indices": [1]},
    "jamba": SIZE | {
        "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "zamba2": SIZE | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 16, "n_mamba_heads": 8, "chunk_size": 8, "use_mamba_kernels": False,
        "mamba_ngroups": 1, "num_mem_blocks": 1, "use_shared_attention_adapter": True,
        "adapter_rank": 8,
    },
    "lfm2": SIZE | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": SIZE | EXPERTS | {
        "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3,
        "num_dense_layers": 1,
    },
    "nemotron": HEADS,
    "nemotron_h": HEADS | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "starcoder2": SIZE | WINDOW | {"residual_dropout": 0.1, "embedding_dropout": 0.1},
    "stablelm": SIZE | {"qk_layernorm": True, "use_qkv_bias": True, "hidden_dropout": 0.1},
    "smollm3": SIZE | {"no_rope_layers": [1, 0]},
    "exaone4": HEADS | MIXED,
    "ernie4_5": HEADS | {"use_bias": True},
    "ernie4_5_moe": SIZE | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1,
    },
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS | {"num_experts": 4, "moe_topk": 2},
    "minimax": HEADS | LOCAL_EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "block_size": 8,
        "linear_attn_alpha_factor": 1.5,
    },
    "minimax_m2": HEADS | LOCAL_EXPERTS,
    "gpt_oss": HEADS | MIXED | LOCAL_EXPERTS,
    "llama4_text": LLAMA4,
    "llama4": {
        "text_config": LLAMA4, "vision_config": VISION | {
            "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
    },
    "seed_oss": HEADS | {"residual_dropout": 0.1, "attention_dropout": 0.1},
    "helium": HEADS,
    "arcee": HEADS,
    "apertus": SIZE,
    "mpt": IDS | {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 512, "initializer_range": 0.1,
    },
    "codegen": GPT | {"rotary_dim": 8, "n_ctx": 512},
    "persimmon": PLAIN | {"hidden_dropout": 0.1},
    "dots1": SIZE | ROUTED,
    "bitnet": SIZE,
    "xglm": IDS | {
        "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4,
        "max_position_embeddings": 512,
        "init_std": 0.1, "layerdrop": 0.2,
    },
    "biogpt": PLAIN | {"layerdrop": 0.2},
    "recurrent_gemma": HEADS | {
        "num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 8, "logits_soft_cap": 5.0,
    },
    "nanochat": SIZE | {"final_logit_softcapping": 5.0},
    "vaultgemma": HEADS | MIXED | CAPS | {"query_pre_attn_scalar": 24},
}  # fmt: skip

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random model of a family in float32, on the CPU, with changes to its config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**FAMILIES[family] | changes)
    composite = "text_config" in FAMILIES[family]  # with a vision tower, as it is published
    builder = AutoModelForImageTextToText if composite else AutoModelForCausalLM
    model = builder.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() == 1:
                tensor.add_(noise * 0.1)
            elif tensor.std() < 1e-3:
                tensor.copy_(noise * 0.1)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("correction_bias", "expert_bias")) and not tensor.requires_grad:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
            # What random heads and decays make of a gradient, float32 alone would round away:
            # Gemma 4 does not divide by the root of the head size; gated delta rules forget fast.
            if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                tensor.mul_(0.3)
            elif "linear_attn" in name and name.endswith("A_log"):
                tensor.sub_(4)
            elif "linear_attn" in name and name.endswith("norm.weight"):
                tensor.mul_(0.3)
    return model.eval()


def write_model(family: str, folder: Path, tokenizer: Path) -> None:
    """Save a random model next to the files of a tokenizer of 282 tokens."""
    build_model(family).save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
