"""Samplers against the model in float64: tokens, log-probs, seeds, new weights, sleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import Sampler, Sampling, Weights, build_sampler
from ppo_cli.engine.models import load_tokenizer
from ppo_cli.engine.models.lora import adapter_tensors
from ppo_cli.engine.samplers.vllm import CPU_BLOCK
from ppo_cli.planning.memory.devices import GIB
from ppo_cli.records import Prompt, Rollout
from ppo_cli.self_test.checks.runs import LIMITS, make_config
from ppo_cli.self_test.checks.training import LORA, make_learner, merge_adapter
from ppo_cli.self_test.results import Results, Setup

GREEDY = Sampling(temperature=0.0, max_tokens=12)
DRAWS = {
    "temperature 1": Sampling(n=4, max_tokens=12, seed=1),
    "temperature 0.7, top-k 5": Sampling(temperature=0.7, top_k=5, n=4, max_tokens=12, seed=2),
}
CHANGE = 0.1  # of new weights, as a share of each
PROMPTS = 8
LONG_PROMPT = 3 * CPU_BLOCK + 1  # tokens: three whole blocks of vLLM's cache


def check_hf_sampler(setup: Setup, results: Results) -> None:
    """Check the hf sampler."""
    _check_sampler(make_config(setup.device, rollout={"name": "hf"}), results)


def check_vllm_sampler(setup: Setup, results: Results) -> None:
    """Check vLLM; on GPUs also sleep and adapters."""
    # On GPUs with compiled graphs, as runs have them.
    rollout = {"name": "vllm", "gpu_memory_utilization": 0.3, "sleep": "discard"}
    rollout |= {"enforce_eager": setup.device == "cpu"}
    data = {"max_prompt_length": LONG_PROMPT, "max_response_length": GREEDY.max_tokens}
    config = make_config(setup.device, rollout=rollout, data=data)
    _check_sampler(config, results, sleeps=setup.device == "cuda")
    if setup.device == "cuda":
        with results.part("LoRA adapter"):
            lora = LORA | {"model": LORA["model"] | {"lora_merge": False}, "rollout": rollout}
            _check_adapter(make_config(setup.device, **lora), results)


class Exact:
    """The bundled model in float64, with replaceable weights."""

    def __init__(self, config: Config) -> None:
        folder = model_folder(config.model.path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.end_id = load_tokenizer(folder).eos_token_id
        self.weights = {n: p.detach().clone() for n, p in self._model.named_parameters()}

    @torch.no_grad()
    def logprobs_TV(self, rollout: Rollout, temperature: float = 1.0) -> Tensor:
        """Return the log-probs of the vocabulary at each token of a response."""
        ids = (*rollout.prompt.token_ids, *rollout.token_ids)
        inputs = {"input_ids": torch.tensor([ids]), "use_cache": False}
        output = functional_call(self._model, self.weights, kwargs=inputs)
        logits_TV: Tensor = output.logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        return (logits_TV / temperature).log_softmax(-1)


def make_prompts(tokenizer: Any) -> list[Prompt]:
    """Build prompts of different lengths for the bundled model."""
    texts = [f"{i} + {7 * i * i} =" for i in range(PROMPTS)]
    return [Prompt(f"p{i}", t, (), t, tuple(tokenizer(t).input_ids)) for i, t in enumerate(texts)]


def make_long_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """Repeat the tokens of each prompt up to the length that fills three blocks of a cache."""
    return [replace(p, token_ids=(p.token_ids * LONG_PROMPT)[:LONG_PROMPT]) for p in prompts]


def _check_sampler(config: Config, results: Results, *, sleeps: bool = False) -> None:
    """Compare a sampler with the exact model: responses, seeds, new weights and sleep."""
    tokenizer = load_tokenizer(model_folder(config.model.path))
    prompts, exact = make_prompts(tokenizer), Exact(config)
    limit = LIMITS[str(config.model.dtype)]
    sampler = build_sampler(config, tokenizer)
    try:
        # Compare with the exact model, greedy and with each way of drawing.
        with results.part("responses"):
            for name, sampling in {"greedy": GREEDY, **DRAWS}.items():
                rollouts = _sample(sampler, prompts, sampling)
                compare_logprobs(name, rollouts, exact, sampling, limit, results)
        # Seeds decide tokens, whichever other rows are sampled.
        with results.part("seeds"):
            sampling = DRAWS["temperature 1"]
            first, second, other = (
                _tokens(_sample(sampler, prompts, s))
                for s in (sampling, sampling, Sampling(n=4, max_tokens=12, seed=7))
            )
            results.require("the same seed gives other tokens", first == second)
            results.require("another seed gives the same tokens", first != other)
            spread = [{ids for (uid, _), ids in first.items() if uid == p.uid} for p in prompts]
            results.require("samples of a prompt are all the same", any(len(s) > 1 for s in spread))
        weights: Mapping[str, Tensor] | None = None
        with results.part("new weights"):
            weights = _load_other_weights(sampler, exact, 1)
            rollouts = _sample(sampler, prompts, GREEDY, 1)
            compare_logprobs("new weights", rollouts, exact, GREEDY, limit, results)
        # Long prompts fill the cache; their keys and values must not outlive their weights.
        if config.data.max_prompt_length >= LONG_PROMPT:
            with results.part("prefix cache"):
                long = make_long_prompts(prompts)
                for version in (1, 1, 2):
                    if version == 2:
                        weights = _load_other_weights(sampler, exact, version)
                    rollouts = _sample(sampler, long, GREEDY, version)
                    what = f"prompts of {LONG_PROMPT} tokens, weights {version}"
                    compare_logprobs(what, rollouts, exact, GREEDY, limit, results)
        # Sleep is checked with the new weights.
        if sleeps and weights is None:
            results.skip('sleep: skipped, because "new weights" failed')
        elif sleeps and weights is not None:
            with results.part("sleep", "sleep"):
                _check_sleep(sampler, prompts, weights, results)
    finally:
        sampler.close()


def _sample(
    sampler: Sampler, prompts: list[Prompt], sampling: Sampling, version: int = 0
) -> list[Rollout]:
    return sorted(sampler.generate(prompts, sampling, version), key=lambda r: r.key)


def _tokens(rollouts: list[Rollout]) -> dict[tuple[str, int], tuple[int, ...]]:
    return {rollout.key: rollout.token_ids for rollout in rollouts}


def compare_logprobs(
    name: str, rollouts: list[Rollout], exact: Exact, sampling: Sampling, limit: float,
    results: Results,
) -> None:  # fmt: skip
    """Compare the log-probs of responses, and require tokens that the sampling allows."""
    results.require(f"{name}: too few responses", len(rollouts) == PROMPTS * sampling.n)
    ended = all(exact.end_id not in rollout.token_ids[:-1] for rollout in rollouts)
    results.require(f"{name}: responses go on after the end token", ended)
    gaps, misses = [], 0
    for rollout in rollouts:
        all_TV = exact.logprobs_TV(rollout, sampling.temperature or 1.0)
        expected_T = all_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        gaps.append(float((torch.tensor(rollout.sampler_logprobs) - expected_T).abs().max()))
        count = 1 if sampling.temperature == 0 else sampling.top_k
        # Greedy and top-k sampling must stay among the likeliest tokens.
        if count > 0:
            least_T = all_TV.topk(count).values[:, -1]
            misses += int((expected_T < least_T - limit).sum())
    results.compare(f"log-probs, {name}", max(gaps), limit)
    results.require(f"{name}: {misses} tokens are not among the likeliest", misses == 0)


def _load_other_weights(sampler: Sampler, exact: Exact, version: int) -> Mapping[str, Tensor]:
    """Add noise to the exact model's weights, load them into the sampler too, and return them."""
    # Noise in every weight, so that old weights give other log-probs.
    generator = torch.Generator().manual_seed(version)
    for name, tensor in exact.weights.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        exact.weights[name] = tensor * (1 + CHANGE * noise)
    tensors = {name: tensor.float() for name, tensor in exact.weights.items()}
    sampler.load_weights(Weights(tensors, version))
    return tensors


def _check_sleep(
    sampler: Sampler, prompts: list[Prompt], weights: Mapping[str, Tensor], results: Results
) -> None:
    """Check that sleep frees memory, and that the same weights then sample the same tokens."""
    awake = _tokens(_sample(sampler, prompts, GREEDY, 2))
    # Sleep must free memory.
    free_bytes = torch.cuda.mem_get_info()[0]
    sampler.sleep()
    gained_bytes = torch.cuda.mem_get_info()[0] - free_bytes
    results.require("sleep frees no memory", gained_bytes > 0)
    results.figures["sleep_frees_gib"] = round(gained_bytes / GIB, 2)
    sampler.wake_weights()
    sampler.load_weights(Weights(weights, 3))
    sampler.wake_cache()
    second_draw = _tokens(_sample(sampler, prompts, GREEDY, 3))
    results.require("other tokens after sleep with the same weights", second_draw == awake)


def _check_adapter(config: Config, results: Results) -> None:
    """Check that an adapter survives sleep, and samples as the trainer computes."""
    tokenizer = load_tokenizer(model_folder(config.model.path))
    prompts, exact = make_prompts(tokenizer), Exact(config)
    model = make_learner(config).policy.model
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(t.shape, generator=generator) * 0.05)
        for name, t in adapter_tensors(model)
    }
    merge_adapter(exact.weights, tensors, config.model.lora_alpha / config.model.lora_rank)
    sampler = build_sampler(config, tokenizer)
    try:
        # The second round is after sleep.
        for version in (1, 2):
            sampler.load_weights(Weights(tensors, version, adapter=True))
            rollouts = _sample(sampler, prompts, GREEDY, version)
            limit = LIMITS[str(config.model.dtype)]
            compare_logprobs("LoRA adapter", rollouts, exact, GREEDY, limit, results)
            sampler.sleep()
            sampler.wake_weights()
            sampler.wake_cache()
    finally:
        sampler.close()
