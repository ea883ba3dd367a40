"""Norms and units that keep less: the same bits forward, the same gradients, and less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ppo_cli.engine.cpu.lean_layers import GatedUnit, RootMeanSquare, round_norms, use_lean_layers
from tests.engine.tiny_families import make_model as make_family

HALF = torch.bfloat16
# What rounds in bfloat16: what only products take. Norms of heads go on to rotary embeddings,
# norms behind a product to a sum, the last one to a head that may be in float32. OLMo's own code
# rounds the former two as what they are given.
LAYER_NORMS = {"input_layernorm", "post_attention_layernorm"}
ROUNDED = {
    "llama": LAYER_NORMS,
    "qwen2": LAYER_NORMS,
    "qwen3": LAYER_NORMS,
    "olmo2": {"q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"},
    "gemma2": set(),
    "gelu": LAYER_NORMS,
    "gpt2": set(),
}


def make_model(kind: str) -> Any:
    changes = {"hidden_act": "gelu"} if kind == "gelu" else {}
    model = make_family("llama" if kind == "gelu" else kind, **changes)
    model.set_attn_implementation("sdpa")
    return model


def states(model: Any, half: bool = False) -> Tensor:
    with torch.autocast("cpu", HALF, enabled=half):
        results: Tensor = model.base_model(torch.arange(40)[None] % 64).last_hidden_state
    return results


def exchanged(model: Any) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if "forward" in m.__dict__}


def test_a_frozen_weight_gets_no_gradient() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    out = RootMeanSquare.apply(x, torch.ones(8), 1e-6, torch.float32)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_unit_has_the_bits_of_autograd(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(7, 33, dtype=dtype, requires_grad=True) for _ in range(2)]
    weighing = torch.randn(7, 33, dtype=dtype)
    results = []
    for unit in (GatedUnit.apply, lambda gate, up: nn.functional.silu(gate) * up):
        out = unit(*inputs)  # type: ignore[no-untyped-call]
        results.append([out, *torch.autograd.grad(out, inputs, weighing)])
    for mine, reference in zip(*results, strict=True):
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ROUNDED)
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
    grads = {n: (mine.grad, other.grad) for (n, mine), other in pairs if other.grad is not None}
    full = sum(float(reference.norm()) ** 2 for _, reference in grads.values()) ** 0.5
    # Products in bfloat16 round what a gradient's last place in float32 moves across a border; the
    # sums that cancel, as those of a key's bias do, are the worse for it.
    limit = 2e-2 if half else 1e-5
    for name, (mine, reference) in grads.items():
        gap = float((mine - reference).norm())
        assert gap <= limit * max(float(reference.norm()), 1e-2 * full), name


@pytest.mark.parametrize("kind", ROUNDED)
def test_only_modules_that_compute_the_same_are_exchanged(kind: str) -> None:
    model = make_model(kind)
    use_lean_layers(model)
    names = {name.rpartition(".")[2] for name in exchanged(model)}
    if kind in ("gemma2", "gpt2"):  # 1 + weight, GELU; layer norms
        assert names == set()
    else:
        assert ("mlp" in names) is (kind != "gelu")
        assert "norm" in names


@pytest.mark.parametrize("kind", ROUNDED)
def test_norms_round_where_only_products_take_what_they_give(kind: str) -> None:
    model = make_model(kind)
    use_lean_layers(model)
    round_norms(model, lambda: states(model, half=True))
    dtypes: dict[str, torch.dtype] = {}
    norms = {name: module for name, module in exchanged(model).items() if "norm" in name}
    for name, norm in norms.items():
        norm.register_forward_hook(lambda m, a, out, name=name: dtypes.update({name: out.dtype}))
    states(model, half=True)
    halves = {name.rpartition(".")[2] for name, dtype in dtypes.items() if dtype == HALF}
    assert halves == ROUNDED[kind]
    states(model)
    assert set(dtypes.values()) <= {torch.float32}


@pytest.mark.parametrize(("half", "limit"), [(False, 0.9), (True, 0.75)])
def test_less_is_kept(half: bool, limit: float) -> None:
    """Bytes that autograd holds of a forward pass, but for the weights."""

    def count_bytes(model: Any) -> int:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        stored: dict[int, Tensor] = {}

        def hold(tensor: Tensor) -> Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            out = states(model, half)
        assert out.requires_grad
        return sum(t.untyped_storage().nbytes() for at, t in stored.items() if at not in weights)

    model = make_model("llama")
    before = count_bytes(model)
    use_lean_layers(model)
    round_norms(model, lambda: states(model, half=True))
    assert count_bytes(model) <= limit * before


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
    norms = {n: m for n, m in model.named_modules() if "NormGated" in type(m).__name__}
    assert norms and not norms.keys() & exchanged(model).keys()
    for name, norm in norms.items():
        other = plain.get_submodule(name).weight.grad
        torch.testing.assert_close(norm.weight.grad, other, rtol=1e-4, atol=1e-5)


def test_a_forward_pass_that_a_module_was_given_stays() -> None:
    norm = LlamaRMSNorm(32)
    norm.forward = torch.zeros_like  # type: ignore[method-assign, assignment]
    use_lean_layers(nn.Sequential(norm))
    assert norm(torch.ones(1, 32)).eq(0).all()
