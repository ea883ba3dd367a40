"""Tiny twins of published reward models: their tensor names and config fields, random weights.

Each builder writes a whole checkpoint with a real tokenizer and returns its folder. All take
`drop` (names, or beginnings of names, of tensors to leave out), `extra` (tensors to add), `form`
(safetensors, bin or pt), `shards`, `dtype` and `seed`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_cli.rewards.models.base import LoadedModel
from ppo_cli.rewards.models.heads import load_reward_model
from tests.rewards.models.twin_tokenizers import (
    VOCABULARY,
    deberta_tokenizer,
    llama2_tokenizer,
    llama3_tokenizer,
    qwen_tokenizer,
)
from tests.settings import complete_reward_model

with warnings.catch_warnings():  # its module still uses torch.jit
    warnings.simplefilter("ignore", DeprecationWarning)
    from transformers import DebertaV2ForSequenceClassification

HIDDEN = 32
# Fields of encoders of BERT's kind.
ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "pad_token_id": None,
}  # fmt: skip
Weights = dict[str, Tensor]


def weights_of(model: Any, prefix: str = "") -> Weights:
    return {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}


def armorm_twin(
    folder: Path, *, objectives: int = 19, gating_hidden: int = 24, pad: str | None = "<|pad|>",
    **options: Any,
) -> Path:  # fmt: skip
    """RLHFlow/ArmoRM-Llama3-8B-v0.1: gated objectives on Llama 3, no `score`."""
    config = transformers.LlamaConfig(
        **LLAMA, num_labels=1, num_objectives=objectives, gating_temperature=10,
        gating_hidden_dim=gating_hidden, gating_n_hidden=3,
    )  # fmt: skip
    weights = weights_of(transformers.LlamaModel(config), "model.")
    weights["regression_layer.weight"] = torch.empty(objectives, HIDDEN)
    weights["reward_transform_matrix"] = torch.empty(objectives, objectives)
    sizes = [HIDDEN, gating_hidden, gating_hidden, gating_hidden, objectives]
    for i in range(4):
        weights[f"gating.layers.{i}.weight"] = torch.empty(sizes[i + 1], sizes[i])
        weights[f"gating.layers.{i}.bias"] = torch.empty(sizes[i + 1])
    weights["gating.logit_scale"] = torch.empty(1)
    name = "LlamaForRewardModelWithGating"
    auto_map = {"AutoModelForSequenceClassification": f"modeling_custom.{name}"}
    remote = {"architectures": [name], "auto_map": auto_map}
    return _write(folder, weights, config, llama3_tokenizer(pad=pad), fields=remote, **options)


def starling_twin(
    folder: Path, *, form: str = "bin", config_json: bool = True, both_copies: bool = True,
    **options: Any,
) -> Path:  # fmt: skip
    """Starling-RM-7B-alpha: its Llama 2 twice (also as `transformer`), `v_head`."""
    fields = LLAMA | {"max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**fields, bos_token_id=257)
    weights = weights_of(transformers.LlamaForCausalLM(config), "model.")
    weights["v_head.weight"] = torch.empty(1, HIDDEN)
    _fill(weights, options.pop("seed", 0))
    body = {name: t for name, t in weights.items() if name.startswith("model.model.")}
    copies = {name.replace("model.model.", "transformer.", 1): t for name, t in body.items()}
    weights.update({name: t.clone() if form == "safetensors" else t for name, t in copies.items()})
    if not both_copies:
        weights = {name: t for name, t in weights.items() if not name.startswith("model.")}
    options |= {"fields": {"architectures": ["LlamaForSequenceClassification"]}}
    options |= {"form": form, "seed": None}
    _write(folder, weights, config, llama2_tokenizer(), **options)
    if not config_json:
        (folder / "config.json").unlink()
    return folder


def deberta_twin(folder: Path, *, outputs: int = 1, types: int = 0, **options: Any) -> Path:
    """OpenAssistant/reward-model-deberta-v3-large-v2: question and answer, one output."""
    config = transformers.DebertaV2Config(
        **ENCODER, type_vocab_size=types, num_labels=outputs, pad_token_id=256,
        relative_attention=True, position_buckets=16, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], position_biased_input=False,
        max_relative_positions=-1, pooler_dropout=0.1, pooler_hidden_act="gelu",
        pooler_hidden_size=HIDDEN, layer_norm_eps=1e-7,
    )  # fmt: skip
    model = DebertaV2ForSequenceClassification(config)
    return _save_model(folder, model, deberta_tokenizer(), **options)


def bert_pair_twin(folder: Path, *, outputs: int = 1, **options: Any) -> Path:
    """A cross-encoder on BERT: its pooler is in the body, and it knows two token types."""
    config = transformers.BertConfig(**ENCODER, num_labels=outputs, pad_token_id=256)
    model = transformers.BertForSequenceClassification(config)
    return _save_model(folder, model, deberta_tokenizer(), **options)


def roberta_twin(folder: Path, *, chat: bool = False, **options: Any) -> Path:
    """A classifier on RoBERTa, whose positions begin after the pad token's id."""
    fields = ENCODER | {"max_position_embeddings": 130}
    config = transformers.RobertaConfig(**fields, type_vocab_size=1, num_labels=1, pad_token_id=1)
    tokenizer = llama3_tokenizer() if chat else deberta_tokenizer()
    model = transformers.RobertaForSequenceClassification(config)
    return _save_model(folder, model, tokenizer, **options)


def skywork_llama_twin(
    folder: Path, *, outputs: int = 1, pad: str | None = "<|pad|>", **options: Any
) -> Path:
    """Skywork/Skywork-Reward-V2-Llama-*: LlamaForSequenceClassification with one output."""
    config = transformers.LlamaConfig(
        **{**LLAMA, "max_position_embeddings": 131072}, num_labels=outputs
    )
    model = transformers.LlamaForSequenceClassification(config)
    return _save_model(folder, model, llama3_tokenizer(pad=pad), **options)


def skywork_qwen3_twin(
    folder: Path, *, outputs: int = 1, pad: str | None = "<|endoftext|>", **options: Any
) -> Path:
    """Skywork/Skywork-Reward-V2-Qwen3-*: Qwen3ForSequenceClassification with one output."""
    fields = {**LLAMA, "head_dim": 8, "max_position_embeddings": 40960}
    config = transformers.Qwen3Config(**fields, num_labels=outputs)
    model = transformers.Qwen3ForSequenceClassification(config)
    return _save_model(folder, model, qwen_tokenizer(pad=pad), **options)


def gpt2_twin(folder: Path, *, outputs: int = 1, **options: Any) -> Path:
    """A sequence classifier on GPT-2: learned positions, so that padding must not shift them."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=256,
        num_labels=outputs, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model = transformers.GPT2ForSequenceClassification(config)
    return _save_model(folder, model, qwen_tokenizer(pad=None), **options)


def trl_twin(folder: Path, **options: Any) -> Path:
    """TRL's AutoModelForCausalLMWithValueHead: the causal model, and `v_head.summary`."""
    config = transformers.LlamaConfig(**LLAMA)
    weights = dict(transformers.LlamaForCausalLM(config).state_dict())
    weights["v_head.summary.weight"] = torch.empty(1, HIDDEN)
    weights["v_head.summary.bias"] = torch.empty(1)
    fields = {"architectures": ["LlamaForCausalLM"]}
    return _write(folder, weights, config, llama3_tokenizer(), fields=fields, **options)


def openrlhf_twin(folder: Path, *, head: str = "score", **options: Any) -> Path:
    """OpenRLHF's layout: the bare body under `model`, and a head without bias."""
    config = transformers.LlamaConfig(**LLAMA)
    weights = weights_of(transformers.LlamaModel(config), "model.")
    weights[f"{head}.weight"] = torch.empty(1, HIDDEN)
    fields = {"architectures": ["RewardModel"]}
    return _write(folder, weights, config, llama3_tokenizer(), fields=fields, **options)


def token_value_twin(folder: Path, **options: Any) -> Path:
    """A value model as critics are saved: token classification with `score` and its bias."""
    config = transformers.LlamaConfig(**LLAMA, num_labels=1)
    model = transformers.LlamaForTokenClassification(config)
    return _save_model(folder, model, llama3_tokenizer(), **options)


def plain_causal_twin(folder: Path, **options: Any) -> Path:
    """A language model, which is no reward model."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    return _save_model(folder, model, llama3_tokenizer(), **options)


def load(folder: Path, **settings: Any) -> LoadedModel:
    """Load a twin as the reward does."""
    return load_reward_model(complete_reward_model(path=str(folder), device="cpu", **settings))


def read_weights(folder: Path) -> Weights:
    """All tensors of a twin, in any of the forms."""
    weights: Weights = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            weights |= load_file(file)
        elif file.suffix in (".bin", ".pt"):
            weights |= torch.load(file, weights_only=True)
    return weights


def _save_model(folder: Path, model: Any, tokenizer: Any, **options: Any) -> Path:
    """Write a model of transformers as it is."""
    fields = {"architectures": [type(model).__name__]}
    return _write(folder, model.state_dict(), model.config, tokenizer, fields=fields, **options)


def _write(
    folder: Path, weights: Mapping[str, Tensor], config: Any, tokenizer: Any, *,
    fields: Mapping[str, Any] | None = None, drop: tuple[str, ...] = (),
    extra: Mapping[str, Tensor] | None = None, form: str = "safetensors", shards: int = 1,
    dtype: torch.dtype = torch.float32, seed: int | None = 0,
) -> Path:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    if fields:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, **fields}))
    tokenizer.save_pretrained(folder)
    filled = dict(weights)
    if seed is not None:
        _fill(filled, seed)
    filled = {name: t.to(dtype) for name, t in filled.items()}
    filled |= dict(extra or {})
    _save(folder, {n: t for n, t in filled.items() if not n.startswith(drop)}, form, shards)
    return folder


def _fill(weights: Weights, seed: int) -> None:
    """Values wide enough that scores differ; norms near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in weights.items():
        values = torch.randn(tensor.shape, generator=generator)
        is_norm = "norm" in name.lower() or ".ln_" in name
        scaled = 0.1 * values + (1.0 if is_norm and name.endswith("weight") else 0.0)
        weights[name] = scaled if tensor.ndim < 2 else 0.3 * values
    if "gating.logit_scale" in weights:
        weights["gating.logit_scale"] = torch.tensor([1.25])


def _save(folder: Path, weights: Weights, form: str, shards: int) -> None:
    stem, suffix = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", form)
    names = list(weights)
    if shards == 1:
        _save_file(weights, folder / f"{stem}.{suffix}")
        return
    index = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}.{suffix}"
        part = {name: weights[name] for name in names[shard::shards]}
        _save_file(part, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))


def _save_file(weights: Weights, file: Path) -> None:
    if file.suffix == ".safetensors":
        tensors = {name: t.contiguous() for name, t in weights.items()}
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        torch.save(weights, file)
