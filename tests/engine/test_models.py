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
    LlamaConfig,
    LlamaForCausalLM,
)

from ppo_cli.config.bundled import model_folder
from ppo_cli.engine.models import (
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
