"""Packed rows: the same numbers as padded ones, no look beyond a border, and honest refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as tries
from hypothesis import strategies as st
from torch import Tensor

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.batches.micro_batches import Budget, plan_rank_micro_batches
from ppo_cli.engine.batches.packing import (
    MASKED_TOKENS,
    build_budget,
    compare_gradients,
    enable_packing,
)
from ppo_cli.engine.batches.rows import build_micro_batch
from ppo_cli.engine.device import Compute
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import Policy, load_tokenizer
from ppo_cli.engine.models.attention import BY_ROWS, PackedRows, Packing, attend_by_rows
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.engine.ranks import ALONE, Ranks
from ppo_cli.records import Prompt
from tests.engine.packed_steps import MIXED, RATE, gaps, make_batch, settings, take_steps
from tests.engine.tiny_families import SIZE, make_model
from tests.rounding import allowed, assert_near

CPU = torch.device("cpu")
FLOAT32 = Compute(CPU, torch.float32)
LENGTHS = (7, 1, 12, 7, 2)
TERMS = sum(LENGTHS) * SIZE["hidden_size"] * 2  # tokens, through the width of each layer
STEP_TERMS = sum(p + t for p, t in MIXED) * 128 * 2  # those of the bundled model
FAMILIES = ("llama", "gpt2", "gemma2")  # plain, with learned positions, with sliding windows


def policy_of(family: str, attention: str = "sdpa") -> Policy:
    model = make_model(family)
    model.config._attn_implementation = attention
    policy = Policy(model, model.base_model, model.lm_head)
    return enable_packing(policy, family, FLOAT32, ALONE)


def token_rows(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (1, length), generator=generator) for length in LENGTHS]


def hidden_of(policy: Policy, rows: list[Tensor]) -> Tensor:
    packed = PackedRows.from_lengths([row.shape[1] for row in rows], CPU)
    return policy.hidden_BLH(torch.cat(rows, dim=1), packed)[0]


@pytest.mark.parametrize("training", [False, True], ids=["asked", "trained, recomputed"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_end_to_end_are_what_each_is_alone(name: str, training: bool) -> None:
    """Hidden states and gradients; with gradient checkpointing in training."""
    policy, rows = policy_of(name), token_rows()
    if training:
        checkpoint_blocks(policy.model)
    alone = torch.cat([policy.hidden_BLH(row)[0] for row in rows])
    packed = hidden_of(policy, rows)
    assert_near(packed, alone, terms=TERMS)
    weight = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for hidden in (alone, packed):
        policy.model.zero_grad()
        (hidden * weight).sum().backward()
        tensors = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(tensors))
    assert_near(gradients[1], gradients[0], terms=TERMS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_no_token_sees_another_row(name: str, attention: str) -> None:
    policy, rows = policy_of(name, attention), token_rows()
    by_rows = (name, attention) == ("llama", "sdpa")
    assert policy.packing is (Packing.BY_ROWS if by_rows else Packing.MASKED)
    before = hidden_of(policy, rows).split(LENGTHS)
    others = token_rows(seed=1)
    for changed in range(len(rows)):
        mixed = [others[i] if i == changed else row for i, row in enumerate(rows)]
        after = hidden_of(policy, mixed).split(LENGTHS)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [i != changed for i in range(len(rows))]


def test_a_kernel_with_other_gradients_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_gradients(4, 2, 8, FLOAT32) == ""
    assert compare_gradients(4, 4, 8, Compute(CPU, torch.bfloat16)) == ""

    def without_values(*args: Any, **kwargs: Any) -> Any:
        module, query, key, value, ends = args
        return attend_by_rows(module, query, key, value.detach() + 0 * value, ends, **kwargs)

    monkeypatch.setattr("ppo_cli.engine.batches.packing.attend_by_rows", without_values)
    assert "other gradients" in compare_gradients(4, 2, 8, FLOAT32)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr("ppo_cli.engine.batches.packing.attend_by_rows", broken)
    assert "no kernel image" in compare_gradients(4, 2, 8, FLOAT32)


def test_the_attention_of_packed_rows_is_not_saved(tmp_path: Path) -> None:
    path = str(model_folder("embedded"))
    critic = enable_packing(load_value_model(path), path, FLOAT32, ALONE)
    assert critic.model.config._attn_implementation == BY_ROWS
    critic.model.save_pretrained(tmp_path)
    assert BY_ROWS not in (tmp_path / "config.json").read_text()


@pytest.fixture(scope="module")
def padded() -> Any:
    return take_steps(settings())


def assert_alike(gap_by_name: dict[str, float]) -> None:
    """To rounding; AdamW moves a weight by about its rate, and so its error is a share of that.

    Where gradients are near AdamW's eps, as the first ones of an adapter, rounding counts more.
    """
    assert gap_by_name["counts"] == 0 and gap_by_name["weights"] < 2e-3 * RATE, gap_by_name
    assert max(gap_by_name["annotated"], gap_by_name["means"]) < allowed(STEP_TERMS), gap_by_name


@pytest.mark.parametrize(
    "tokens, model, parts",
    [
        pytest.param(24, {}, {}, id="several micro-batches"),
        pytest.param(10_000, {}, {}, id="one micro-batch", marks=pytest.mark.slow),
        pytest.param(24, {"attn_implementation": "eager"}, {}, id="masked"),
        pytest.param(24, {}, {"critic": {"ppo_micro_batch_size_per_gpu": 1}}, id="row by row"),
    ],
)
def test_steps_are_the_same_packed_and_padded(
    padded: Any, tokens: int, model: dict[str, Any], parts: dict[str, Any]
) -> None:
    """Log-probs, full KL, entropy, values, losses, gradient norms and weights after AdamW."""
    config = settings(tokens, model={"path": "embedded", "packing": True, **model}, **parts)
    assert min(sums["grad_norm"][0] for sums in padded.sums) > 0.1
    assert_alike(gaps(take_steps(config), padded))


@pytest.mark.parametrize("rows", [MIXED[1:2], ((3, 5),) * 4], ids=["one row", "one length"])
def test_odd_batches_are_the_same_with_an_adapter(rows: Any) -> None:
    model = {"path": "embedded", "lora_rank": 4}
    first, other = (
        take_steps(settings(model={**model, "packing": on}), rows=rows, steps=2)
        for on in (True, False)
    )
    assert_alike(gaps(first, other))


def test_a_shared_prompt_lies_there_once() -> None:
    batch = make_batch(((3, 2), (4, 1), (3, 3)), seed=0, one_prompt=True)
    cut = build_micro_batch(batch, [2, 1, 0], CPU, packed=True, shared=True)
    ids = batch.input_ids_BL
    assert cut.input_ids_BL.tolist() == [[*ids[2, :6], *ids[1, :5], *ids[0, 3:5]]]
    assert cut.gather_states(torch.arange(13)[None]).tolist() == [2, 3, 4, 9, 2, 11]
    assert cut.targets_N.tolist() == [*ids[2, 3:6], ids[1, 4], *ids[0, 3:5]]


@given(
    rows=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 5)), min_size=1, max_size=40),
    tokens=st.integers(16, 400),
    ranks=st.integers(1, 4),
)
@example(rows=[(1, 0)] * 4, tokens=16, ranks=3)
@tries(max_examples=100, deadline=None)
def test_rows_of_a_prompt_stay_together_where_they_fit(
    rows: list[tuple[int, int]], tokens: int, ranks: int
) -> None:
    lengths, prompts = [length for length, _ in rows], [prompt for _, prompt in rows]
    budget = Budget(tokens, packed=True, shared=True)
    shares = [
        plan_rank_micro_batches(lengths, budget, Ranks(rank, ranks), prompts)
        for rank in range(ranks)
    ]
    groups = [group for mine in shares for group in mine]
    assert sorted(i for group in groups for i in group) == list(range(len(rows)))
    assert len({len(mine) for mine in shares}) == 1
    assert all(sum(lengths[i] for i in group) <= tokens or len(group) == 1 for group in groups)
    if len(rows) >= ranks:
        assert all(mine[0] for mine in shares)
    for prompt in set(prompts):
        of_it = [i for i, other in enumerate(prompts) if other == prompt]
        if sum(lengths[i] for i in of_it) <= tokens and len(of_it) <= len(rows) // ranks:
            assert any(set(of_it) <= set(group) for group in groups)


@pytest.mark.slow
def test_bfloat16_is_as_near_as_it_gets(padded: Any) -> None:
    model = {"path": "embedded", "dtype": "bfloat16"}
    configs = [settings(model={**model, "packing": on}) for on in (True, False)]
    first, other = (take_steps(config, steps=1) for config in configs)
    for key in ("old_logprobs_BT", "entropy_BT"):
        exact, a, b = (seen.annotated[0][key] for seen in (padded, first, other))
        assert (a - b).norm() < 0.01 * b.norm() and not torch.equal(a, exact)


def test_a_slice_lies_end_to_end_and_reads_before_each_token() -> None:
    batch = make_batch(MIXED, seed=0)
    cut = build_micro_batch(batch, [2, 0, 7], CPU, packed=True)
    ids = batch.input_ids_BL
    assert cut.input_ids_BL.tolist() == [[*ids[2, :19], *ids[0, :2], *ids[7, :24]]]
    assert cut.gather_states(torch.arange(45)[None]).tolist() == [16, 17, 19, 43]
    assert cut.targets_N.tolist() == [*ids[2, 17:19], ids[0, 1], ids[7, 23]]
    idle = build_micro_batch(batch, [], CPU, packed=True)
    assert idle.idle and idle.input_ids_BL.tolist() == [ids[0, :2].tolist()]
    assert not idle.count_BL.any()  # for experts


def test_masked_models_take_short_micro_batches() -> None:
    by_rows, masked = policy_of("llama"), policy_of("gemma2")
    assert build_budget(16384, None, by_rows) == Budget(16384, packed=True, shared=True)
    assert build_budget(16384, 8, by_rows, masked) == Budget(MASKED_TOKENS, 8, packed=True)
    plain, alone = replace(by_rows, packing=None), replace(by_rows, shares_prompts=False)
    assert build_budget(16384, None, plain) == Budget(16384)
    for models in ((by_rows, plain), (plain, by_rows), (masked, plain)):
        assert build_budget(MASKED_TOKENS, None, *models) == Budget(MASKED_TOKENS)
    assert build_budget(99, None, by_rows, masked) == Budget(99, packed=True)
    assert build_budget(99, None, by_rows, alone) == Budget(99, packed=True)
    assert build_budget(99, 8, by_rows) == Budget(99, 8, packed=True)
    with pytest.raises(ValueError, match="does not take them"):
        plain.hidden_BLH(torch.ones(1, 4, dtype=torch.int64), PackedRows.from_lengths([2, 2], CPU))


def test_the_sampler_shares_a_packed_policy() -> None:
    tokenizer = load_tokenizer(str(model_folder("embedded")))
    prompts = [Prompt(t, t, (), t, tuple(tokenizer(t).input_ids)) for t in ("1+2=", "13+45=")]
    greedy, outputs = Sampling(temperature=0.0, max_tokens=5), []
    for packing in (False, True):
        config = settings(model={"path": "embedded", "packing": packing})
        rollouts = LocalEngine(config, tokenizer, total_steps=1).generate(prompts, greedy)
        outputs.append({r.prompt.uid: (r.token_ids, r.sampler_logprobs.tolist()) for r in rollouts})
    assert outputs[0] == outputs[1]


def test_the_kernel_of_gpus_is_called_as_its_documentation_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its place, one that follows what torch says of `varlen_attn`."""
    calls = []

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
        max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> Tensor:  # fmt: skip
        calls.append(cu_seq_q.tolist())
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert torch.equal(cu_seq_q, cu_seq_k)
        assert (max_q, max_k, window_size, enable_gqa) == (12, 12, (-1, 0), True)
        rows = []
        for start, end in pairwise(cu_seq_q.tolist()):
            q, k, v = (states[start:end].transpose(0, 1) for states in (query, key, value))
            k, v = (states.repeat_interleave(q.shape[0] // k.shape[0], 0) for states in (k, v))
            future = torch.ones(end - start, end - start).triu(1).bool()
            scores = (q @ k.mT * scale).masked_fill(future, -torch.inf)
            rows.append((scores.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(rows)

    policy, rows = policy_of("llama"), token_rows()
    plain = hidden_of(policy, rows)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr("ppo_cli.engine.models.attention._has_kernel", lambda *_: True)
    hidden = hidden_of(policy, rows)
    assert calls == [[0, 7, 8, 20, 27, 29]] * 2  # once a layer
    assert_near(hidden, plain, terms=TERMS)
