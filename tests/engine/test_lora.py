"""LoRA against plain PEFT: the same adapter, the same step, the same files; off is the base."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ppo_cli.algo.tokens import gather_logprobs_entropy
from ppo_cli.config.schema import Config
from ppo_cli.engine.base import Sampling
from ppo_cli.engine.hf_sampler import HFSampler
from ppo_cli.engine.lora import (
    ADAPTER_WEIGHTS,
    adapt,
    adapter_tensors,
    load_adapter,
    load_merged,
    merged_tensors,
    publishes_adapter,
    reference_of,
    without_adapter,
    write_adapter_config,
)
from ppo_cli.engine.models import Policy, load_policy
from ppo_cli.errors import ModelError
from ppo_cli.records import Prompt

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def llama() -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**TINY))


def qwen() -> Any:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True))


def gemma() -> Any:
    torch.manual_seed(1)
    return Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=2.0))


def gpt2() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


FAMILIES = pytest.mark.parametrize("make", [llama, qwen, gemma, gpt2])


def config(seed: int = 42, **model: Any) -> Config:
    settings = {"lora_rank": 3, "lora_alpha": 6, **model}
    return Config.model_validate({"model": settings, "trainer": {"seed": seed}})


def adapted(make: Callable[[], Any], seed: int = 42, **model: Any) -> Any:
    inject = adapt(config(seed, **model))
    assert inject is not None
    return inject(make())


def trained(model: Any) -> Any:
    """The same model as if its adapter had been trained: B is zero no more."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(std=0.3)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def policy_of(model: Any) -> Policy:
    return Policy(model, model.base_model, model.get_output_embeddings())


def token_logprobs(policy: Policy) -> Tensor:
    hidden_NH = policy.hidden_BLH(IDS)[0, :-1]
    found, _ = gather_logprobs_entropy(hidden_NH, policy.head, IDS[0, 1:], 0.7, 4, False)
    return found


def test_without_a_rank_there_is_no_adapter() -> None:
    assert adapt(Config()) is None
    assert not publishes_adapter(Config())
    assert publishes_adapter(config()) and not publishes_adapter(config(lora_merge=True))


@FAMILIES
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


@FAMILIES
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
    inject = adapt(config())
    assert inject is not None
    model = llama()
    torch.set_rng_state(before)
    again = dict(adapter_tensors(inject(model)))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], t) for name, t in again.items())
    other = dict(adapter_tensors(adapted(llama, seed=43)))
    assert not any(torch.equal(first[n], t) for n, t in other.items() if "lora_A" in n)


def test_it_is_put_into_a_model_without_storage() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINY))
    inject = adapt(config())
    assert inject is not None
    shapes = {name: t.shape for name, t in adapter_tensors(inject(model))}
    assert {t.device.type for t in model.parameters()} == {"meta"}
    assert shapes == {name: t.shape for name, t in adapter_tensors(adapted(llama))}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_is_that_of_plain_peft(checkpointing: bool) -> None:
    ours, base = adapted(llama), llama()
    torch.manual_seed(42)
    theirs: Any = get_peft_model(
        base,
        LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (ours, theirs):
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(2):  # in the first, B being zero, A has no gradient
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {
        name.replace(".default.", "."): p
        for name, p in theirs.named_parameters()
        if "lora_" in name
    }
    found = dict(adapter_tensors(ours))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], p) for name, p in expected.items())
    assert not torch.equal(logits(ours), logits(llama()))


@FAMILIES
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
        model = trained(adapted(llama)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = policy_of(model)
        loss = token_logprobs(policy).sum()
        if with_reference:
            reference_of(policy).hidden_BLH(IDS)
        loss.backward()
        found = [t.grad for _, t in adapter_tensors(model)]
        return [grad for grad in found if grad is not None]

    plain = gradients(False)
    assert len(plain) == 28
    assert all(torch.equal(a, b) for a, b in zip(gradients(True), plain, strict=True))


def test_an_error_inside_switches_the_adapter_on_again() -> None:
    model = trained(adapted(llama))
    on = logits(model)
    with pytest.raises(ZeroDivisionError), without_adapter(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), on)


@FAMILIES
def test_merged_weights_give_the_same_logits(make: Callable[[], Any]) -> None:
    model = trained(adapted(make))
    before = copy.deepcopy(model.state_dict())
    tensors = dict(merged_tensors(model, whole))
    base = make()
    assert list(tensors) == [name for name, _ in base.named_parameters()]
    base.load_state_dict(tensors, strict=False)
    torch.testing.assert_close(logits(base), logits(model), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(make()), logits(model), atol=1e-3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_merging_asks_for_whole_tensors_in_one_order() -> None:
    def asked(model: Any) -> list[torch.Size]:
        seen: list[torch.Size] = []

        def full(tensor: Tensor) -> Tensor:
            seen.append(tensor.shape)
            return whole(tensor)

        list(merged_tensors(model, full))
        return seen

    model = adapted(llama)
    assert asked(model) == asked(trained(adapted(llama)))
    assert len(asked(model)) == len(list(model.parameters()))


def test_a_sampler_takes_the_adapter_alone() -> None:
    source, target = trained(adapted(llama)), adapted(llama, seed=5)
    assert not torch.equal(logits(target), logits(source))
    load_adapter(target, {name: whole(t) for name, t in adapter_tensors(source)})
    assert torch.equal(logits(target), logits(source))
    prompt = Prompt("p", "p", (), "", (5, 6, 7), data_source="", ground_truth="")

    def sampled(model: Any) -> tuple[int, ...]:
        sampler = HFSampler(
            model, eos_token_ids=frozenset({2}), pad_token_id=0, max_num_seqs=4,
            detokenize=lambda ids: "",
        )  # fmt: skip
        (rollout,) = sampler.generate([prompt], Sampling(0.0, max_tokens=12), 1)
        torch.testing.assert_close(
            torch.from_numpy(rollout.sampler_logprobs),
            sampler_view(model, prompt.token_ids + rollout.token_ids)[-len(rollout.token_ids) :],
            atol=1e-5,
            rtol=0,
        )
        return rollout.token_ids

    assert sampled(target) == sampled(source)


@torch.no_grad()
def sampler_view(model: Any, ids: tuple[int, ...]) -> Tensor:
    ids_L = torch.tensor(ids)
    scores_LV = model(input_ids=ids_L[None]).logits[0, :-1].log_softmax(-1)
    return scores_LV.gather(-1, ids_L[1:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"lora_rank": 4}, "is (4, "),
        ({"target_modules": ("q_proj",)}, "model.target_modules must be"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(other: dict[str, Any], told: str) -> None:
    tensors = dict(adapter_tensors(adapted(llama, **other)))
    with pytest.raises(ModelError) as error:
        load_adapter(adapted(llama), tensors)
    assert told in str(error.value)


@pytest.mark.parametrize("make", [llama, qwen, gpt2])
def test_peft_reads_what_is_saved(make: Callable[[], Any], tmp_path: Path) -> None:
    base_dir, folder = tmp_path / "base", tmp_path / "actor"
    make().save_pretrained(base_dir)
    model = trained(adapted(make))
    folder.mkdir()
    write_adapter_config(folder, model, str(base_dir))
    save_file({n: whole(t) for n, t in adapter_tensors(model)}, folder / ADAPTER_WEIGHTS)
    told = json.loads((folder / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base_dir)
    assert told["target_modules"] == sorted(told["target_modules"])
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (3, 6, 0.0)
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder)), logits(model))
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    torch.testing.assert_close(logits(load_merged(base, folder)), logits(model), atol=1e-5, rtol=0)


def test_a_loaded_policy_keeps_its_split(tmp_path: Path) -> None:
    gemma().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    inject = adapt(config())
    assert inject is not None
    assert inject(policy.model) is policy.model
    trained(policy.model)
    torch.testing.assert_close(policy.head(policy.hidden_BLH(IDS)), logits(policy.model))


@pytest.mark.parametrize(
    ("wanted", "leaves"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        ("q_proj", {"q_proj"}),
        (r".*\.(up|down)_proj", {"up_proj", "down_proj"}),
        ("All-Linear", {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj",
                        "gate_proj"}),
        (("self_attn.o_proj",), {"o_proj"}),
    ],
)  # fmt: skip
def test_target_modules(wanted: Any, leaves: set[str]) -> None:
    names = [name for name, _ in adapter_tensors(adapted(llama, target_modules=wanted))]
    assert {name.split(".")[-3] for name in names} == leaves
    assert len(names) == 2 * 2 * len(leaves)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("q_porj", "no module 'q_porj'. Did you mean 'q_proj'?"),
        (("q_proj", "v_prj"), "no module 'v_prj'. Did you mean 'v_proj'?"),
        ("q_proj,v_proj", "A list is written [a,b]."),
        ("*_proj", "is neither the name of a module nor a pattern"),
        ("lm_head", "lm_head, but embeddings and output layer stay"),
        (("embed_tokens",), "embeddings and output layer stay"),
        (("self_attn",), "no linear layer. LoRA adapts these here: down_proj, gate_proj"),
        (".*", "is no linear layer"),
        ((), "model.target_modules is empty"),
    ],
)
def test_target_modules_that_fit_nothing(wanted: Any, told: str) -> None:
    with pytest.raises(ModelError) as error:
        adapted(llama, target_modules=wanted)
    assert told in str(error.value)
    assert "model.target_modules" in str(error.value)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_sharded_model_goes_on_training_after_a_reference_pass(one_rank: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model, plain = trained(adapted(llama)), trained(adapted(llama))
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    assert torch.equal(logits(model), logits(plain))
    with without_adapter(model):
        assert torch.equal(logits(model), logits(llama()))
    for one in (model, plain):
        one(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for (_, sharded), (name, tensor) in zip(
        adapter_tensors(model), adapter_tensors(plain), strict=True
    ):
        assert sharded.grad is not None and tensor.grad is not None, name
        torch.testing.assert_close(sharded.grad.full_tensor(), tensor.grad)
    merged = dict(merged_tensors(model, lambda tensor: tensor.full_tensor().detach()))
    for name, tensor in merged_tensors(plain, whole):
        assert torch.equal(merged[name], tensor), name
