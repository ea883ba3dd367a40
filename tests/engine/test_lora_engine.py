"""A whole engine with LoRA: its reference, its sampler, its checkpoint and what is exported."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_cli.algo.batch import AnnotatedBatch, build_batch
from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.config.schema.algorithm import CriticModel
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.base import MiniBatch, Sampling
from ppo_cli.engine.export import write_model
from ppo_cli.engine.learner import Learner, LocalEngine
from ppo_cli.engine.models import Policy, ValueModel, load_tokenizer
from ppo_cli.engine.models.lora import PREFIX, adapt, adapter_tensors
from ppo_cli.engine.models.policy import adapted
from ppo_cli.engine.models.value_models import load_value_model
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt
from tests.engine.packed_steps import scored
from tests.engine.small_samplers import forward_logprobs
from tests.settings import complete

MODEL = str(bundled_path("embedded", "model"))
GREEDY = Sampling(temperature=0.0, max_tokens=6)
both_precisions = pytest.mark.parametrize(
    "quantization",
    [
        None,
        pytest.param("nf4", marks=pytest.mark.skipif(
            importlib.util.find_spec("bitsandbytes") is None,
            reason="the extra quantised installs bitsandbytes",
        )),
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def config(**model: Any) -> Config:
    return complete(
        {
            "model": {"path": MODEL, "lora_rank": 4, **model},
            # Log-probs of the actor itself, whatever the sampler found.
            "algorithm": {
                "use_kl_in_reward": True, "rollout_correction": {"bypass_mode": False},
            },
            "critic": {"model": {"lora_rank": 3}, "optim": {"lr": 1e-2, "lr_warmup_steps": 0}},
            "actor": {"optim": {"lr": 1e-2, "lr_warmup_steps": 0}},
        }
    )  # fmt: skip


def engine_of(tokenizer: Any, **model: Any) -> LocalEngine:
    return LocalEngine(config(**model), tokenizer, total_steps=4)


def sampled(engine: LocalEngine, tokenizer: Any) -> list[Any]:
    texts = ("1+2=", "13+4=", "7+7=", "20+5=")
    prompts = [Prompt(t, t, (), t, tuple(tokenizer(t).input_ids)) for t in texts]
    return sorted(engine.generate(prompts, GREEDY), key=lambda rollout: rollout.key)


def annotated(engine: LocalEngine, rollouts: list[Any]) -> AnnotatedBatch:
    return engine.annotate(build_batch(rollouts, pad_token_id=0))


def train(engine: LocalEngine, batch: AnnotatedBatch) -> dict[str, tuple[float, float]]:
    for _ in range(2):  # B starts at zero, so that A is moved from the second step on
        results = engine.step(MiniBatch(scored(batch, seed=3), actor=True, critic=True))
    engine.publish()
    return results


@both_precisions
def test_the_reference_stays_and_the_policy_moves(quantization: str | None, tokenizer: Any) -> None:
    engine = engine_of(tokenizer, quantization=quantization)
    model = engine._learner.policy.model
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    if quantization:  # two weights of each layer in a byte
        layers = AutoModelForCausalLM.from_pretrained(MODEL).model.layers
        quantised = sum(p.nbytes for p in frozen.values() if p.dtype == torch.uint8)
        assert quantised == sum(p.numel() for p in layers.parameters() if p.ndim == 2) / 2
    rollouts = sampled(engine, tokenizer)
    before = annotated(engine, rollouts)
    assert before.ref_logprobs_BT is not None
    assert torch.equal(before.old_logprobs_BT, before.ref_logprobs_BT)
    assert train(engine, before)["grad_norm"][0] > 0
    after = annotated(engine, rollouts)
    assert after.ref_logprobs_BT is not None
    assert torch.equal(after.ref_logprobs_BT, before.ref_logprobs_BT)
    assert (after.old_logprobs_BT - before.old_logprobs_BT).abs().max() > 0.05
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    for rollout in sampled(engine, tokenizer):
        expected = torch.from_numpy(forward_logprobs(model, rollout))
        actual = torch.from_numpy(rollout.sampler_logprobs)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_what_is_published_is_the_adapter(tokenizer: Any) -> None:
    engine = engine_of(tokenizer)
    train(engine, annotated(engine, sampled(engine, tokenizer)))
    learner: Learner = engine._learner
    weights = learner.weights()
    assert weights is not None and weights.adapter
    live = dict(adapter_tensors(learner.policy.model))
    assert weights.tensors.keys() == live.keys()
    assert all(torch.equal(weights.tensors[name], t) for name, t in live.items())


@both_precisions
def test_a_checkpoint_goes_on_and_is_exported(
    quantization: str | None, tokenizer: Any, tmp_path: Path
) -> None:
    engine = engine_of(tokenizer, quantization=quantization)
    train(engine, annotated(engine, sampled(engine, tokenizer)))
    engine.save(tmp_path).result(timeout=60)
    files = {path.name for path in (tmp_path / "actor").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert not any(name.startswith("model") for name in files)
    critic_files = {path.name for path in (tmp_path / "critic").iterdir()}
    assert critic_files | {"generation_config.json"} == files
    rollouts = sampled(engine, tokenizer)
    other = engine_of(tokenizer, quantization=quantization)
    other.load(tmp_path)
    first, second = annotated(engine, rollouts), annotated(other, rollouts)
    assert torch.equal(first.old_logprobs_BT, second.old_logprobs_BT)
    assert first.values_BT is not None and second.values_BT is not None
    assert first.values_BT.abs().max() > 0.01
    assert torch.equal(first.values_BT, second.values_BT)
    assert train(engine, first) == train(other, second)
    # Two updates were published, one of them before the checkpoint.
    assert {rollout.weight_version for rollout in sampled(other, tokenizer)} == {2}

    for name, bits in (("actor", quantization), ("critic", None)):
        (tmp_path / f"whole {name}").mkdir()
        write_model(tmp_path / name, tmp_path / f"whole {name}", quantization=bits)
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "whole actor")
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    assert torch.equal(stored.lm_head.weight, base.lm_head.weight)
    assert stored.dtype == torch.float32
    settings = config(path=str(tmp_path / "whole actor"), lora_rank=0).model_dump()
    settings["critic"]["model"] = {"path": str(tmp_path / "whole critic")}
    exported = LocalEngine(complete(settings), tokenizer, total_steps=4)
    merged = annotated(exported, rollouts)
    torch.testing.assert_close(merged.old_logprobs_BT, first.old_logprobs_BT, atol=1e-4, rtol=0)
    torch.testing.assert_close(merged.values_BT, first.values_BT, atol=1e-4, rtol=0)


def test_a_critic_step_trains_its_adapter_and_its_head_alone(tokenizer: Any) -> None:
    engine = engine_of(tokenizer)
    critic = engine._learner._critic
    assert critic is not None
    model = critic.value_model.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = annotated(engine, sampled(engine, tokenizer))
    results = [train(engine, batch)["value_loss"][0] for _ in range(2)]
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    names = {name.removeprefix(PREFIX) for name, _ in adapter_tensors(model)}
    assert {name.replace(".default.", ".") for name in moved} == names
    assert {"score.weight", "score.bias"} < names and len(names) == 2 + 2 * 7 * 2
    assert 0 < results[1] < results[0]


def test_targets_of_a_critic_are_named_by_its_own_key() -> None:
    with pytest.raises(ModelError, match=r"critic\.model\.target_modules: .*'score' means score"):
        adapted(load_value_model(MODEL), adapt(CriticModel(lora_rank=1, target_modules="score"), 1))


@pytest.mark.parametrize(
    ("shared", "critic_setting", "critic"),
    [(True, None, True), (True, False, False), (False, True, True)],
)
def test_the_critic_recomputes_activations_as_set_for_it(
    shared: bool, critic_setting: bool | None, critic: bool, tokenizer: Any
) -> None:
    settings = config(enable_gradient_checkpointing=shared).model_dump()
    # Unset, it is as the actor's.
    del settings["critic"]["model"]["enable_gradient_checkpointing"]
    if critic_setting is not None:
        settings["critic"]["model"]["enable_gradient_checkpointing"] = critic_setting
    learner = Learner(complete(settings), tokenizer, total_steps=1)
    assert learner._critic is not None
    assert forward_passes(learner.policy) == 1 + shared
    assert forward_passes(learner._critic.value_model) == 1 + critic


def forward_passes(loaded: Policy | ValueModel) -> int:
    """How often a module inside the first block runs in one forward and backward pass."""
    block: Any = loaded.backbone
    calls: list[object] = []
    handle = block.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    loaded.hidden_BLH(torch.arange(4, 30)[None]).sum().backward()
    handle.remove()
    return len(calls)
