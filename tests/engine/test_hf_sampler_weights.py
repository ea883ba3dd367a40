"""A Hugging Face sampler with a model of its own takes new weights, whole or as an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ppo_cli.algo.batch import build_batch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Weights, build_sampler
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_policy, load_tokenizer
from ppo_cli.engine.models.lora import adapt, adapter_tensors
from ppo_cli.errors import MissingPart, ModelError
from ppo_cli.planning.resolve import resolve
from ppo_cli.records import Prompt
from tests.engine.packed_steps import scored
from tests.engine.small_samplers import logprob_gap
from tests.settings import complete

SAMPLING = Sampling(n=3, max_tokens=16)
PATH = model_folder("embedded")


def read_config(*args: str) -> Config:
    settings = ["rollout.name=hf", "model.path=embedded", *args]
    resolved = resolve(flags={}, preset=None, config_files=[], overrides=settings, environ={})
    return complete(resolved.requested, resolved.machine)


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(PATH)


@pytest.fixture
def prompts(tokenizer: Any) -> list[Prompt]:
    ids = tuple(tokenizer("<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    return [Prompt("p", "2+2=", (), "2+2=", ids)]


def change_all(model: Any) -> Weights:
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.02)
    return Weights({n: w.detach().clone() for n, w in model.named_parameters()}, 1)


def change_in_place(model: Any) -> Weights:
    """As weights that stay: what is written last is what samples."""
    tensors = {n: w.detach().clone() for n, w in model.named_parameters()}
    return replace(change_all(model), tensors=tensors, persistent=True)


def change_adapter(model: Any) -> Weights:
    for _, tensor in adapter_tensors(model):
        tensor.data.normal_(std=0.3)
    return Weights({n: t.detach().clone() for n, t in adapter_tensors(model)}, 1, adapter=True)


@pytest.mark.parametrize(
    ("args", "change"),
    [((), change_all), ((), change_in_place), (("model.lora_rank=4",), change_adapter)],
)
def test_new_weights_are_the_ones_that_sample(
    args: tuple[str, ...], change: Callable[[Any], Weights], tokenizer: Any, prompts: list[Prompt]
) -> None:
    config = read_config(*args)
    if config.model.lora_rank:
        pytest.importorskip("peft")
    sampler = build_sampler(config, tokenizer)
    model = load_policy(PATH).model
    before = list(sampler.generate(prompts, SAMPLING, 0))
    assert logprob_gap(model, before) < 1e-4
    if (inject := adapt(config.model, config.trainer.seed)) is not None:
        inject(model)
    torch.manual_seed(0)
    sampler.sleep()
    sampler.wake_weights()
    sampler.wake_cache()
    weights = change(model)
    assert sampler.load_weights(weights) is weights.persistent
    if weights.persistent:
        for name, weight in model.named_parameters():
            weights.tensors[name].copy_(weight.detach())
    after = list(sampler.generate(prompts, SAMPLING, 1))
    assert logprob_gap(model, after) < 1e-4 < 1e-2 < logprob_gap(model, before)
    assert {rollout.weight_version for rollout in after} == {1}
    sampler.close()
    sampler.close()


def test_old_logprobs_of_the_sampler_are_those_of_the_actor(
    tokenizer: Any, prompts: list[Prompt]
) -> None:
    results = []
    for mode in ("null", "false"):
        config = read_config(
            f"algorithm.rollout_correction.bypass_mode={mode}", "rollout.temperature=0.8"
        )
        engine = LocalEngine(config, tokenizer, total_steps=2)
        sampling = replace(SAMPLING, temperature=0.8, top_k=40)
        rollouts = sorted(engine.generate(prompts, sampling), key=lambda r: r.sample)
        batch = build_batch(rollouts, tokenizer.pad_token_id)
        results.append(engine.annotate(batch))
        sums = engine.step(MiniBatch(scored(results[-1], seed=3), actor=True, critic=True))
        total, count = sums["ppo_ratio"]
        assert total / count == pytest.approx(1, abs=1e-5) and sums["clip_fraction"][0] == 0
        engine.publish()
        assert engine.annotate(batch).measures_sampler  # the weights are no longer those
    reused, computed = results
    assert computed.measures_sampler and not reused.measures_sampler
    for name in ("old_logprobs_BT", "entropy_BT", "ref_logprobs_BT", "values_BT"):
        torch.testing.assert_close(
            getattr(reused, name), getattr(computed, name), atol=1e-5, rtol=1e-5, msg=name
        )


def test_weights_of_another_model_are_a_bug(tokenizer: Any) -> None:
    sampler = build_sampler(read_config(), tokenizer)
    with pytest.raises(RuntimeError, match="not those of this model"):
        sampler.load_weights(Weights({"odd": torch.zeros(1)}, 1))
    with pytest.raises(ModelError, match="does not fit the model"):
        sampler.load_weights(Weights({"odd": torch.zeros(1)}, 1, adapter=True))


def test_a_sampler_that_is_not_installed_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPart, match="scripts/setup vllm"):
        build_sampler(read_config("rollout.name=vllm"), None)
