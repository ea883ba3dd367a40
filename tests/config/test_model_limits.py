"""The longest row of a model, read from its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_cli.config.models.limits import column_problem, length_problem
from ppo_cli.config.schema.run import Data
from tests.config.settling import load_table

LIMITS = load_table("model_limits.yaml")


@pytest.mark.parametrize("case", LIMITS)
def test_the_longest_row_is_read_from_the_config(case: dict[str, Any]) -> None:
    config, limit = case["config"], case["limit"]
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
