"""The longest row of a model, read from its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.config.models.limits import column_problem, length_problem
from ppo_cli.config.schema.run import Data

ROPE = {"short_factor": [1.0], "long_factor": [4.0]}
LONG = ROPE | {"rope_type": "longrope"}
ORIGINAL = "original_max_position_embeddings"
# A config.json -> the longest row that it allows; None: any.
LIMITS: list[tuple[dict[str, Any], int | None]] = [
    ({"model_type": "gpt2", "n_positions": 32}, 32),
    ({"model_type": "gpt2", "max_position_embeddings": 32}, 32),
    ({"model_type": "opt", "max_position_embeddings": 32}, 32),
    ({"model_type": "mpt", "max_seq_len": 32}, 32),
    ({"model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1}, 32),
    ({"model_type": "git", "text_config": {"model_type": "opt", "max_position_embeddings": 8}}, 8),
    ({"model_type": "bloom", "seq_length": 32}, None),
    ({"model_type": "falcon", "alibi": True, "max_position_embeddings": 32}, None),
    ({"model_type": "llama", "max_position_embeddings": 32}, None),
    ({"model_type": "phi3", "rope_scaling": LONG, ORIGINAL: 40}, 40),
    ({"model_type": "phi3", "rope_scaling": {"type": "su"}, ORIGINAL: 40}, 40),
    ({"model_type": "phi3", "rope_parameters": LONG | {ORIGINAL: 40}, ORIGINAL: 50}, 50),
    ({"model_type": "phi3", "rope_parameters": LONG}, 4096),
    ({"model_type": "phi3", "rope_scaling": None, ORIGINAL: 40}, None),
    ({"model_type": "phimoe", "rope_parameters": LONG | {ORIGINAL: 40}}, 40),
    ({"model_type": "llama", "rope_parameters": LONG, "max_position_embeddings": 40}, 40),
    (
        {
            "model_type": "olmo3",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": LONG | {ORIGINAL: 40},
            },
        },
        40,
    ),
    (
        {
            "model_type": "olmo3",
            "rope_parameters": {
                "sliding_attention": LONG | {ORIGINAL: 80},
                "full_attention": LONG | {ORIGINAL: 40},
            },
        },
        40,
    ),
    (
        {
            "model_type": "llama",
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
            "max_position_embeddings": 64,
        },
        64,
    ),
    (
        {
            "model_type": "gemma4",
            "text_config": {
                "rope_parameters": {"full_attention": {"rope_type": "proportional"}},
                "max_position_embeddings": 32,
            },
        },
        None,
    ),
    *(
        ({"model_type": "llama", "rope_scaling": {"rope_type": kind, ORIGINAL: 32}}, None)
        for kind in ("default", "linear", "yarn", "llama3")
    ),
]


@pytest.mark.parametrize(("config", "limit"), LIMITS)
def test_the_longest_row_is_read_from_the_config(config: dict[str, Any], limit: int | None) -> None:
    if limit is None:
        data = Data(max_prompt_length=100_000, max_response_length=100_000)
        assert length_problem(config, "m", data) == ""
        return
    fits = Data(max_prompt_length=limit // 2, max_response_length=limit - limit // 2)
    assert length_problem(config, "m", fits) == ""
    longer = fits.model_copy(update={"max_response_length": fits.max_response_length + 1})
    assert f" {limit} tokens (" in length_problem(config, "m", longer)


@pytest.mark.parametrize(
    ("response", "tuned", "fits"), [(16, True, True), (17, True, False), (17, False, True)]
)
def test_scales_that_count_columns_end_rows_of_the_hf_sampler(
    response: int, tuned: bool, fits: bool
) -> None:
    text = {"model_type": "llama4_text", "floor_scale": 64, "attn_temperature_tuning": tuned}
    data = Data(max_prompt_length=16, max_response_length=response)
    problem = column_problem({"model_type": "llama4", "text_config": text}, "m", data)
    advice = "use --max_response_length 16, or rollout.name=vllm on a GPU."
    assert problem == "" if fits else problem.endswith(advice)


@pytest.mark.parametrize(
    ("prompt", "response", "flags"),
    [
        (8, 40, "--max_response_length 24"),
        (40, 8, "--max_prompt_length 24"),
        (24, 16, "--max_prompt_length 16"),
        (40, 40, "--max_prompt_length 16 --max_response_length 16"),
    ],
)
def test_the_sentence_names_lengths_that_fit(prompt: int, response: int, flags: str) -> None:
    data = Data(max_prompt_length=prompt, max_response_length=response)
    problem = length_problem({"model_type": "gpt2", "n_positions": 32}, "a/gpt", data)
    assert problem == (
        "a/gpt has a table of positions for 32 tokens (n_positions), but a prompt and its response "
        f"may have {prompt + response} (--max_prompt_length {prompt}, --max_response_length "
        f"{response}); use {flags}."
    )
