"""A Hugging Face sampler with a model of its own takes new weights, whole or as an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ppo_cli.algo.batch import build_batch
from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.resolve import resolve
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling, Weights, build_sampler
from ppo_cli.engine.learner import LocalEngine
from ppo_cli.engine.models import load_policy, load_tokenizer
from ppo_cli.engine.models.lora import adapt, adapter_tensors
from ppo_cli.errors import MissingPart, ModelError
from ppo_cli.records import Prompt, Rollout
from tests.engine.packed_steps import scored

SAMPLING = Sampling(n=3, max_tokens=16)


def read_config(*args: str) -> Config:
    settings = ["rollout.name=hf", "model.path=embedded", *args]
    return resolve(flags={}, preset=None, config_files=[], overrides=settings, environ={}).config


def make_prompt(tokenizer: Any) -> Prompt:
    ids = tuple(tokenizer("<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    return Prompt("p", "2+2=", (), "2+2=", ids)


@torch.no_grad()
def gap(model: Any, rollouts: list[Rollout]) -> float:
    gaps = []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]])
        logits = model(ids).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        chosen = torch.tensor(rollout.token_ids)[:, None]
        logprobs = logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
        gaps.append(np.abs(logprobs - rollout.sampler_logprobs).max())
    return float(max(gaps))


def shake_all(model: Any) -> Weights:
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.02)
    return Weights({n: w.detach().clone() for n, w in model.named_parameters()}, 1)


def shake_in_place(model: Any) -> Weights:
    """As weights that stay: what is written last is what samples."""
    tensors = {n: w.detach().clone() for n, w in model.named_parameters()}
    return replace(shake_all(model), tensors=tensors, persistent=True)


def shake_adapter(model: Any) -> Weights:
    for _, tensor in adapter_tensors(model):
        tensor.data.normal_(std=0.3)
    return Weights({n: t.detach().clone() for n, t in adapter_tensors(model)}, 1, adapter=True)


@pytest.mark.parametrize(
    ("args", "shake"),
    [((), shake_all), ((), shake_in_place), (("model.lora_rank=4",), shake_adapter)],
)
def test_new_weights_are_the_ones_that_sample(
    args: tuple[str, ...], shake: Callable[[Any], Weights]
) -> None:
    config = read_config(*args)
    if config.model.lora_rank:
        pytest.importorskip("peft")
    tokenizer = load_tokenizer(model_folder("embedded"))
    prompts = [make_prompt(tokenizer)]
    sampler = build_sampler(config, tokenizer)
    model = load_policy(model_folder("embedded")).model
    before = list(sampler.generate(prompts, SAMPLING, 0))
    assert gap(model, before) < 1e-4
    if (inject := adapt(config.model, config.trainer.seed)) is not None:
        inject(model)
    torch.manual_seed(0)
    sampler.sleep()
    sampler.wake_weights()
    sampler.wake_cache()
    weights = shake(model)
    assert sampler.load_weights(weights) is weights.persistent
    if weights.persistent:
        for name, weight in model.named_parameters():
            weights.tensors[name].copy_(weight.detach())
    after = list(sampler.generate(prompts, SAMPLING, 1))
    assert gap(model, after) < 1e-4 < 1e-2 < gap(model, before)
    assert {rollout.weight_version for rollout in after} == {1}
    sampler.close()
    sampler.close()


def test_old_logprobs_of_the_sampler_are_those_of_the_actor() -> None:
    tokenizer = load_tokenizer(model_folder("embedded"))
    results = {}
    for mode in ("null", "false"):
        config = read_config(
            f"algorithm.rollout_correction.bypass_mode={mode}", "rollout.temperature=0.8"
        )
        engine = LocalEngine(config, tokenizer, total_steps=2)
        sampling = replace(SAMPLING, temperature=0.8, top_k=40)
        drawn = sorted(engine.generate([make_prompt(tokenizer)], sampling), key=lambda r: r.sample)
        batch = build_batch(drawn, tokenizer.pad_token_id)
        results[mode] = engine.annotate(batch)
        scores = scored(results[mode], seed=3)
        sums = engine.step(MiniBatch(scores, actor=True, critic=True))
        total, count = sums["ppo_ratio"]
        assert total / count == pytest.approx(1, abs=1e-5) and sums["clip_fraction"][0] == 0
        engine.publish()
        assert engine.annotate(batch).measures_sampler  # the weights are no longer those
    reused, computed = results.values()
    assert computed.measures_sampler and not reused.measures_sampler
    for name in ("old_logprobs_BT", "entropy_BT", "ref_logprobs_BT", "values_BT"):
        torch.testing.assert_close(
            getattr(reused, name), getattr(computed, name), atol=1e-5, rtol=1e-5, msg=name
        )


def test_weights_of_another_model_are_a_bug() -> None:
    sampler = build_sampler(read_config(), load_tokenizer(model_folder("embedded")))
    with pytest.raises(RuntimeError, match="not those of this model"):
        sampler.load_weights(Weights({"odd": torch.zeros(1)}, 1))
    with pytest.raises(ModelError, match="does not fit the model"):
        sampler.load_weights(Weights({"odd": torch.zeros(1)}, 1, adapter=True))


def test_a_sampler_that_is_not_installed_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPart, match="scripts/setup vllm"):
        build_sampler(read_config("rollout.name=vllm"), None)
