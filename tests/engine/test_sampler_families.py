"""The sampler's log-probs are those of the row alone, for every way in which models keep rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.batches.packing import choose_attention
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.samplers.kv_cache import KVCache, plan_cache
from tests.engine import small_samplers as small
from tests.settings import complete

# One for each way in which rows are kept.
QUICK = ("qwen2", "gemma2", "mamba", "falcon_h1", "deepseek_v3", "doge", "rwkv", "roberta")


@pytest.mark.parametrize(
    ("family", "temperature"),
    [
        ("qwen2", 0.0),
        *(
            pytest.param(family, 0.7, marks=() if family in QUICK else pytest.mark.slow)
            for family in (*small.PLAIN, *small.STATES, *small.KEYS, *small.WHOLE)
        ),
    ],
)
def test_logprobs_are_those_of_each_row_alone(family: str, temperature: float) -> None:
    """Before truncation, under the temperature."""
    model = small.build_model(family, initializer_range=0.1)
    plan = plan_cache(model)
    assert (plan is None) == (family in small.WHOLE)
    assert plan is None or plan.keeps_states == (family in small.STATES)
    cut = {"top_p": 0.8, "top_k": 20, "max_tokens": 14}
    rollouts = small.sample(model, small.make_prompts(), 5, temperature=temperature, n=2, **cut)
    assert len(rollouts) == 2 * len(small.LENGTHS)
    for rollout in rollouts.values():
        expected = small.forward_logprobs(model, rollout, temperature or 1.0)
        assert rollout.sampler_logprobs.dtype == np.float32
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["bloom", "deepseek_v32", "zamba2"])
def test_columns_of_rows_that_ended_are_dropped_from_all_that_is_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    trim = KVCache.trim
    monkeypatch.setattr(
        KVCache, "trim", lambda cache, columns: dropped.append(columns) or trim(cache, columns)
    )
    model = small.build_model(family)
    # The longest rows end before others.
    sampler = small.make_sampler(model, 5, eos_token_ids=frozenset(range(2, 16)))
    rollouts = list(sampler.generate(small.make_prompts(), Sampling(max_tokens=14, n=2), 0))
    assert any(dropped)
    assert small.logprob_gap(model, rollouts) < 1e-5


def test_a_row_that_ends_with_its_first_token_leaves_nothing_behind() -> None:
    """Two rows of one prompt go on, and the only one of another ends: two rows, two prompts."""
    model, prompts = small.build_model("bloom"), small.make_prompts([9, 5])
    firsts = small.sample(model, prompts, max_tokens=1, n=2)
    ended = firsts["row-1", 1].token_ids[0]
    assert [ids[0] for ids in small.tokens_of(firsts).values()].count(ended) == 1
    sampler = small.make_sampler(model, 3, eos_token_ids=frozenset({ended}))
    rollouts = list(sampler.generate(prompts, Sampling(max_tokens=6, n=2), 0))
    assert any(len(rollout.token_ids) == 1 for rollout in rollouts)
    assert small.logprob_gap(model, rollouts) < 1e-5


def test_masks_by_head_pass_through_attention_by_rows() -> None:
    model = small.build_model("doge", "sdpa")
    choose_attention(model)
    rollouts = small.sample(model, small.make_prompts(), n=2)
    model.set_attn_implementation("eager")
    assert small.logprob_gap(model, rollouts.values()) < 1e-5


@pytest.mark.parametrize("family", small.STATES)
def test_padding_behind_rows_changes_neither_logprobs_nor_gradients(family: str) -> None:
    model = small.build_model(family)
    ids_L, other_L = (torch.tensor(small.make_prompts([size])[0].token_ids) for size in (21, 37))
    weights_LV = torch.randn(len(ids_L), small.VOCAB, generator=torch.Generator().manual_seed(1))

    def differentiate(ids_BL: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs_LV = model(input_ids=ids_BL, use_cache=False).logits[0, : len(ids_L)]
        logprobs_LV = logprobs_LV.log_softmax(-1)
        model.zero_grad()
        (logprobs_LV * weights_LV).sum().backward()
        return logprobs_LV, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    padded_L = torch.cat([ids_L, torch.zeros(16, dtype=torch.long)])
    alone_LV, alone = differentiate(ids_L[None])
    batched_LV, batched = differentiate(torch.stack([padded_L, other_L]))
    torch.testing.assert_close(batched_LV, alone_LV, atol=1e-5, rtol=0)
    scale = max(float(gradient.norm()) for gradient in alone)
    for first, second in zip(alone, batched, strict=True):
        assert float((first - second).norm()) <= 3e-5 * scale


@pytest.mark.parametrize(("family", "shapes"), [("doge", [(3, 6)]), ("mamba2", [(2, 6), (1, 4)])])
def test_prompts_are_prefilled_together_where_states_allow_it(
    family: str, shapes: list[tuple[int, int]]
) -> None:
    """Only states need prompts of equal length."""
    model, seen = small.build_model(family), []

    def note(_: Any, __: Any, options: dict[str, Any]) -> None:
        seen.append(tuple(options["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    small.sample(model, small.make_prompts([4, 6, 6]), max_tokens=1)
    assert seen == shapes


@pytest.mark.parametrize(("family", "slow"), [("recurrent_gemma", True), ("lfm2", False)])
def test_a_run_says_that_vllm_is_faster_where_no_cache_is_held(
    tmp_path: Path, family: str, slow: bool
) -> None:
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    small.build_model(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    settings = {"path": str(tmp_path), "dtype": "float32"}
    config = complete({"model": settings, "algorithm": {"adv_estimator": "grpo"}})
    notes: list[str] = []
    LocalEngine(config, tokenizer, total_steps=1, tell=notes.append)
    assert any("rollout.name=vllm is faster" in note for note in notes) == slow
