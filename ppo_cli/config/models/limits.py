"""Limits of a model according to its config.json: length of rows, attention kernels. No torch.

Position tables have an end. Two kinds of rotary positions depend on the longest row of a batch:
longrope changes its factors above a length, dynamic NTK its base with each length. Up to that
length a row has the same positions alone and in a batch. Other kinds (linear, yarn, llama3,
proportional, ALiBi) do not depend on the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from ppo_cli.config.models.weight_files import text_config
from ppo_cli.errors import ModelError

# Field of config.json with the size of a position table -> model types that have one, whether
# learned, sinusoidal, rotary (GPT-J, CodeGen) or ALiBi (MPT). Each was tried on transformers 5.19.
POSITION_TABLES: Final = {
    "n_positions": ("codegen", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"),
    "max_seq_len": ("mpt",),
    "max_target_positions": ("whisper",),
    "max_position_embeddings": (
        "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot",
        "blenderbot-small", "camembert", "data2vec-text", "electra", "ernie", "git", "gpt_neo",
        "marian", "mbart", "megatron-bert", "mvp", "opt", "pegasus", "plbart", "prophetnet",
        "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr",
        "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
}  # fmt: skip
# Positions of these start after pad_token_id: the first entries of their table are never used.
_BEHIND_PADDING: Final = (
    "camembert", "data2vec-text", "prophetnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
# In these every kind of rotary positions except "default" is longrope.
_PHI: Final = ("phi3", "phi4_multimodal", "phimoe")
# transformers has no sdpa for these, or they have attention sinks, which sdpa cannot compute.
_EAGER_ONLY: Final = (
    "big_bird", "bigbird_pegasus", "bloom", "codegen", "cpmant", "deepseek_v4", "falcon_mamba",
    "git", "got_ocr2", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa",
    "granitemoe_swa", "hy_v4", "mamba", "mamba2", "megatron-bert", "mimo_v2_flash", "mpt", "mvp",
    "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "rwkv", "trocr", "xglm", "xlm",
    "xlnet", "xlstm",
)  # fmt: skip
_SOFT_CAPPED: Final = ("gemma2", "vaultgemma")  # soft caps of scores, which sdpa ignores
_FLOOR_SCALE: Final = 8192  # Llama 4's default
ORIGINAL: Final = "original_max_position_embeddings"
_PHI_ORIGINAL: Final = 4096  # default of phi3 and phi4_multimodal


class RowLengths(Protocol):
    """How long a prompt and its response may be, in tokens: the section `data` of the settings."""

    @property
    def max_prompt_length(self) -> int:
        """Of a prompt."""

    @property
    def max_response_length(self) -> int:
        """Of a response."""


def encoder_problem(config: Mapping[str, Any], path: str, flag: str) -> str:
    """Explain that a model has an encoder and cannot be trained; "" for decoders."""
    if config.get("is_encoder_decoder") is not True:
        return ""
    return (
        f"{path} is a {config.get('model_type')} model with an encoder (is_encoder_decoder): name "
        f"a decoder-only language model with {flag}."
    )


def attention_problem(config: Mapping[str, Any], path: str, kernel: str | None) -> str:
    """Explain that a model cannot use the attention kernel `kernel`; "" if it can."""
    return (
        describe_eager_only(path) if kernel == "sdpa" and needs_eager(text_config(config)) else ""
    )


def needs_eager(text: Mapping[str, Any]) -> bool:
    """Whether sdpa cannot compute a model's attention, according to its `text_config`."""
    kind = text.get("model_type")
    capped = kind in _SOFT_CAPPED and text.get("attn_logit_softcapping", True) is not None
    return kind in _EAGER_ONLY or capped


def describe_eager_only(path: str) -> str:
    """Return the message that a model needs the eager attention kernel."""
    return f"The attention of {path} needs the eager kernel: set model.attn_implementation=eager."


def length_problem(config: Mapping[str, Any], path: str, lengths: RowLengths) -> str:
    """Explain that prompt and response may be longer than a model's limit; "" if they fit."""
    limits = [*_table_limits(text_config(config)), *_rope_limits(text_config(config))]
    longest = lengths.max_prompt_length + lengths.max_response_length
    limit, why = min(limits, default=(longest, ""))
    return (
        ""
        if longest <= limit
        else f"{_describe_excess(path, why, lengths)} {_fitting_flags(limit, lengths)}."
    )


def column_problem(config: Mapping[str, Any], path: str, lengths: RowLengths) -> str:
    """Explain that rows may be too long for the hf sampler to be exact; "" if they fit.

    Llama 4 scales attention by the column in the cache instead of the position. The sampler pads
    rows on the left by less than their length, because a row starts while earlier ones run.
    """
    text = text_config(config)
    tuned = text.get("attn_temperature_tuning", text.get("model_type") == "llama4_text")
    limit = text.get("floor_scale", _FLOOR_SCALE) // 2
    longest = lengths.max_prompt_length + lengths.max_response_length
    if not tuned or longest <= limit:
        return ""
    why = f"counts padding where it scales attention above {limit} tokens (half of floor_scale)"
    flags = _fitting_flags(limit, lengths)
    return f"{_describe_excess(path, why, lengths)} {flags}, or rollout.name=vllm on a GPU."


def _describe_excess(path: str, why: str, lengths: RowLengths) -> str:
    prompt, response = lengths.max_prompt_length, lengths.max_response_length
    return (
        f"{path} {why}, but a prompt and its response may have {prompt + response} "
        f"(--max_prompt_length {prompt}, --max_response_length {response}); use"
    )


def require_length(config: Mapping[str, Any], path: str, lengths: RowLengths) -> None:
    """Raise ModelError if `length_problem` finds one."""
    if problem := length_problem(config, path, lengths):
        raise ModelError(problem)


def _table_limits(text: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a limit of tokens, and its reason, for each table of positions of the model."""
    kind = text.get("model_type")
    for field, kinds in POSITION_TABLES.items():
        size = text.get(field, text.get("max_position_embeddings"))
        if kind in kinds and type(size) is int:
            padding = text.get("pad_token_id") if kind in _BEHIND_PADDING else None
            size -= padding + 1 if type(padding) is int else 0
            yield size, f"has a table of positions for {size} tokens ({field})"


def _rope_limits(text: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield limits of tokens above which rotary positions depend on the batch, with the reason."""
    rope, kind = text.get("rope_scaling") or text.get("rope_parameters"), text.get("model_type")
    if not isinstance(rope, Mapping):
        return
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    longest = text.get("max_position_embeddings")
    original = text.get(ORIGINAL, _PHI_ORIGINAL if kind in _PHI[:2] else None)
    for part in nested or [rope]:
        scaling = str(part.get("rope_type", part.get("type", "default")))
        if "dynamic" in scaling:
            name, border, field = "dynamic NTK", longest, "max_position_embeddings"
        elif scaling == "longrope" or (kind in _PHI and scaling != "default"):
            # As in transformers: the model's field takes precedence over that of a flat dictionary.
            inner = part.get(ORIGINAL, longest)
            border = inner if nested or original is None else original
            name, field = "longrope", ORIGINAL
        else:
            continue
        if type(border) is int:
            problem = f"has rotary positions ({name}) that depend on the longest row of a batch"
            yield border, f"{problem} above {border} tokens ({field})"


def _fitting_flags(limit: int, lengths: RowLengths) -> str:
    """Return flags that make a row fit: the longer part is cut, or both are halved."""
    prompt, response = lengths.max_prompt_length, lengths.max_response_length
    if prompt <= limit // 2:
        return f"--max_response_length {limit - prompt}"
    if response <= limit // 2:
        return f"--max_prompt_length {limit - response}"
    return f"--max_prompt_length {limit // 2} --max_response_length {limit - limit // 2}"
