"""Which attention computes what the models of a family compute, by `model_type`.

`scripts/sweep_models.py` trains each family in this way and compares it with transformers in eager
attention, row by row (docs/models.md). A family that is not listed gets eager attention and padded
rows: slower, and exact everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Exact in sdpa, and on packed rows where no layer has a window or chunks.
PACKED = {
    "apertus", "arcee", "biogpt", "bitnet", "cohere", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "nanochat",
    "nemotron", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip
# Exact in sdpa on padded rows.
SDPA = PACKED | {
    "bamba", "cohere2", "exaone4", "falcon", "falcon_h1", "gemma3", "gemma3_text",
    "gemma3n_text", "gemma4", "gemma4_text", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe",
    "llama4", "llama4_text", "minimax", "ministral", "nemotron_h", "olmo3", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zamba2",
}  # fmt: skip
# Exact on packed rows by masks over all tokens, which cost more than padding: only if asked for.
MASKED = {
    "codegen", "cohere2", "exaone4", "gemma2", "gemma3", "gemma3_text", "gemma3n_text",
    "gemma4", "gemma4_text", "gpt_neo", "gptj", "ministral", "mistral", "olmo3", "phi3",
    "starcoder2", "vaultgemma",
}  # fmt: skip


def is_plain(config: Mapping[str, Any]) -> bool | None:
    """Whether in every layer each token attends to all tokens before it; None if unknown.

    `config` is the text part of a config.json: a family may ignore a window that it names.
    """
    if kinds := set(config.get("layer_types") or ()):
        return kinds == {"full_attention"}
    return None if config.get("sliding_window") or config.get("attention_chunk_size") else True
