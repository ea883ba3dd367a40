"""The sampler draws what the model says: greedy, log-probs, streams, batches, order."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_cli.config.models.bundled import EMBEDDED
from ppo_cli.engine.base import Sampling, stream_key
from ppo_cli.engine.device import Compute
from ppo_cli.engine.models.attention import BY_ROWS
from ppo_cli.engine.models.policy import Float32Head
from ppo_cli.engine.samplers import hf as hf_sampler
from ppo_cli.engine.samplers.hf import compute_uniforms, draw_tokens
from ppo_cli.engine.samplers.kv_cache import KVCache
from ppo_cli.errors import DataError, ModelError, UserError
from ppo_cli.records import Prompt, Rollout
from tests.engine import small_samplers as small
from tests.marks import quick_only
from tests.settings import complete

# Keys and values, states, and rows that are computed again.
KINDS = ("qwen2", "qwen3_next", "mamba2", "recurrent_gemma")


@pytest.fixture
def model() -> Any:
    return small.build_model()


@pytest.fixture
def prompts() -> list[Prompt]:
    return small.make_prompts()


@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen2", "sdpa"), ("gemma2", "eager"), ("gemma3_text", BY_ROWS)],
)
def test_greedy_equals_transformers_generate(
    family: str, attention: str, prompts: list[Prompt]
) -> None:
    model = small.build_model(family, attention)
    reference = small.build_model(family, "sdpa") if attention == BY_ROWS else model
    rollouts = small.sample(model, prompts, temperature=0.0, max_tokens=20)
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20
        )
        assert rollouts[prompt.uid, 0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("family", quick_only(KINDS, "qwen2", "mamba2"))
def test_rollouts_do_not_depend_on_their_batch(
    family: str, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small.build_model(family)
    together = small.sample(model, prompts, n=2)
    for key, repeated in small.sample(model, prompts, n=2).items():  # to the bit
        assert np.array_equal(repeated.sampler_logprobs, together[key].sampler_logprobs)
    expected = small.tokens_of(together)
    assert len(expected) == 16
    alone: dict[tuple[str, int], tuple[int, ...]] = {}
    for prompt in prompts:
        alone |= small.tokens_of(small.sample(model, [prompt], n=2))
    assert alone == expected
    for seats in (1, 3):
        assert small.tokens_of(small.sample(model, prompts, seats, n=2)) == expected
    assert small.tokens_of(small.sample(model, prompts[::-1], n=2)) == expected
    monkeypatch.setattr(hf_sampler, "PREFILL_TOKENS", 20)
    assert small.tokens_of(small.sample(model, prompts, n=2)) == expected


def test_seeds_samples_and_prompts_have_streams_of_their_own(model: Any) -> None:
    prompts = small.make_prompts([5])
    first = small.sample(model, prompts, n=4, seed=1)
    assert small.tokens_of(first) == small.tokens_of(small.sample(model, prompts, n=4, seed=1))
    assert small.tokens_of(first) != small.tokens_of(small.sample(model, prompts, n=4, seed=2))
    assert len({rollout.token_ids for rollout in first.values()}) == 4
    twin = replace(prompts[0], uid="another")
    assert list(small.tokens_of(first).values()) != list(
        small.tokens_of(small.sample(model, [twin], n=4)).values()
    )


def test_global_random_state_is_left_alone(model: Any, prompts: list[Prompt]) -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    small.sample(model, prompts, n=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)


def test_finish_reasons_text_and_version(model: Any, prompts: list[Prompt]) -> None:
    rollouts = small.sample(model, prompts, n=16, max_tokens=24)
    reasons = Counter(rollout.finish_reason for rollout in rollouts.values())
    assert min(reasons["stop"], reasons["length"]) > 5
    for rollout in rollouts.values():
        assert (rollout.token_ids[-1] == small.EOS) == (rollout.finish_reason == "stop")
        assert small.EOS not in rollout.token_ids[:-1]
        assert len(rollout.token_ids) == 24 or rollout.finish_reason == "stop"
        assert len(rollout.sampler_logprobs) == len(rollout.token_ids)
        assert rollout.text == small.detokenize(rollout.token_ids)
        assert rollout.weight_version == 5


def test_a_response_ends_with_the_token_that_completes_a_stop_text(
    model: Any, prompts: list[Prompt]
) -> None:
    rollouts = small.sample(model, prompts, n=4)
    drawn = [r.token_ids for r in rollouts.values() if len(r.token_ids) > 6]
    # One lies in a single token, one spans three of them.
    stop = (f" {drawn[0][4]} ", " ".join(map(str, drawn[1][1:4])) + " ")
    cut = small.sample(model, prompts, n=4, stop=stop)
    ended = 0
    for key, full in rollouts.items():
        texts = [small.detokenize(full.token_ids[:n]) for n in range(len(full.token_ids) + 1)]
        first = [n for n, text in enumerate(texts) if any(first in text for first in stop)]
        end = min(first, default=len(full.token_ids))
        assert cut[key].token_ids == full.token_ids[:end]
        # Rows that end early leave smaller passes, which add up in another order.
        expected = full.sampler_logprobs[:end]
        np.testing.assert_allclose(cut[key].sampler_logprobs, expected, rtol=1e-5)
        assert cut[key].finish_reason == ("stop" if first else full.finish_reason)
        ended += bool(first) and end < len(full.token_ids)
    assert 2 <= ended < len(rollouts)
    assert small.tokens_of(small.sample(model, prompts, 3, n=4, stop=stop)) == small.tokens_of(cut)


@pytest.mark.parametrize(
    ("family", "new_tokens"), [("gemma3_text", 1), ("gemma3_text", 5), *((k, 5) for k in KINDS)]
)
def test_a_response_goes_on_as_if_it_had_not_paused(family: str, new_tokens: int) -> None:
    model, prompts = small.build_model(family), small.make_prompts()
    sampling = Sampling(n=3, max_tokens=12, seed=4, top_p=0.9)
    one, sampler = (
        small.make_sampler(model, size, eos_token_ids=frozenset(range(1, 9))) for size in (64, 5)
    )
    in_one = {r.key: r for r in one.generate(prompts, sampling, 2)}
    windows = replace(sampling, new_tokens=new_tokens)
    rollouts = list(sampler.generate(prompts, windows, 2))
    assert {len(r.token_ids) for r in rollouts if r.finish_reason == "unfinished"} == {new_tokens}
    for version in range(3, 15):
        begun = [r for r in rollouts if r.finish_reason == "unfinished"]
        extra = list(sampler.generate((), windows, version, begun))
        assert {r.key for r in extra} == {r.key for r in begun}
        assert all(r.carried == new_tokens * (version - 2) for r in extra)
        rollouts = [r for r in rollouts if r.finish_reason != "unfinished"] + extra
    assert len(rollouts) == len(in_one) and {r.weight_version for r in rollouts} == {2}
    for r in rollouts:
        full = in_one[r.key]
        assert (r.token_ids, r.text) == (full.token_ids, full.text)
        assert r.finish_reason == full.finish_reason
        np.testing.assert_allclose(r.sampler_logprobs, full.sampler_logprobs, atol=2e-5)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}


def test_tokens_keep_the_logprobs_of_the_weights_they_were_drawn_with(
    model: Any, prompts: list[Prompt]
) -> None:
    new, sampling = small.build_model(initializer_range=0.6), Sampling(max_tokens=12, new_tokens=4)
    rollouts = small.make_sampler(model).generate(prompts, sampling, 0)
    begun = [rollout for rollout in rollouts if rollout.finish_reason == "unfinished"]
    full = list(small.make_sampler(new).generate((), replace(sampling, new_tokens=None), 1, begun))
    assert len(full) == len(begun) > 3
    for r in full:
        under = [small.forward_logprobs(weights, r) for weights in (model, new)]
        np.testing.assert_allclose(r.sampler_logprobs[:4], under[0][:4], atol=1e-4)
        np.testing.assert_allclose(r.sampler_logprobs[4:], under[1][4:], atol=1e-4)
        assert np.abs(under[0] - under[1]).max() > 0.1
        assert (r.weight_version, r.carried) == (0, 4)


def test_a_stop_text_and_a_thought_over_a_pause_are_seen(model: Any) -> None:
    texts = {5: "<think>", 6: "</th", 7: "ink>", 8: "yes"}
    sampler = small.make_sampler(
        model, detokenize=lambda ids, context: "".join(texts.get(i, ".") for i in ids)
    )
    (prompt,) = small.make_prompts((4,))
    begun = Rollout(prompt, 0, (5, 9, 6), np.zeros(3, np.float32), "", "unfinished", seed=1)
    (cut,) = sampler.generate((), Sampling(max_tokens=4, temperature=0.0), 0, [begun])
    assert (len(cut.token_ids), cut.finish_reason) == (4, "length")
    stop = texts.get(cut.token_ids[-1], ".")
    sampling = Sampling(max_tokens=9, temperature=0.0, stop=(f"</th{stop}",))
    (stopped,) = sampler.generate((), sampling, 0, [begun])
    assert (stopped.token_ids, stopped.finish_reason) == (cut.token_ids, "stop")
    assert cut.thought_tokens == 4  # opened before the pause, and not closed
    closed = replace(begun, token_ids=(5, 9, 6, 7, 8))
    (answered,) = sampler.generate((), Sampling(max_tokens=6), 0, [closed])
    assert answered.thought_tokens == 4 and answered.text.startswith("<think>.</think>yes")


def test_one_token_and_no_prompt(model: Any, prompts: list[Prompt]) -> None:
    rollouts = small.sample(model, prompts, 2, n=2, max_tokens=1)
    assert [len(rollout.token_ids) for rollout in rollouts.values()] == [1] * 16
    assert small.sample(model, []) == {}


def test_a_rollout_is_handed_over_before_the_next_forward_pass(
    model: Any, prompts: list[Prompt]
) -> None:
    passes: list[None] = []
    model.register_forward_hook(lambda *_: passes.append(None))
    sampling = Sampling(n=8, max_tokens=24)
    for rollout in small.make_sampler(model).generate(prompts, sampling, 0):
        assert len(passes) == len(rollout.token_ids)


def test_at_most_max_num_seqs_rows_run_and_idle_rows_leave(
    model: Any, prompts: list[Prompt]
) -> None:
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    small.sample(model, prompts, 8, n=6, max_tokens=24)
    assert min(sizes) < 6 < max(sizes) == 8


def test_a_closed_iterator_frees_the_cache_and_keeps_modes(
    model: Any, prompts: list[Prompt]
) -> None:
    rollouts = small.make_sampler(model).generate(prompts, Sampling(n=8, max_tokens=24), 0)
    next(rollouts)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    held = count_caches()
    rollouts.close()
    assert count_caches() == held - 1


def count_caches() -> int:
    gc.collect()
    return sum(type(thing) is KVCache for thing in gc.get_objects())


class CastWeights(TorchDispatchMode):
    """Counts how often weights of a model are cast."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        self._weights = {weight.data_ptr() for weight in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        casts = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)
        if func in casts and args[0].data_ptr() in self._weights:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_low_precision_casts_a_weight_once_for_all_tokens(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small.build_model(family, initializer_range=0.1)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    sampler = small.make_sampler(model, compute=Compute(torch.device("cpu"), torch.bfloat16))

    def draw() -> tuple[Counter[int], dict[tuple[str, int], Rollout]]:
        rollouts = {}
        with CastWeights(model) as cast:
            for rollout in sampler.generate(small.make_prompts(), Sampling(max_tokens=12), 0):
                rollouts[rollout.key] = rollout
                now = dict(model.named_parameters(remove_duplicate=False))
                assert all(now[name] is weight for name, weight in parameters.items())
        return cast.counts, rollouts

    counts, rollouts = draw()
    assert set(counts.values()) == {1}
    assert small.logprob_gap(model, rollouts.values()) < 0.1
    monkeypatch.setattr(hf_sampler, "cast_layers", lambda model, dtype: [])
    counts_by_autocast, same = draw()
    assert counts_by_autocast.keys() == counts.keys() and min(counts_by_autocast.values()) > 1
    for key, rollout in rollouts.items():
        assert rollout.token_ids == same[key].token_ids
        np.testing.assert_array_equal(rollout.sampler_logprobs, same[key].sampler_logprobs)


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05, 0.0])
    draws = 20_000
    keys = np.array([stream_key(0, f"p{i}", 0) for i in range(draws)], dtype=np.uint64)
    uniforms = compute_uniforms(keys, np.full(draws, 3))
    tokens, _, _ = draw_tokens(probs.log().expand(draws, -1), Sampling(), uniforms)
    expected = probs[:5].numpy() * draws
    seen = np.bincount(tokens.numpy(), minlength=6)
    assert seen[5] == 0
    assert ((seen[:5] - expected) ** 2 / expected).sum() < 18.5  # 0.1 % of chi-square, 4 degrees


def test_one_stream_is_uniform_over_positions() -> None:
    keys = np.full(50_000, stream_key(0, "p", 0), dtype=np.uint64)
    uniforms = compute_uniforms(keys, np.arange(50_000))
    counts = np.histogram(uniforms, bins=20, range=(0, 1))[0]
    assert ((counts - 2500) ** 2 / 2500).sum() < 43.8  # 0.1 % of chi-square, 19 degrees
    assert abs(np.corrcoef(uniforms[1:], uniforms[:-1])[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("cut", "kept_values"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.75}, {1, 3}),
        ({"top_p": 0.95}, {1, 2, 3}),
        ({"top_k": 3, "top_p": 0.9}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {3}),  # 0.55 of all, 0.69 of the two that top-k leaves
        ({"top_k": 99}, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_the_most_likely(cut: dict[str, Any], kept_values: set[int]) -> None:
    logits = torch.tensor([0.04, 0.25, 0.16, 0.55]).log().expand(4000, -1)
    uniforms = np.linspace(0, 1, 4000, endpoint=False, dtype=np.float32)
    tokens, logprobs, _ = draw_tokens(logits, Sampling(**cut), uniforms)
    assert set(tokens.tolist()) == kept_values
    torch.testing.assert_close(logprobs, logits[0].log_softmax(-1)[tokens])


def test_the_largest_uniform_never_takes_an_impossible_token() -> None:
    logits = torch.full((1, 5), -torch.inf)
    logits[0, 1:3] = 0.0
    for uniform, token in ((0.0, 1), (1 - 2**-24, 2)):
        drawn, _, _ = draw_tokens(logits, Sampling(), np.array([uniform], dtype=np.float32))
        assert drawn.tolist() == [token]


def test_an_empty_prompt_is_named(model: Any) -> None:
    empty = replace(small.make_prompts([1])[0], uid="row-12", token_ids=())
    with pytest.raises(DataError, match="row-12 has no tokens"):
        small.make_sampler(model).generate([empty], Sampling(), 0)


@pytest.mark.parametrize(
    ("version", "cause"), [(0, "the weights of --model are damaged"), (3, "lower --lr")]
)
def test_broken_weights_are_told(
    version: int, cause: str, model: Any, prompts: list[Prompt]
) -> None:
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match=f"not finite.*{cause}"):
        list(small.make_sampler(model).generate(prompts, Sampling(max_tokens=2), version))


class SmallMemory:
    """A model's forward that runs out of memory above so many tokens in one pass or cache."""

    def __init__(self, model: Any, room: int, error: Exception) -> None:
        self.forward, self.room, self.error = model.forward, room, error
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.refused: list[int] = []

    def __call__(self, **kwargs: Any) -> Any:
        cache = kwargs["past_key_values"]
        # What is held anywhere counts, also a cache that nobody samples from any more.
        self.caches.add(cache)
        layers = [layer for held in self.caches for layer in held.layers[:1]]
        stored = sum(x.keys.shape[0] * x.get_seq_length() for x in layers if x.is_initialized)
        rows, columns = kwargs["input_ids"].shape
        if stored + rows * columns > self.room:
            self.refused.append(rows)
            raise self.error
        return self.forward(**kwargs)


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
)


@pytest.mark.parametrize(
    ("sampling", "error", "room"),
    [
        *(({"n": 3}, error, 100) for error in OUT_OF_MEMORY),
        *(({"n": 3}, OUT_OF_MEMORY[0], room) for room in (40, 300)),
        ({"n": 2, "temperature": 0.0}, OUT_OF_MEMORY[0], 100),
        ({"n": 1, "top_p": 0.7, "seed": 4}, OUT_OF_MEMORY[0], 40),
    ],
)
def test_out_of_memory_halves_what_is_sampled_at_once_and_changes_no_row(
    sampling: dict[str, Any],
    error: Exception,
    room: int,
    model: Any,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = small.tokens_of(small.sample(model, prompts, **sampling))
    memory, report = SmallMemory(model, room, error), []
    sampler = small.make_sampler(model)
    sampler.capacity.on_halving = report.append
    monkeypatch.setattr(model, "forward", memory)
    rollouts = list(sampler.generate(prompts, Sampling(**({"max_tokens": 12} | sampling)), 5))
    assert len(rollouts) == len(expected)
    assert {rollout.key: rollout.token_ids for rollout in rollouts} == expected
    assert bool(memory.refused) is bool(report), "each halving is told"
    assert report == sorted(report, reverse=True)
    assert sampler.capacity.halved_rows() in (*report[-1:], None)


@pytest.mark.parametrize("family", KINDS[1:])
def test_rows_of_states_start_again_when_memory_runs_out(
    family: str, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small.build_model(family)
    expected = small.tokens_of(small.sample(model, prompts, n=2))
    sampler, calls, forward = small.make_sampler(model), [], model.forward

    def run_out(**options: Any) -> Any:
        calls.append(None)
        if len(calls) == 12:
            raise torch.OutOfMemoryError
        return forward(**options)

    monkeypatch.setattr(model, "forward", run_out)
    rollouts = list(sampler.generate(prompts, Sampling(max_tokens=12, n=2), 0))
    assert sampler.capacity.rows < 64
    assert {rollout.key: rollout.token_ids for rollout in rollouts} == expected


def test_what_memory_allows_is_remembered_and_a_smaller_setting_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = small.build_model(), small.make_prompts((3, 9, 5, 14, 1, 9, 7))
    sampler, memory = small.make_sampler(model), SmallMemory(model, 100, OUT_OF_MEMORY[0])
    monkeypatch.setattr(model, "forward", memory)
    assert len(list(sampler.generate(prompts, Sampling(max_tokens=12, n=3), 0))) == 21
    remaining, memory.refused = sampler.capacity.halved_rows(), []
    assert remaining is not None and remaining < 21
    assert len(list(sampler.generate(prompts, Sampling(max_tokens=12, n=3), 0))) == 21
    assert not memory.refused
    for setting, expected in ((64, remaining), (remaining, None), (1, None)):
        resumed = small.make_sampler(model, setting)
        resumed.capacity.restore(remaining)
        assert resumed.capacity.rows == min(setting, remaining)
        assert resumed.capacity.halved_rows() == expected


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OUT_OF_MEMORY[0], UserError, "ran out of memory, even with one .*response_l"),
        (RuntimeError("size mismatch"), RuntimeError, "size mismatch"),
    ],
)
def test_an_error_that_halving_does_not_help_is_raised(
    error: Exception,
    raised: type[Exception],
    message: str,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "forward", SmallMemory(model, 10, error))
    with pytest.raises(raised, match=message):
        small.sample(model, small.make_prompts())


def test_a_sampler_on_a_gpu_holds_a_widened_head_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Compute(torch.device("meta"), torch.bfloat16)
    monkeypatch.setattr(Compute, "choose", lambda _: gpu)
    monkeypatch.setattr(hf_sampler, "build_shared_sampler", lambda model, *_: model)
    settings = {"path": EMBEDDED, "dtype": "bfloat16", "float32_head": True, "packing": False}
    model: Any = hf_sampler.build(complete({"model": settings}), None, None)
    head = model.get_output_embeddings()
    assert (type(head), head.weight.dtype) == (Float32Head, torch.bfloat16)
