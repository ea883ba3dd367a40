"""Models that load, and models that do not, each in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from ppo_cli.engine.models import load_policy, load_value_model, stop_token_ids
from ppo_cli.errors import ModelError

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def test_a_logit_cap_is_part_of_the_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0)).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    ids = torch.randint(1, 60, (2, 7))
    torch.testing.assert_close(
        policy.head(policy.hidden_BLH(ids)), policy.model(input_ids=ids).logits
    )


def test_an_unknown_logit_scale_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CohereForCausalLM(CohereConfig(**TINY, logit_scale=0.0625))
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="changes its logits after the output layer"):
        load_policy(str(tmp_path))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    torch.nn.init.constant_(model.get_input_embeddings().weight, float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        load_policy(str(tmp_path))


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
