"""Models that load, and models that do not, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from ppo_cli.engine.models import load_policy, stop_token_ids
from ppo_cli.engine.models.policy import OwnHead, split_model
from ppo_cli.engine.models.value_models import load_value_model
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


def test_the_head_gets_last_states_of_rows_without_gaps() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    layer, ids = split_model(model).model.get_output_embeddings(), torch.arange(10).view(2, 5)
    gaps = []
    layer.register_forward_hook(lambda _, states, __: gaps.append(not states[0].is_contiguous()))
    last = model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, model(ids).logits[:, -1:])
    assert gaps == [False, False]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"not finite.*damaged \(model.embed_tokens.weight\)"):
        load_policy(str(tmp_path))


def test_weights_saved_in_bfloat16_are_trained_in_float32(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load_policy(str(tmp_path)).model.parameters()} == {torch.float32}
    assert {p.dtype for p in load_value_model(str(tmp_path)).model.parameters()} == {torch.float32}


def test_all_stop_tokens_count() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.generation_config.eos_token_id = [5, 6]

    class Tokenizer:
        eos_token_id = 2

    assert stop_token_ids(model, Tokenizer()) == {2, 5, 6}
