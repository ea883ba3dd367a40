"""LoRA against plain PEFT: the same adapter, the same step; switched off it is the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.config.placement import publishes_adapter
from ppo_cli.config.schema.run import Config
from ppo_cli.engine.models import Policy
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from ppo_cli.engine.models.lora import (
    adapt,
    adapter_tensors,
    merged_tensors,
    reference_of,
    without_adapter,
)
from tests.engine.adapted_models import (
    FAMILIES,
    IDS,
    TINY,
    adapted,
    config,
    gathered,
    llama,
    logits,
    trained,
)


def policy_of(model: Any) -> Policy:
    return Policy(model, model.base_model, model.get_output_embeddings())


def token_logprobs(policy: Policy) -> Tensor:
    hidden_NH = policy.hidden_BLH(IDS)[0, :-1]
    results, _ = gather_logprobs_entropy(hidden_NH, policy.head, IDS[0, 1:], 0.7, 4, False)
    return results


def test_without_a_rank_there_is_no_adapter() -> None:
    assert adapt(Config().model, 1) is None
    assert not publishes_adapter(Config())
    assert publishes_adapter(config()) and not publishes_adapter(config(lora_merge=True))


@pytest.mark.parametrize("make", FAMILIES)
def test_a_new_adapter_changes_nothing(make: Callable[[], Any]) -> None:
    assert torch.equal(logits(adapted(make)), logits(make()))


def test_only_the_adapter_is_trained_and_counted() -> None:
    model = adapted(llama)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name in names)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # rank * (in + out) of q, k, v, o, gate, up and down, in each of two layers.
    wide = (16 + 16) + (16 + 8) + (16 + 8) + (16 + 16) + 3 * (16 + 32)
    assert counted == sum(t.numel() for _, t in adapter_tensors(model)) == 2 * 3 * wide


@pytest.mark.parametrize("make", FAMILIES)
def test_embeddings_and_head_are_left_alone(make: Callable[[], Any]) -> None:
    model = adapted(make)
    for end in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert not hasattr(end, "lora_A")
    tied = model.config.tie_word_embeddings
    assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_a_comes_from_the_seed_alone() -> None:
    torch.manual_seed(123)
    first = {name: t.clone() for name, t in adapter_tensors(adapted(llama))}
    torch.manual_seed(456)
    before = torch.get_rng_state()
    inject = adapt(config().model, 42)
    assert inject is not None
    model = llama()
    torch.set_rng_state(before)
    repeated = dict(adapter_tensors(inject(model)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], t) for name, t in repeated.items())
    other = dict(adapter_tensors(adapted(llama, seed=43)))
    assert not any(torch.equal(first[n], t) for n, t in other.items() if "lora_A" in n)


def test_it_is_put_into_a_model_without_storage() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    inject = adapt(config().model, 42)
    assert inject is not None
    shapes = {name: t.shape for name, t in adapter_tensors(inject(model))}
    assert {t.device.type for t in model.parameters()} == {"meta"}
    assert shapes == {name: t.shape for name, t in adapter_tensors(adapted(llama))}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_plain_peft(checkpointing: bool) -> None:
    actual, base = adapted(llama), llama()
    torch.manual_seed(42)
    reference: Any = get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if checkpointing:
        checkpoint_blocks(actual)
    for model in (actual, reference):
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(2):  # in the first, B being zero, A has no gradient
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {
        name.replace(".default.", "."): p
        for name, p in reference.named_parameters()
        if "lora_" in name
    }
    results = dict(adapter_tensors(actual))
    assert list(results) == list(expected)
    assert all(torch.equal(results[name], p) for name, p in expected.items())
    assert not torch.equal(logits(actual), logits(llama()))


@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_off_is_the_base_exactly(make: Callable[[], Any], training: bool) -> None:
    base, model = make(), trained(adapted(make))
    model.train(training)
    policy = policy_of(model)
    on = token_logprobs(policy)
    assert torch.equal(token_logprobs(reference_of(policy)), token_logprobs(policy_of(base)))
    assert torch.equal(token_logprobs(policy), on)
    assert not torch.allclose(token_logprobs(reference_of(policy)), on, atol=1e-3)


def test_the_reference_costs_no_memory_and_no_gradient() -> None:
    model = trained(adapted(llama))
    policy = policy_of(model)
    reference = reference_of(policy)
    assert reference.model is model
    assert not reference.hidden_BLH(IDS).requires_grad
    assert policy.hidden_BLH(IDS).requires_grad


def test_a_reference_pass_amid_checkpointed_steps_changes_no_gradient() -> None:
    def gradients(with_reference: bool) -> list[Tensor]:
        model = trained(adapted(llama))
        checkpoint_blocks(model)
        policy = policy_of(model)
        loss = token_logprobs(policy).sum()
        if with_reference:
            reference_of(policy).hidden_BLH(IDS)
        loss.backward()
        results = [t.grad for _, t in adapter_tensors(model)]
        return [grad for grad in results if grad is not None]

    plain = gradients(False)
    assert len(plain) == 28
    assert all(torch.equal(a, b) for a, b in zip(gradients(True), plain, strict=True))


def test_an_error_inside_switches_the_adapter_on_again() -> None:
    model = trained(adapted(llama))
    on = logits(model)
    with pytest.raises(ZeroDivisionError), without_adapter(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), on)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def gradients_of(model: Any) -> list[Tensor]:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    results = [tensor.grad for _, tensor in adapter_tensors(model)]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in results]


def test_a_sharded_model_is_the_same(one_rank: Any) -> None:
    model, plain = sharded(trained(adapted(llama)), one_rank), trained(adapted(llama))
    with without_adapter(model):
        assert torch.equal(logits(model), logits(llama()))
    assert torch.equal(logits(model), logits(plain))
    for actual, reference in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(actual, reference)
    merged = dict(merged_tensors(model, lambda tensor: tensor.full_tensor().detach()))
    for name, tensor in merged_tensors(plain, gathered):
        assert torch.equal(merged[name], tensor), name


def test_a_reference_pass_comes_first_and_gradients_keep_their_dtype(one_rank: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for reference_first in (False, True):
        model = sharded(trained(adapted(llama)), one_rank, mp_policy=precision)
        if reference_first:
            with without_adapter(model):
                logits(model)
        results.append(gradients_of(model))
    assert {grad.dtype for grad in results[1]} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
