"""Weights of a bfloat16 checkpoint: spread over what rounds to them, so that updates count."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ppo_cli.engine.cpu.bfloat16 import (
    HALF_GAP,
    cast_frozen_layers,
    cast_layers,
    make_master_weights,
    round_embeddings,
    spread_weights,
)
from tests.engine.tiny_families import make_model as make_family

HALF = torch.bfloat16


def make_model(kind: str = "llama", *, tied: bool = False, stored: torch.dtype = HALF) -> Any:
    changes = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
    return make_family(kind, **changes).to(stored).float()


def noise(limit: int = HALF_GAP - 1) -> torch.Tensor:
    return torch.tensor([limit, -limit, 1, -1], dtype=torch.int32)


def test_the_farthest_places_still_round_to_the_same_number() -> None:
    """At powers of two, where the gap below is half the gap above, too; zeros stay zeros."""
    numbers = torch.tensor([1.0, -1.0, 0.5, -3.0, 2.0**-126, 3.3e38, 0.1, 0.0, -0.0]).to(HALF)
    for shift in range(4):
        weights = numbers.float()
        spread_weights(weights, noise().roll(shift))
        torch.testing.assert_close(weights.to(HALF), numbers, rtol=0, atol=0)
        assert (weights[:-2] != numbers[:-2].float()).all()
        assert (weights[-2:] == 0).all()


def test_what_bfloat16_cannot_hold_stays() -> None:
    """Though the numbers of its first block are all bfloat16's."""
    numbers = [0.5] * len(noise()) + [1 + 2.0**-12]
    weights = torch.tensor(numbers)
    spread_weights(weights, noise())
    assert torch.equal(weights, torch.tensor(numbers))


@pytest.mark.parametrize("tied", [False, True])
def test_products_are_given_the_same_and_all_else_stays(tied: bool) -> None:
    model, before = make_model(tied=tied), make_model(tied=tied)
    make_master_weights(model, HALF, seed=3)
    for (name, parameter), old in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter.to(HALF), old.to(HALF), rtol=0, atol=0)
        stays = name.endswith(("norm.weight", "bias"))
        stays |= name.endswith("embed_tokens.weight") and not tied
        assert torch.equal(parameter, old) is stays, name
    round_embeddings(model, HALF, untied=False)
    ids = torch.arange(64)[None]
    with torch.no_grad(), torch.autocast("cpu", HALF):
        assert torch.equal(model(ids).logits, before(ids).logits)


@pytest.mark.parametrize("untied", [False, True])
def test_lookups_are_rounded_and_their_gradients_reach_the_table(untied: bool) -> None:
    """A token that occurs twice has both gradients; the padding token, as ever, has none."""
    model = make_model(stored=torch.float32)
    table = model.model.embed_tokens
    table.padding_idx, ids = 5, torch.tensor([[5, 7, 7, 9]])
    exact = table(ids)
    round_embeddings(model, HALF, untied=untied)
    states = table(ids)
    assert states.dtype == torch.float32
    assert torch.equal(states, exact.to(HALF).float() if untied else exact)
    states.sum().backward()
    gradient_V = table.weight.grad.sum(1) / 32
    assert {int(i): gradient_V[i].item() for i in gradient_V.nonzero()} == {7: 2.0, 9: 1.0}


def test_a_scaled_lookup_is_what_ranks_compute_that_share_it() -> None:
    """They hold table and scale in bfloat16."""
    exact = make_family("gemma2").model.embed_tokens
    ids = torch.tensor([[3, 4, 279]])
    expected = copy.deepcopy(exact).to(HALF)(ids)
    round_embeddings(model := nn.Sequential(exact), HALF, untied=True)
    assert torch.equal(model(ids), expected.float())


def test_tables_that_are_more_than_looked_up_stay_exact() -> None:
    """A module that computes with ids before it looks them up."""

    class Shifted(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids.clamp(min=3))

    table, ids = Shifted(8, 4), torch.tensor([[1, 5]])
    exact = table(ids)
    round_embeddings(table, HALF, untied=True)
    assert torch.equal(table(ids), exact)


def test_the_same_seed_gives_the_same_weights() -> None:
    results = []
    for seed in (1, 1, 2):
        model = make_model()
        make_master_weights(model, HALF, seed)
        results.append(model.lm_head.weight.clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("stored", "compute", "trained", "spread"),
    [
        (HALF, torch.float32, True, True),
        (torch.float32, HALF, True, True),
        (HALF, HALF, False, True),
        (HALF, HALF, True, False),
    ],
    ids=["float32 products", "a float32 checkpoint", "frozen", "not to be spread"],
)
def test_other_models_stay_as_they_are(
    stored: torch.dtype, compute: torch.dtype, trained: bool, spread: bool
) -> None:
    model, before = make_model(stored=stored), make_model(stored=stored)
    at = model.lm_head.weight.data_ptr()
    make_master_weights(model.requires_grad_(trained), compute, 3, spread)
    for parameter, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, old)
    assert (model.lm_head.weight.data_ptr() != at) is trained  # not the file's pages


def test_small_updates_move_rounded_weights_from_the_first_step_on() -> None:
    """By as much, on average, as in float32; without the spread by nothing at all."""
    torch.manual_seed(0)
    layer = nn.Linear(4096, 64, bias=False)
    layer.weight.data = torch.empty(64, 4096).uniform_(0.05, 0.2).to(HALF).float()

    def moved() -> float:
        with torch.no_grad():
            after = (layer.weight + 1e-5).to(HALF).double()
            return float((after - layer.weight.to(HALF).double()).mean())

    assert moved() == 0.0
    make_master_weights(layer, HALF, seed=3)
    assert moved() == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_model_is_held_as_products_take_it(tied: bool) -> None:
    model = make_model(tied=tied, stored=torch.float32).requires_grad_(False)
    ids = torch.arange(64)[None]
    at = {n: p.data_ptr() for n, p in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad(), torch.autocast("cpu", HALF):
        expected = model(ids).logits
        cast_frozen_layers(model, HALF)
        results = model(ids).logits
    assert torch.equal(results, expected)
    full = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert all("norm" in name or "embed" in name for name in full)
    up, before = model.model.layers[0].mlp.up_proj, make_model(stored=torch.float32)
    assert (up.weight.dtype, up.weight.shape) == (HALF, (48, 32))
    assert torch.equal(up.bias.to(HALF), before.model.layers[0].mlp.up_proj.bias.to(HALF))
    assert not any(p.requires_grad for p in model.parameters())
    assert all(p.data_ptr() != at[name] for name, p in model.named_parameters())  # of the file


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_cast_layers_compute_as_autocast_and_are_taken_out_again(kind: str) -> None:
    model, ids = make_model(kind), torch.arange(64)[None]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        exact = model(ids).logits
        layers = cast_layers(model, HALF)
        with torch.autocast("cpu", HALF):
            expected = model(ids).logits
            for layer in layers:
                layer.install()
            results = model(ids).logits
        for layer in layers:
            layer.uninstall()
        assert torch.equal(model(ids).logits, exact)
    assert torch.equal(results, expected)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    linear = [m for m in model.modules() if type(m) in (nn.Linear, Conv1D)]
    assert [layer.module for layer in layers] == linear


def test_a_layer_with_another_forward_pass_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = lambda states: states  # type: ignore[method-assign]
    assert [layer.module for layer in cast_layers(model, HALF)] == [model[1]]
