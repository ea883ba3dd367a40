"""LoRA against plain PEFT: the same adapter, the same step; switched off it is the base."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.engine.models import Policy, lora
from ppo_cli.engine.models.gradient_checkpointing import checkpoint_blocks
from tests.engine import adapted_models as tiny
from tests.settings import complete


def policy_of(model: Any) -> Policy:
    return Policy(model, model.base_model, model.get_output_embeddings())


def token_logprobs(policy: Policy) -> Tensor:
    hidden_NH = policy.hidden_BLH(tiny.IDS)[0, :-1]
    results, _ = gather_logprobs_entropy(hidden_NH, policy.head, tiny.IDS[0, 1:], 0.7, 4, False)
    return results


@pytest.mark.parametrize(
    ("model", "publishes"),
    [({}, False), ({"lora_rank": 3}, True), ({"lora_rank": 3, "lora_merge": True}, False)],
)
def test_an_adapter_is_published_where_it_has_a_rank_and_is_not_merged(
    model: dict[str, Any], publishes: bool
) -> None:
    config = complete({"model": model})
    assert (lora.adapt(config.model, 1) is None) is not bool(model)
    assert config.model.publishes_adapter is publishes


@pytest.mark.parametrize("kind", tiny.FAMILIES)
def test_a_new_adapter_changes_no_logits_and_no_ends(kind: str) -> None:
    model = tiny.adapted(kind)
    assert torch.equal(tiny.logits(model), tiny.logits(tiny.base(kind)))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    assert not any(hasattr(end, "lora_A") for end in ends)
    assert model.config.tie_word_embeddings == (ends[0].weight is ends[1].weight)


def test_only_the_adapter_is_trained_and_counted() -> None:
    model = tiny.adapted()
    trainable = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    assert all(".lora_" in name for name, _ in trainable)
    # rank * (in + out) of q, k, v, o, gate, up and down, in each of two layers.
    wide = (32 + 32) + (32 + 16) + (32 + 16) + (32 + 32) + 3 * (32 + 48)
    counted = sum(count for _, count in trainable)
    assert counted == sum(t.numel() for _, t in lora.adapter_tensors(model)) == 2 * 3 * wide


def test_a_comes_from_the_seed_alone() -> None:
    first = {name: t.clone() for name, t in lora.adapter_tensors(tiny.adapted())}
    model = tiny.base()
    torch.manual_seed(456)
    before = torch.get_rng_state()
    repeated = dict(lora.adapter_tensors(tiny.inject(model)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], t) for name, t in repeated.items())
    other = dict(lora.adapter_tensors(tiny.inject(tiny.base(), seed=43)))
    assert not any(torch.equal(first[n], t) for n, t in other.items() if "lora_A" in n)


def test_it_is_put_into_a_model_without_storage() -> None:
    expected = tiny.adapted()
    with torch.device("meta"):
        empty = type(expected)(expected.config)
    shapes = {name: t.shape for name, t in lora.adapter_tensors(tiny.inject(empty))}
    assert {t.device.type for t in empty.parameters()} == {"meta"}
    assert shapes == {name: t.shape for name, t in lora.adapter_tensors(expected)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_plain_peft(checkpointing: bool) -> None:
    actual, plain = tiny.adapted(), tiny.base()
    torch.manual_seed(42)
    settings = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    reference: Any = get_peft_model(plain, settings)
    if checkpointing:
        checkpoint_blocks(actual)
    for model in (actual, reference):
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(2):  # in the first, B being zero, A has no gradient
            model(input_ids=tiny.IDS, labels=tiny.IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = [(n, p) for n, p in reference.named_parameters() if "lora_" in n]
    for (name, tensor), (peft_name, p) in zip(lora.adapter_tensors(actual), expected, strict=True):
        assert name == peft_name.replace(".default.", ".") and torch.equal(tensor, p), name
    assert not torch.equal(tiny.logits(actual), tiny.logits(tiny.base()))


@pytest.mark.parametrize("kind", tiny.FAMILIES)
@pytest.mark.parametrize("training", [False, True])
def test_off_is_the_base_exactly(kind: str, training: bool) -> None:
    policy = policy_of(tiny.trained(tiny.adapted(kind)).train(training))
    on, plain = token_logprobs(policy), token_logprobs(policy_of(tiny.base(kind)))
    assert torch.equal(token_logprobs(lora.reference_of(policy)), plain)
    assert torch.equal(token_logprobs(policy), on)
    assert not torch.allclose(token_logprobs(lora.reference_of(policy)), on, atol=1e-3)


def test_the_reference_costs_no_memory_and_no_gradient() -> None:
    policy = policy_of(tiny.trained(tiny.adapted()))
    reference = lora.reference_of(policy)
    assert reference.model is policy.model
    assert not reference.hidden_BLH(tiny.IDS).requires_grad
    assert policy.hidden_BLH(tiny.IDS).requires_grad


def test_a_reference_pass_amid_checkpointed_steps_changes_no_gradient() -> None:
    def gradients(with_reference: bool) -> list[Tensor]:
        model = tiny.trained(tiny.adapted())
        checkpoint_blocks(model)
        policy = policy_of(model)
        loss = token_logprobs(policy).sum()
        if with_reference:
            lora.reference_of(policy).hidden_BLH(tiny.IDS)
        loss.backward()
        results = [t.grad for _, t in lora.adapter_tensors(model)]
        return [grad for grad in results if grad is not None]

    plain = gradients(False)
    assert len(plain) == 28
    assert all(torch.equal(a, b) for a, b in zip(gradients(True), plain, strict=True))


def test_an_error_inside_switches_the_adapter_on_again() -> None:
    model = tiny.trained(tiny.adapted())
    on = tiny.logits(model)
    with pytest.raises(ZeroDivisionError), lora.without_adapter(model):
        raise ZeroDivisionError
    assert torch.equal(tiny.logits(model), on)


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
    model(input_ids=tiny.IDS, labels=tiny.IDS, use_cache=False).loss.backward()
    results = [tensor.grad for _, tensor in lora.adapter_tensors(model)]
    return [getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in results]


def test_a_sharded_model_is_the_same(one_rank: Any) -> None:
    plain = tiny.trained(tiny.adapted())
    model = sharded(tiny.trained(tiny.adapted()), one_rank)
    with lora.without_adapter(model):
        assert torch.equal(tiny.logits(model), tiny.logits(tiny.base()))
    assert torch.equal(tiny.logits(model), tiny.logits(plain))
    for actual, reference in zip(gradients_of(model), gradients_of(plain), strict=True):
        torch.testing.assert_close(actual, reference)
    merged = dict(lora.merged_tensors(model, lambda tensor: tensor.full_tensor().detach()))
    for name, tensor in lora.merged_tensors(plain, tiny.gathered):
        assert torch.equal(merged[name], tensor), name


def test_a_reference_pass_comes_first_and_gradients_keep_their_dtype(one_rank: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for reference_first in (False, True):
        model = sharded(tiny.trained(tiny.adapted()), one_rank, mp_policy=precision)
        if reference_first:
            with lora.without_adapter(model):
                tiny.logits(model)
        results.append(gradients_of(model))
    assert {grad.dtype for grad in results[1]} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
