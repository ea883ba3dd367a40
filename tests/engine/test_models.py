"""Models that load, and models that do not, each in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AddedToken,
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

from ppo_cli.config.bundled import model_folder
from ppo_cli.engine.models import (
    OwnHead,
    decode_text,
    load_policy,
    load_tokenizer,
    load_value_model,
    stop_token_ids,
)
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


@pytest.fixture
def special_tokenizer() -> Any:
    """The bundled tokenizer with special tokens in the middle of what a policy writes."""
    tokenizer = load_tokenizer(model_folder("embedded"))
    words = ["1", "<think>", "<tool_call>", "<|eot|>"]
    tokenizer.add_tokens([AddedToken(word, special=True) for word in words], special_tokens=True)
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def test_a_text_is_what_the_policy_wrote(special_tokenizer: Any) -> None:
    for text in ("145", "<think>1</think>", "<tool_call>f(1)", "<|im_start|>1", "1<|eot|>2 "):
        ids = special_tokenizer(text)["input_ids"]
        for end in ("", "<|im_end|>", "<|endoftext|>", "<|im_end|><|endoftext|><|endoftext|>"):
            whole = [*ids, *special_tokenizer(end)["input_ids"]]
            assert decode_text(special_tokenizer, whole) == text


def test_ends_of_the_run_and_of_the_template_are_no_text(special_tokenizer: Any) -> None:
    ids = special_tokenizer("1<|eot|>")["input_ids"]
    assert decode_text(special_tokenizer, ids) == "1<|eot|>"
    assert decode_text(special_tokenizer, ids, frozenset({ids[-1]})) == "1"
    assert decode_text(special_tokenizer, ids[-1:], frozenset({ids[-1]})) == ""
    closing = load_tokenizer(model_folder("embedded"))
    closing.add_tokens([AddedToken("<|eot|>", special=True)], special_tokens=True)
    closing.chat_template = "{% for m in messages %}{{ m.content }} <|eot|>\n{% endfor %}"
    assert decode_text(closing, closing("1<|eot|>")["input_ids"]) == "1"
    closing = load_tokenizer(model_folder("embedded"))
    closing.chat_template = "{{ raise_exception('no') }}"
    assert decode_text(closing, closing("1<|im_end|>")["input_ids"]) == "1"
