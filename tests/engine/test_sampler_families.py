"""The sampler's log-probs are those of the row alone, for every way in which models keep rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.batches.packing import choose_attention
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.samplers.hf import HFSampler
from ppo_cli.engine.samplers.kv_cache import KVCache, plan_cache
from ppo_cli.records import Prompt, Rollout

VOCAB = 64
SIZE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_chunk_size": 8, "mamba_expand": 2,
}  # fmt: skip
MAMBA = {"state_size": 8, "time_step_rank": 4, "expand": 2}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS | DELTA,
    "qwen3_5_text": DELTA,
    # With biases, padding would not stay zero.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_bias": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2} | EXPERTS,
    "granitemoehybrid": MAMBA_2 | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": MAMBA_2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": MAMBA_2 | {
        "mamba_d_ssm": 64, "time_step_limit": (0.5, 0.9),
        "ssm_multipliers": [1.0, 0.5, 0.7, 0.8, 2.0],
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2,
        "chunk_size": 8, "time_step_min": 0.6,
    },
    "zamba2": MAMBA_2 | {
        "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8,
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4,
        "num_mem_blocks": 1, "time_step_min": 0.6,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "num_experts": 4,
    },
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8,
        "expand": 2, "time_step_limit": (0.5, 0.9),
    },
}  # fmt: skip
KEYS: dict[str, dict[str, Any]] = {
    "llama4_text": EXPERTS | {
        "attention_chunk_size": 8, "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
    "deepseek_v3": LATENT | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "deepseek_v32": LATENT | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1, "index_n_heads": 16,
        "index_head_dim": 16, "index_topk": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "bloom": {"n_head": 4, "n_layer": 2},
    "doge": {},  # its masks differ from head to head
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    # States in the modules, a cache class of the family, positions by columns or by ids.
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    "minimax": EXPERTS | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "rwkv": {"attention_hidden_size": 32},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_ffn_dim": 48,
             "decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "roberta": {"is_decoder": True},
}  # fmt: skip
LENGTHS = (3, 19, 5, 14, 1, 9, 9, 12)


def build(family: str, **changes: Any) -> Any:
    """A small model whose norms and biases are not what they start as."""
    torch.manual_seed(0)
    settings = SIZE | (STATES | KEYS | WHOLE)[family] | changes
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[family](**settings), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.eval()


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[Prompt]:
    draws = np.random.default_rng(3)
    return [
        Prompt(f"row-{i}", "", (), "", token_ids=tuple(draws.integers(3, VOCAB, length).tolist()))
        for i, length in enumerate(lengths)
    ]


def make_sampler(model: Any, rows: int = 5, ends: Sequence[int] = (2,)) -> HFSampler:
    return HFSampler(
        model, eos_token_ids=frozenset(ends), pad_token_id=0, max_num_seqs=rows,
        detokenize=lambda *_, **__: "",
    )  # fmt: skip


def sample(model: Any, prompts: list[Prompt], rows: int = 5, **sampling: Any) -> list[Rollout]:
    settings = Sampling(**({"max_tokens": 14, "n": 2} | sampling))
    rollouts = make_sampler(model, rows).generate(prompts, settings, 0)
    return sorted(rollouts, key=lambda rollout: rollout.key)


@torch.no_grad()
def row_logprobs(model: Any, rollout: Rollout) -> np.ndarray:
    """Log-probs of the response in a forward pass of this row alone, without a cache."""
    start = len(rollout.prompt.token_ids)
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    picked: np.ndarray = logprobs.gather(-1, ids[0, start:, None])[:, 0].numpy()
    return picked


@pytest.mark.parametrize("family", [*STATES, *KEYS, *WHOLE])
def test_logprobs_are_those_of_each_row_alone(family: str) -> None:
    model = build(family)
    plan = plan_cache(model)
    assert (plan is None) == (family in WHOLE)
    assert plan is None or plan.keeps_states == (family in STATES)
    rollouts = sample(model, make_prompts())
    assert len(rollouts) == 2 * len(LENGTHS)
    for rollout in rollouts:
        expected = row_logprobs(model, rollout)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["bloom", "deepseek_v32", "zamba2"])
def test_columns_of_rows_that_ended_are_dropped_from_all_that_is_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    trim = KVCache.trim

    def note(cache: KVCache, columns: int) -> None:
        dropped.append(columns)
        trim(cache, columns)

    monkeypatch.setattr(KVCache, "trim", note)
    model = build(family)
    sampler = make_sampler(model, ends=range(2, 20))  # the longest rows end before others
    rollouts = list(sampler.generate(make_prompts(), Sampling(max_tokens=14, n=2), 0))
    assert any(dropped)
    for rollout in rollouts:
        expected = row_logprobs(model, rollout)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-5)


def test_a_row_that_ends_with_its_first_token_leaves_nothing_behind() -> None:
    """Two rows of one prompt go on, and the only one of another ends: two rows, two prompts."""
    model, prompts = build("bloom"), make_prompts([9, 5])
    *others, _, ended = [r.token_ids[0] for r in sample(model, prompts, max_tokens=1)]
    assert ended not in others
    sampler = make_sampler(model, rows=3, ends=[ended])
    rollouts = list(sampler.generate(prompts, Sampling(max_tokens=6, n=2), 0))
    assert any(len(rollout.token_ids) == 1 for rollout in rollouts)
    for rollout in rollouts:
        expected = row_logprobs(model, rollout)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-5)


def test_masks_by_head_pass_through_attention_by_rows() -> None:
    model = build("doge")
    model.set_attn_implementation("sdpa")
    choose_attention(model)
    rollouts = sample(model, make_prompts())
    model.set_attn_implementation("eager")
    for rollout in rollouts:
        expected = row_logprobs(model, rollout)
        np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "recurrent_gemma"])
class TestRowsOfStates:
    """What holds for keys and values holds for states, and for rows that are computed again."""

    def test_a_row_does_not_depend_on_its_batch(self, family: str) -> None:
        model, prompts = build(family), make_prompts()
        together = [rollout.token_ids for rollout in sample(model, prompts, 64)]
        alone = [r.token_ids for prompt in prompts for r in sample(model, [prompt], 64)]
        assert alone == together
        for rows in (1, 3):
            assert [rollout.token_ids for rollout in sample(model, prompts, rows)] == together

    def test_the_same_call_gives_the_same_bits(self, family: str) -> None:
        model, prompts = build(family), make_prompts()
        for first, second in zip(sample(model, prompts), sample(model, prompts), strict=True):
            assert first.token_ids == second.token_ids
            assert np.array_equal(first.sampler_logprobs, second.sampler_logprobs)

    def test_a_response_goes_on_as_if_it_had_not_paused(self, family: str) -> None:
        model, prompts = build(family), make_prompts()
        expected = sample(model, prompts)
        windows = Sampling(max_tokens=14, n=2, new_tokens=5)
        rollouts: list[Rollout] = []
        begun = list(make_sampler(model).generate(prompts, windows, 0))
        while begun:
            rollouts += [r for r in begun if r.finish_reason != "unfinished"]
            begun = [r for r in begun if r.finish_reason == "unfinished"]
            begun = list(make_sampler(model).generate((), windows, 1, begun))
        rollouts.sort(key=lambda rollout: rollout.key)
        for rollout, expected_rollout in zip(rollouts, expected, strict=True):
            assert rollout.token_ids == expected_rollout.token_ids
            np.testing.assert_allclose(
                rollout.sampler_logprobs, expected_rollout.sampler_logprobs, atol=2e-5
            )

    def test_rows_start_again_when_memory_runs_out(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, prompts = build(family), make_prompts()
        expected = [rollout.token_ids for rollout in sample(model, prompts, 64)]
        calls, forward = 0, model.forward

        def run_out(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 12:
                raise torch.OutOfMemoryError
            return forward(*args, **options)

        monkeypatch.setattr(model, "forward", run_out)
        sampler = make_sampler(model, 64)
        rollouts = list(sampler.generate(prompts, Sampling(max_tokens=14, n=2), 0))
        assert sampler.capacity.rows < 64
        tokens = [rollout.token_ids for rollout in sorted(rollouts, key=lambda r: r.key)]
        assert tokens == expected


@pytest.mark.parametrize("family", list(STATES))
def test_padding_behind_rows_changes_neither_logprobs_nor_gradients(family: str) -> None:
    model = build(family)
    ids_L = torch.tensor(make_prompts([21])[0].token_ids)
    weights_LV = torch.randn(len(ids_L), VOCAB, generator=torch.Generator().manual_seed(1))

    def differentiate(ids_BL: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs_LV = model(input_ids=ids_BL, use_cache=False).logits[0, : len(ids_L)]
        logprobs_LV = logprobs_LV.log_softmax(-1)
        model.zero_grad()
        (logprobs_LV * weights_LV).sum().backward()
        return logprobs_LV, [p.grad for p in model.parameters() if p.grad is not None]

    other_L = torch.tensor(make_prompts([37])[0].token_ids)
    padded_L = torch.cat([ids_L, torch.zeros(16, dtype=torch.long)])
    alone_LV, alone = differentiate(ids_L[None])
    alone = [gradient.clone() for gradient in alone]
    beside_LV, beside = differentiate(torch.stack([padded_L, other_L]))
    torch.testing.assert_close(beside_LV, alone_LV, atol=1e-5, rtol=0)
    scale = max(float(gradient.norm()) for gradient in alone)
    for first, two in zip(alone, beside, strict=True):
        assert float((first - two).norm()) <= 3e-5 * scale


def test_prompts_of_plain_attention_are_prefilled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only states need prompts of equal length."""
    widths: dict[str, list[tuple[int, int]]] = {}
    for family in ("doge", "mamba2"):
        model = build(family)
        shapes = widths.setdefault(family, [])
        handle = model.register_forward_pre_hook(
            lambda _, __, options, seen=shapes: seen.append(tuple(options["input_ids"].shape)),
            with_kwargs=True,
        )
        sample(model, make_prompts([4, 6, 6]), n=1, max_tokens=1)
        handle.remove()
    assert widths == {"doge": [(3, 6)], "mamba2": [(2, 6), (1, 4)]}


@pytest.mark.parametrize(("family", "slow"), [("recurrent_gemma", True), ("lfm2", False)])
def test_a_run_says_that_vllm_is_faster_where_no_cache_is_held(
    tmp_path: Path, family: str, slow: bool
) -> None:
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    build(family, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    settings = {"path": str(tmp_path), "dtype": "float32"}
    config = Config.model_validate({"model": settings, "algorithm": {"adv_estimator": "grpo"}})
    notes: list[str] = []
    LocalEngine(config, tokenizer, total_steps=1, tell=notes.append)
    assert any("rollout.name=vllm is faster" in note for note in notes) == slow
