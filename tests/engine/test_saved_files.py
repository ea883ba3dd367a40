"""Configs and tokenizers that transformers 4, converters and servers read as well as version 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.engine.saved_files import add_older_names, tokenizer_files, write_files

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


@pytest.mark.parametrize(
    ("kind", "rope", "older"),
    [
        ("mistral", {"rope_type": "default", "rope_theta": 1e6},
         {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}),
        ("llama", LLAMA3 | {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        ("phi3", {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **LONG},
         {"rope_scaling": {"type": "longrope", **LONG}, "partial_rotary_factor": 1.0}),
        ("glm", {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
         {"rope_theta": 3e4, "partial_rotary_factor": 0.25, "rope_scaling": None}),
        ("gpt_neox", {"rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
         {"rotary_emb_base": 3e4, "rotary_pct": 0.5}),
        ("gemma3_text", LAYERS,
         {"rope_theta": 2e6, "rope_local_base_freq": 3e4,
          "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("qwen3_moe", {"rope_type": "default", "rope_theta": 2e6}, {"num_experts": 4}),
        ("gpt2", None, {"torch_dtype": "bfloat16"}),
    ],
)  # fmt: skip
def test_both_names_of_a_setting_say_the_same(
    kind: str, rope: Any, older: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"rope_parameters": rope} if rope else {}
    settings |= {"num_local_experts": 4} if kind == "qwen3_moe" else {}
    AutoConfig.for_model(kind, dtype="bfloat16", **settings).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_bytes()
    files = add_older_names({"config.json": text})
    written = json.loads(files["config.json"])
    assert {name: written[name] for name in older} == older
    # A reader that takes the older names first gets the same model.
    before = AutoConfig.from_pretrained(tmp_path)
    write_files(tmp_path, files)
    after = AutoConfig.from_pretrained(tmp_path)
    read = dict(getattr(after, "rope_parameters", None) or {})
    read.pop("type", None)  # the older name of the field
    assert read == (getattr(before, "rope_parameters", None) or {})
    assert after.dtype == before.dtype


def test_a_config_in_the_older_form_is_kept() -> None:
    older = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    files = add_older_names({"config.json": json.dumps(older).encode()})
    assert json.loads(files["config.json"]) == older


def test_a_tokenizer_opens_in_both_generations() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("embedded", "model"))
    config = json.loads(tokenizer_files(tokenizer)["tokenizer_config.json"])
    assert config["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert not config.keys() & {"extra_special_tokens", "is_local", "vocab_file"}
    assert (config["add_bos_token"], config["add_eos_token"]) == (False, False)
