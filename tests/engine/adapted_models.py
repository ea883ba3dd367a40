"""Tiny random models of several families, with and without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo_cli.config.schema.run import Config
from ppo_cli.engine.models.lora import adapt, adapter_tensors

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def llama() -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**TINY))


def qwen() -> Any:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True))


def gemma() -> Any:
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0))


def gpt2() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


FAMILIES = (llama, qwen, gemma, gpt2)


def config(seed: int = 42, **model: Any) -> Config:
    settings = {"lora_rank": 3, "lora_alpha": 6, **model}
    return Config.model_validate({"model": settings, "trainer": {"seed": seed}})


def adapted(make: Callable[[], Any], seed: int = 42, **model: Any) -> Any:
    inject = adapt(config(seed, **model).model, seed)
    assert inject is not None
    return inject(make())


def trained(model: Any) -> Any:
    """The same model as if its adapter had been trained: B is zero no more."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(std=0.3)
    return model


def gathered(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits
