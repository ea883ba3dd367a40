"""Float32 weights for bfloat16 products: spread once before training, cast once per rollout.

A bfloat16 checkpoint only holds numbers that bfloat16 can represent. Each is the midpoint of the
float32 numbers that round to it, so small updates change no product until they add up to half a
gap: about twenty steps at a learning rate of 1e-5 for a weight of 0.1. Therefore trained weights
are spread at random over the interval that rounds to them. In each step the share of weights that
cross a boundary then equals the update's share of the gap, so products follow the update on average
from the first step on (notes/lab_book.md). This is stochastic rounding (Gupta et al. 2015, arXiv
1502.02551), applied once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Half the gap between two bfloat16 numbers, in units of float32's last place.
HALF_GAP = 1 << 15
# Random numbers drawn; they repeat. The odd size keeps them from lining up with weight rows.
BLOCK = (1 << 20) + 7


@torch.no_grad()
def make_master_weights(
    model: nn.Module,
    compute: torch.dtype,
    seed: int,
    adds_noise: bool = True,
    sharded: bool = False,
) -> None:
    """Copy trained weights to their own memory; spread those that products round to bfloat16.

    Products receive bit-identical inputs. Norms, biases and embeddings that are only looked up
    stay as they are, and so do weights of a float32 checkpoint. An embedding that is also the
    output head is spread: its lookups must be rounded (`round_embeddings`). Ranks that share a
    model (`sharded`) round all weights; a single process rounds those that autocast casts.
    """
    # Which weights products round.
    multiplied = _multiplied(model, everything=sharded)
    noise = torch.randint(
        1 - HALF_GAP, HALF_GAP, (BLOCK,), dtype=torch.int32,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.is_meta:
            # Weights read from a file are memory-mapped: the first step would copy the pages.
            parameter.data = parameter.data.clone()
            rounded = (
                compute == torch.bfloat16 and parameter.ndim >= 2 and id(parameter) in multiplied
            )
            if adds_noise and rounded:
                spread_weights(parameter.data, noise)


def spread_weights(weights: Tensor, noise_N: Tensor) -> None:
    """Add noise below bfloat16's precision to weights that bfloat16 represents exactly.

    Zeros stay zero. `noise_N` repeats over the contiguous weights; its absolute values are below
    HALF_GAP, so that each weight still rounds to its old value.
    """
    # Work on the bits: bfloat16 has the upper 16 of float32.
    blocks = weights.view(torch.int32).view(-1).split(len(noise_N))
    if not any((bits & (2 * HALF_GAP - 1)).any() for bits in blocks):
        for bits in blocks:
            bits += noise_N[: len(bits)] * (bits << 1 != 0)


def round_embeddings(model: nn.Module, dtype: torch.dtype, *, untied: bool) -> None:
    """Replace the forward pass of embeddings: it rounds looked-up rows to `dtype`, returns float32.

    The weights are unchanged. Without `untied`, only embeddings whose table is also the output head
    are replaced. Sharded models round in the same way.
    """
    if dtype == torch.float32:
        return
    multiplied = _multiplied(model)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) or "forward" in module.__dict__:
            continue
        if (untied or id(module.weight) in multiplied) and _looks_up_rows(module):
            module.__dict__["forward"] = partial(_look_up, module, dtype)


def _multiplied(model: nn.Module, *, everything: bool = False) -> set[int]:
    """Return the ids of parameters that autocast rounds; with `everything`, of all but lookups.

    In custom modules, parameters named `weight` belong to linear maps such as routers; kernels of
    experts and state spaces use their parameters without casting.
    """
    return {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False)
        if everything or name in ("weight", "bias")
    }


def _look_up(module: nn.Embedding, dtype: torch.dtype, ids_X: Tensor) -> Tensor:
    """Run the module on a rounded table of the rows that these ids need.

    Some families scale or normalise the looked-up rows: rounding comes before that.
    """
    # Look the rows up in float32, and round only these.
    rows_NH = nn.functional.embedding(ids_X.flatten(), module.weight, module.padding_idx)
    table: Any = copy.copy(module)
    table.__dict__.pop("forward", None)
    table.__dict__["_parameters"] = module._parameters | {"weight": rows_NH.to(dtype)}
    table.padding_idx = None  # places in the small table, which all have gradients
    places_X = torch.arange(ids_X.numel(), device=ids_X.device).view(ids_X.shape)
    states_XH: Tensor = table(places_X)
    return states_XH.float()


@torch.no_grad()
def _looks_up_rows(module: nn.Embedding) -> bool:
    """Whether `_look_up` gives this embedding's output, by a trial with a table of a few rows.

    True also for embeddings that scale or normalise rows, False for those that add positions. The
    numbers are the trial's: the weights of a simulated model have none.
    """
    if len(signature(type(module).forward).parameters) != 2:
        return False  # computes positions from a mask
    trial: Any = copy.copy(module)
    width = module.weight.shape[1]
    table_NH = torch.linspace(-1.0, 1.0, 3 * width).view(3, width).to(module.weight.dtype)
    trial.__dict__["_parameters"] = module._parameters | {"weight": table_NH}
    trial.__dict__["_buffers"] = {
        name: buffer if buffer is None else torch.ones(buffer.shape, dtype=buffer.dtype)
        for name, buffer in module._buffers.items()
    }
    trial.padding_idx = None  # a place in the whole table
    ids = torch.tensor([[0, 2]])
    try:
        return torch.equal(_look_up(trial, table_NH.dtype, ids), trial(ids).float())
    except Exception:  # a family's own code may raise anything
        return False


@dataclass(frozen=True)
class CastLayer:
    """A linear layer, its parameters, and copies of them cast as autocast casts them."""

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    cast: Mapping[str, Any]

    def install(self) -> None:
        """Let the module compute with the cast weights."""
        self.module._parameters.update(self.cast)

    def uninstall(self) -> None:
        """Let the module compute with its float32 weights again."""
        self.module._parameters.update(self.parameters)


def cast_layers(model: nn.Module, dtype: torch.dtype) -> list[CastLayer]:
    """Return the linear layers of a model with their weights cast once for a whole rollout.

    A tied output head is cast; the embedding itself stays in float32.
    """
    layers = []
    for module in model.modules():
        # A module with a replaced forward pass casts in its own way.
        if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
            continue
        parameters = {n: p for n, p in module._parameters.items() if p is not None}
        cast = {name: parameter.detach().to(dtype) for name, parameter in parameters.items()}
        layers.append(CastLayer(module, parameters, cast))
    return layers


@torch.no_grad()
def cast_frozen_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace the float32 weights of a frozen model's linear layers by their cast copies.

    Results under autocast do not change.
    """
    for layer in cast_layers(model, dtype):
        for name, tensor in layer.cast.items():
            layer.module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            # A memory-mapped parameter would keep the whole file in memory.
            parameter.data = parameter.data.clone()


@torch.no_grad()
def cast_frozen_weights(
    model: nn.Module, dtype: torch.dtype, *, norms: bool = False, experts: bool = True
) -> None:
    """Cast a model's frozen float32 weights in place to the precision of its products.

    Results under autocast do not change, because layers and rounded lookups cast these weights
    anyway. `norms` casts all other weights too: sharded models compute with cast weights only.
    Kernels of experts are not covered by autocast: their weights stay in float32 unless `experts`
    is set, and also when an adapter is added to them.
    """
    # Parameters that some module uses without casting.
    excluded: set[int] = set()
    for module in model.modules():
        if norms or _is_product(module):
            continue
        adapted = hasattr(module, "parameter_name")  # PEFT's adapter on weights of experts
        is_expert = experts and not type(module).__module__.startswith("torch.nn")
        for parameter in module.parameters(recurse=adapted):
            if adapted or not (is_expert and parameter.ndim == 3):
                excluded.add(id(parameter))
    for parameter in model.parameters():
        is_frozen = parameter.dtype == torch.float32 and not parameter.requires_grad
        if is_frozen and id(parameter) not in excluded:
            parameter.data = parameter.data.to(dtype)


def _is_product(module: nn.Module) -> bool:
    """Whether autocast or a rounded lookup casts all weights of this module."""
    if isinstance(module, nn.Embedding):
        return getattr(module.__dict__.get("forward"), "func", None) is _look_up
    return type(module) in (nn.Linear, Conv1D) and "forward" not in module.__dict__
