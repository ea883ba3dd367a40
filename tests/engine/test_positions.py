"""What configs tell of positions and attention kernels, compared with what models compute."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.limits import (
    POSITION_TABLES,
    attention_problem,
    length_problem,
    require_length,
)
from ppo_cli.config.schema.run import Data
from ppo_cli.errors import ModelError
from tests.engine.small_samplers import EOS, SHAPE, forward_logprobs, make_prompts, sample

BORDER = 24
CAP = "attn_logit_softcapping"
EXACT = 1e-4  # nats; these models have large logits
TABLES = {
    "n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 48, "hidden_size": 32, "d_model": 32,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_layers": 1, "intermediate_size": 16,
    "ffn_dim": 16, "n_heads": 4, "n_layers": 1, "num_heads": 4, "attention_heads": 4, "dff": 16,
    "rotary_dim": 4, "pad_token_id": 1, "is_decoder": True, "word_embed_proj_dim": 32,
    "attention_types": [[["global"], 1]],
}  # fmt: skip


LIMITED = (
    "gpt2", "gpt_bigcode", "gptj", "codegen", "ctrl", "mpt", "openai-gpt", "opt", "gpt_neo",
    "biogpt", "roberta", "bert",
)  # fmt: skip


def fits(model: Any, tokens: int) -> bool:
    ids = torch.arange(tokens)[None] % 40 + 4
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # GPT BigCode's module uses it
@pytest.mark.parametrize("kind", [*LIMITED, "bloom", "falcon", "xglm", "gpt_neox", "llama"])
def test_a_row_is_refused_where_the_model_has_no_position_for_it(kind: str) -> None:
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    fields = {name: value for name, value in TABLES.items() if hasattr(default, name)}
    sizes = {name: BORDER for name in POSITION_TABLES if name in default.to_dict()}
    config = config_class(**fields, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    near = range(BORDER - 4, BORDER + 4)
    refused = [n for n in near if length_problem(config.to_dict(), kind, lengths(4, n - 4))]
    assert bool(refused) is (kind in LIMITED)
    assert refused == [n for n in near if not fits(model, n)]


@pytest.mark.parametrize(
    "kind",
    ["gpt_oss", "bloom", "gptj", "gpt_neo", "mpt", "xglm", "gemma2", "llama", "opt", "falcon"],
)
def test_the_eager_kernel_is_asked_for_where_transformers_has_no_other(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    problem = attention_problem(config.to_dict(), kind, "sdpa")
    assert attention_problem(config.to_dict(), kind, "eager") == ""
    assert attention_problem(config.to_dict(), kind, None) == ""
    if kind == "gemma2":  # sdpa runs, but leaves the cap out
        assert attention_problem({"model_type": kind, CAP: None}, kind, "sdpa") == ""
        assert problem
        return
    with torch.device("meta"), pytest.raises(ValueError) if problem else nullcontext():
        AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **fields}}


FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
TRAINED = {"original_max_position_embeddings": BORDER}
LONGROPE = rope("longrope", **FACTORS, **TRAINED)
STRETCHED = {"max_position_embeddings": 4 * BORDER}
BY_LAYER_TYPE = {
    "rope_parameters": {
        "full_attention": LONGROPE["rope_parameters"] | {"rope_theta": 10_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
}  # fmt: skip
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", LONGROPE | TRAINED),
    "longrope": ("llama", LONGROPE),
    "dynamic": ("llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": BORDER}),
    "by layer type": ("olmo3", BY_LAYER_TYPE),
}
# Those that do not look at the length.
FREE: dict[str, dict[str, Any]] = {
    "linear": rope("linear", factor=4.0),
    "yarn": rope("yarn", factor=4.0, **TRAINED) | STRETCHED,
    "llama3": STRETCHED
    | rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **TRAINED),
}


def build(kind: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SHAPE | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def lengths(prompt: int, response: int) -> Data:
    return Data(max_prompt_length=prompt, max_response_length=response)


def largest_gap(model: Any, prompt_lengths: tuple[int, ...], tokens: int) -> float:
    """How far the sampler's log-probs are from those of each row alone without a cache."""
    sampled = sample(model, make_prompts(prompt_lengths), max_tokens=tokens)
    assert max(len(rollout.token_ids) for rollout in sampled.values()) == tokens
    gaps = []
    for rollout in sampled.values():
        exact = forward_logprobs(model, rollout, 1.0)
        gaps.append(float(np.abs(np.asarray(rollout.sampler_logprobs) - exact).max()))
    return max(gaps)


@pytest.mark.parametrize("name", ROPES)
def test_rows_up_to_the_border_are_exact_and_longer_ones_are_refused(name: str) -> None:
    model = build(*ROPES[name])
    model.generation_config.eos_token_id = EOS
    config = model.config.to_dict()
    require_length(config, name, lengths(12, BORDER - 12))
    assert largest_gap(model, (3, 12, 7), BORDER - 12) < EXACT
    with pytest.raises(ModelError, match=rf"depend on the longest row of a batch above {BORDER}"):
        require_length(config, name, lengths(12, BORDER - 11))


@pytest.mark.parametrize("name", ["phi3", "dynamic"])
def test_one_row_above_the_border_moves_the_others(name: str) -> None:
    assert largest_gap(build(*ROPES[name]), (3, 12, 7), BORDER) > 1e-3


@pytest.mark.parametrize("name", FREE)
def test_rope_that_does_not_look_at_the_length_is_exact_at_every_length(name: str) -> None:
    model = build("llama", FREE[name])
    require_length(model.config.to_dict(), name, lengths(1000, 1000))
    assert largest_gap(model, (3, 12, 7), 2 * BORDER) < EXACT
