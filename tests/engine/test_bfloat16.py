"""Weights of a bfloat16 checkpoint: spread over what rounds to them, so that updates count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_cli.engine import bfloat16
from ppo_cli.engine.bfloat16 import HALF_GAP, hold_cast, make_master_weights, spread

HALF = torch.bfloat16


def make_model(*, tied: bool = False, stored: torch.dtype = HALF) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(stored).float()


def noise(most: int = HALF_GAP - 1) -> torch.Tensor:
    return torch.tensor([most, -most, 1, -1], dtype=torch.int32)


def test_the_farthest_places_still_round_to_the_same_number() -> None:
    """At powers of two, where the gap below is half the gap above, too; zeros stay zeros."""
    numbers = torch.tensor([1.0, -1.0, 0.5, -3.0, 2.0**-126, 3.3e38, 0.1, 0.0, -0.0]).to(HALF)
    for shift in range(4):
        weights = numbers.float()
        spread(weights, noise().roll(shift))
        torch.testing.assert_close(weights.to(HALF), numbers, rtol=0, atol=0)
        assert (weights[:-2] != numbers[:-2].float()).all()
        assert (weights[-2:] == 0).all()


def test_what_bfloat16_cannot_hold_stays() -> None:
    weights = torch.tensor([0.5, 1 + 2.0**-12])
    spread(weights, noise())
    assert torch.equal(weights, torch.tensor([0.5, 1 + 2.0**-12]))


@pytest.mark.parametrize("tied", [False, True])
def test_products_are_given_the_same_and_all_else_stays(tied: bool) -> None:
    model, before = make_model(tied=tied), make_model(tied=tied)
    make_master_weights(model, HALF, seed=3)
    for (name, held), old in zip(model.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(held.to(HALF), old.to(HALF), rtol=0, atol=0)
        kept = name.endswith("norm.weight") or (name.endswith("embed_tokens.weight") and not tied)
        assert torch.equal(held, old) is kept, name
    ids = torch.arange(64)[None]
    with torch.no_grad(), torch.autocast("cpu", HALF):
        found, wanted = model(ids).logits, before(ids).logits
    if tied:  # lookups of the head's weights are not rounded
        assert float((found - wanted).norm() / wanted.norm()) < 0.01
    else:
        assert torch.equal(found, wanted)


def test_the_same_seed_gives_the_same_weights() -> None:
    found = []
    for seed in (1, 1, 2):
        model = make_model()
        make_master_weights(model, HALF, seed)
        found.append(model.lm_head.weight.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("stored", "compute", "trained"),
    [(HALF, torch.float32, True), (torch.float32, HALF, True), (HALF, HALF, False)],
    ids=["float32 products", "a float32 checkpoint", "frozen"],
)
def test_other_models_stay_as_they_are(
    stored: torch.dtype, compute: torch.dtype, trained: bool
) -> None:
    model, before = make_model(stored=stored), make_model(stored=stored)
    at = model.lm_head.weight.data_ptr()
    make_master_weights(model.requires_grad_(trained), compute, seed=3)
    for held, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(held, old)
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


FAST = pytest.mark.skipif(not bfloat16.has_fast_bfloat16(), reason="needs AVX512-BF16 or AMX")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=FAST)])
def test_a_frozen_model_is_held_as_products_take_it(
    monkeypatch: pytest.MonkeyPatch, fast: bool, tied: bool
) -> None:
    """With and without weights packed as oneDNN reads them."""
    monkeypatch.setattr(bfloat16, "has_fast_bfloat16", lambda: fast)
    model = make_model(tied=tied, stored=torch.float32).requires_grad_(False)
    ids = torch.arange(64)[None]
    with torch.no_grad(), torch.autocast("cpu", HALF):
        wanted = model(ids).logits
        hold_cast(model, HALF)
        found = model(ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
    if not fast:
        assert torch.equal(found, wanted)
    held = {name: p for name, p in model.named_parameters() if not p.is_meta}
    full = {name for name, p in held.items() if p.dtype == torch.float32}
    assert all("norm" in name or "embed" in name for name in full)
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").dtype == HALF
