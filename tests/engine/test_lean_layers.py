"""Norms and units that keep less: the same bits forward, the same gradients, and less kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ppo_cli.engine.cpu.lean_layers import GatedUnit, RootMeanSquare, round_norms, use_lean_layers
from tests.engine.tiny_families import make_model as make_family

HALF = torch.bfloat16
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=8)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**TINY)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**TINY, head_dim=8)),
    "gelu": lambda: LlamaForCausalLM(LlamaConfig(**TINY, hidden_act="gelu")),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)),
}
# What rounds in bfloat16: what only products take. Norms of heads go on to rotary embeddings,
# norms behind a product to a sum, the last one to a head that may be in float32. OLMo's own code
# rounds the former two as what they are given.
ROUNDED = {
    "llama": {"input_layernorm", "post_attention_layernorm"},
    "qwen2": {"input_layernorm", "post_attention_layernorm"},
    "qwen3": {"input_layernorm", "post_attention_layernorm"},
    "olmo2": {"q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"},
    "gemma2": set(),
    "gelu": {"input_layernorm", "post_attention_layernorm"},
    "gpt2": set(),
}


def make_model(kind: str) -> Any:
    """A random model whose norms have weights of their own."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for name, stored in model.named_parameters():
        if "norm" in name and stored.ndim == 1:
            stored.data.uniform_(0.5, 1.5)
    return model


def states(model: Any, half: bool = False) -> Tensor:
    with torch.autocast("cpu", HALF, enabled=half):
        results: Tensor = model.base_model(torch.arange(40)[None] % 64).last_hidden_state
    return results


def exchanged(model: Any) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if "forward" in m.__dict__}


def test_a_norm_has_the_gradient_of_its_formula() -> None:
    """Against finite differences, in float64, and against autograd, in float32."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)

    def in_float64(states: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 0.3)
        return states * scale * weight

    torch.autograd.gradcheck(in_float64, (x, weight))
    weighing = torch.randn(2, 3, 5)
    expected = torch.autograd.grad((in_float64(x, weight) * weighing).sum(), (x, weight))
    single = [t.detach().float().requires_grad_() for t in (x, weight)]
    out = RootMeanSquare.apply(*single, 0.3, torch.float32)  # type: ignore[no-untyped-call]
    results = torch.autograd.grad((out * weighing).sum(), single)
    for mine, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-6)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out = RootMeanSquare.apply(x, torch.ones(8), 1e-6, torch.float32)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_unit_has_the_bits_of_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kwargs = [torch.randn(7, 33, dtype=dtype, requires_grad=True) for _ in range(2)]
    weighing = torch.randn(7, 33, dtype=dtype)
    results = []
    for unit in (GatedUnit.apply, lambda gate, up: nn.functional.silu(gate) * up):
        out = unit(*kwargs)  # type: ignore[no-untyped-call]
        results.append([out, *torch.autograd.grad(out, kwargs, weighing)])
    for mine, reference in zip(*results, strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_gives_the_same_states_and_gradients(kind: str, half: bool) -> None:
    model, plain = make_model(kind), make_model(kind)
    use_lean_layers(model)
    if half:
        with torch.no_grad():
            round_norms(model, lambda: states(model, half))
    results, expected = states(model, half), states(plain, half)
    assert torch.equal(results, expected)
    with torch.no_grad():
        assert torch.equal(states(model, half), states(plain, half))
    weighing = torch.randn(results.shape)
    for out in (results, expected):
        (out * weighing).sum().backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    grads = {
        name: (mine.grad, other.grad) for (name, mine), other in pairs if other.grad is not None
    }
    full = sum(float(reference.norm()) ** 2 for _, reference in grads.values()) ** 0.5
    # Products in bfloat16 round what a gradient's last place in float32 moves across a border; the
    # sums that cancel, as those of a key's bias do, are the worse for it.
    limit = 1e-2 if half else 1e-5
    for name, (mine, reference) in grads.items():
        gap = float((mine - reference).norm())
        assert gap <= limit * max(float(reference.norm()), 1e-2 * full), name


@pytest.mark.parametrize("kind", MODELS)
def test_only_modules_that_compute_the_same_are_exchanged(kind: str) -> None:
    model = make_model(kind)
    use_lean_layers(model)
    names = {name.rpartition(".")[2] for name in exchanged(model)}
    if kind in ("gemma2", "gpt2"):  # 1 + weight, GELU; layer norms
        assert names == set()
    else:
        assert ("mlp" in names) is (kind != "gelu")
        assert "norm" in names


@pytest.mark.parametrize("kind", MODELS)
def test_norms_round_where_only_products_take_what_they_give(kind: str) -> None:
    model = make_model(kind)
    use_lean_layers(model)
    round_norms(model, lambda: states(model, half=True))
    kwargs: dict[str, torch.dtype] = {}
    for name, module in exchanged(model).items():
        if "norm" in name:
            module.register_forward_hook(
                lambda m, a, out, name=name: kwargs.update({name: out.dtype})
            )
    states(model, half=True)
    halves = {name.rpartition(".")[2] for name, dtype in kwargs.items() if dtype == HALF}
    assert halves == ROUNDED[kind]
    states(model)
    assert set(kwargs.values()) <= {torch.float32}


@pytest.mark.parametrize(("half", "limit"), [(False, 0.9), (True, 0.75)])
def test_less_is_kept(half: bool, limit: float) -> None:
    """Bytes that autograd holds of a forward pass, but for the weights."""

    def kept_values(model: Any) -> int:
        own_values = {p.untyped_storage().data_ptr() for p in model.parameters()}
        stored: dict[int, Tensor] = {}

        def hold(tensor: Tensor) -> Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            out = states(model, half)
        assert out.requires_grad
        return sum(t.untyped_storage().nbytes() for at, t in stored.items() if at not in own_values)

    model = make_model("llama")
    before = kept_values(model)
    use_lean_layers(model)
    round_norms(model, lambda: states(model, half=True))
    assert kept_values(model) <= limit * before


def test_a_module_that_fails_on_other_sizes_stays_as_it_is() -> None:
    class Odd(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            if hidden_states.shape[-1] != 32:
                raise ValueError("32 only")
            results: Tensor = super().forward(hidden_states)
            return results

    odd = nn.Sequential(Odd(32))
    use_lean_layers(odd)
    assert not exchanged(odd)


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "bamba", "granitemoehybrid"])
def test_norms_that_take_a_gate_stay_as_they_are(kind: str) -> None:
    model, plain = make_family(kind), make_family(kind)
    use_lean_layers(model)
    results, expected = states(model), states(plain)
    assert torch.equal(results, expected)
    for out in (results, expected):
        out.square().sum().backward()
    norms = {
        name: module
        for name, module in model.named_modules()
        if "NormGated" in type(module).__name__
    }
    assert norms and not norms.keys() & exchanged(model).keys()
    for name, norm in norms.items():
        other = plain.get_submodule(name).weight.grad
        torch.testing.assert_close(norm.weight.grad, other, rtol=1e-4, atol=1e-5)


def test_a_forward_pass_that_a_module_was_given_stays() -> None:
    norm = LlamaRMSNorm(32)
    norm.forward = torch.zeros_like  # type: ignore[method-assign, assignment]
    use_lean_layers(nn.Sequential(norm))
    assert norm(torch.ones(1, 32)).eq(0).all()
