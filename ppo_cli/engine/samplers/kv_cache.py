"""The hf sampler's cache for rows that are sampled together and end at the same column.

Attention layers keep keys and values of all columns; recurrent and convolutional layers keep a
state of fixed size. `plan_cache` decides whether the hf sampler can cache a model.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

SPARE_COLUMNS = 64  # a full cache is copied to a larger one, once in so many tokens


class KVLayer(DynamicLayer):
    """One layer's keys and values (rows, heads, columns, size).

    Both are views of tensors with spare columns, so that a token is written in place.
    """

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self._wide: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append columns; return all keys and values."""
        device = key_states.device.type
        # Cast once here: under autocast, attention would cast all columns in every pass.
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        new = key_states, value_states
        past = self.get_seq_length()
        columns = past + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Grow: allocate spare columns, and copy the past into them.
        if not self._wide or self._wide[0].shape[2] < columns:
            self._wide = tuple(
                part.new_empty((*part.shape[:2], columns + SPARE_COLUMNS, part.shape[3]))
                for part in new
            )
            if past:
                for wide, before in zip(self._wide, (self.keys, self.values), strict=True):
                    wide[:, :, :past] = before
        for wide, part in zip(self._wide, new, strict=True):
            wide[:, :, past:columns] = part
        self.keys, self.values = (wide[:, :, :columns] for wide in self._wide)
        return self.keys, self.values

    def trim(self, columns: int) -> None:
        """Drop the first columns."""
        if not self.is_initialized:
            return
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]
        self._wide = tuple(wide[:, :, columns:] for wide in self._wide)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        super().batch_select_indices(indices)
        self._wide = ()

    def append_rows(self, other: KVLayer, rows: Tensor) -> None:
        """Append rows of a cache that is not longer, so that both end at the same column."""
        if not self.is_initialized:  # a layer that the model does not use
            return
        # Zeros in front of them, because a masked NaN still gives NaN.
        before = (0, 0, self.get_seq_length() - other.get_seq_length(), 0)
        self.keys = torch.cat([self.keys, pad(other.keys[rows], before)])
        self.values = torch.cat([self.values, pad(other.values[rows], before)])
        self._wide = ()


class IndexedKVLayer(KVLayer, DynamicIndexedLayer):
    """Keys and values, and the index keys with which sparse attention selects among them."""

    indexer_keys: Tensor  # (rows, columns, size)

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        super().trim(columns)
        if self.is_indexer_initialized:
            self.indexer_keys = self.indexer_keys[:, columns:]

    def append_rows(self, other: KVLayer, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, so that both end at the same column."""
        super().append_rows(other, rows)
        if self.is_indexer_initialized and isinstance(other, IndexedKVLayer):
            before = (0, 0, self.indexer_keys.shape[1] - other.indexer_keys.shape[1], 0)
            self.indexer_keys = torch.cat(
                [self.indexer_keys, pad(other.indexer_keys[rows], before)]
            )


class StateLayer(LinearAttentionLayer):
    """One layer's convolutional and recurrent states, which have rows but no columns."""

    def trim(self, columns: int) -> None:
        """Does nothing: states have no columns."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        for states in (self.conv_states, self.recurrent_states):
            states.update({i: s[indices] for i, s in states.items() if s is not None})

    def append_rows(self, other: StateLayer, rows: Tensor) -> None:
        """Add rows of another cache."""
        for mine, other_states in (
            (self.conv_states, other.conv_states),
            (self.recurrent_states, other.recurrent_states),
        ):
            pairs = ((i, state, other_states[i]) for i, state in mine.items())
            mine.update({i: torch.cat([a, b[rows]]) for i, a, b in pairs if a is not None})


class StateKVLayer(StateLayer, KVLayer):
    """States, keys and values of one layer."""

    def __init__(self, number_of_states: int = 1) -> None:
        KVLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_values: Tensor, **states: Any) -> None:
        """Initialise keys and values (positional arguments) or states (keyword arguments)."""
        if keys_values:
            KVLayer.lazy_initialization(self, *keys_values)
        else:
            StateLayer.lazy_initialization(self, **states)

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        KVLayer.trim(self, columns)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        StateLayer.batch_select_indices(self, indices)
        KVLayer.batch_select_indices(self, indices)

    def append_rows(self, other: Any, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, so that both end at the same column."""
        StateLayer.append_rows(self, other, rows)
        KVLayer.append_rows(self, other, rows)


class KVCache(Cache):
    """One cache layer for each layer of the model."""

    layers: list[Any]

    def __init__(self, plan: CachePlan) -> None:
        super().__init__(layers=[kind(**options) for kind, options in plan.layers])

    def trim(self, columns: int) -> None:
        """Drop the first columns of every layer."""
        for layer in self.layers:
            layer.trim(columns)

    def append_rows(self, other: KVCache, rows: Tensor) -> None:
        """Append rows of a cache that is not longer, right-aligned."""
        for mine, other_layer in zip(self.layers, other.layers, strict=True):
            mine.append_rows(other_layer, rows)


# transformers' layer -> ours. Sliding windows keep their whole past: the mask applies the window.
KINDS: dict[type, type] = {
    DynamicLayer: KVLayer,
    DynamicSlidingWindowLayer: KVLayer,
    DynamicIndexedLayer: IndexedKVLayer,
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: StateKVLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: StateKVLayer,
}


@dataclass(frozen=True)
class CachePlan:
    """The layers of a cache, the model's parameter for it, and what it means for rows."""

    layers: tuple[tuple[type, dict[str, int]], ...]
    parameter: str  # of the model's forward pass
    slides: bool  # some layers attend only to a part of the past
    attends: bool  # some layers keep keys and values, so rows of other lengths need a mask
    # A state passes through the padding in front of a row, and not all families keep it at zero
    # there: only prompts of equal length are computed together, without padding.
    keeps_states: bool


def plan_cache(model: PreTrainedModel) -> CachePlan | None:
    """Plan the cache of a model; None if the hf sampler cannot cache it.

    It cannot if the model's code defines its own cache class or state, or if rows cannot be padded
    on the left because the model derives positions from columns.
    """
    parameters = inspect.signature(type(model).forward).parameters
    # Attention models and Mamba models name their cache differently.
    names = [name for name in ("past_key_values", "cache_params") if name in parameters]
    layers = DynamicCache(config=model.config).layers
    if not names or _has_own_cache(model) or not {type(layer) for layer in layers} <= KINDS.keys():
        return None
    # A stateful model whose state is not in these layers keeps it somewhere else.
    states = [isinstance(layer, LinearAttentionLayer) for layer in layers]
    if model._is_stateful and not any(states):
        return None
    if _counts_columns(model, takes_positions="position_ids" in parameters):
        return None
    return CachePlan(
        layers=tuple(
            (KINDS[type(layer)], {"number_of_states": layer.number_of_states} if state else {})
            for layer, state in zip(layers, states, strict=True)
        ),
        parameter=names[0],
        slides=any(getattr(layer, "is_sliding", False) for layer in layers),
        attends=any(isinstance(layer, DynamicLayer) for layer in layers),
        keeps_states=any(states),
    )


def _has_own_cache(model: PreTrainedModel) -> bool:
    """Whether the file that defines the model also defines a cache."""
    # Only the model's own modeling file counts.
    files = {base.__module__ for base in type(model).__mro__ if "modeling_" in base.__module__}
    return any(
        name.endswith("Cache") and getattr(value, "__module__", "") == file
        for file in files
        for name, value in vars(sys.modules[file]).items()
    )


def _counts_columns(model: PreTrainedModel, *, takes_positions: bool) -> bool:
    """Whether position embeddings are indexed by columns, or start after the padding."""
    tables = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and "position" in name.rpartition(".")[2]
    ]
    return any(not takes_positions or table.padding_idx is not None for table in tables)


@contextmanager
def limit_time_steps(model: nn.Module) -> Iterator[None]:
    """Context that applies the time step limits of Mamba 2 layers to single tokens too.

    transformers 5.19 and the mamba-ssm kernels apply `time_step_limit` only when they scan several
    tokens (Zamba 2 and Nemotron-H have one). The last outputs of `in_proj` are the time steps
    before softplus. Softplus is monotonic, so its inputs can be limited instead.
    """
    with ExitStack() as hooks:
        for mixer in model.modules():
            low, high = getattr(mixer, "time_step_limit", None) or (0.0, math.inf)
            if isinstance(mixer, nn.Module) and (low > 0 or high < math.inf):
                hooks.enter_context(_limit_layer_steps(mixer, low, high))
        yield


@contextmanager
def _limit_layer_steps(mixer: Any, low: float, high: float) -> Iterator[None]:
    """Context in which the time steps of one Mamba 2 layer are limited to [`low`, `high`].

    A forward hook on `in_proj` clamps its outputs, which are the time steps before bias and
    softplus.
    """
    bias = mixer.dt_bias.float()
    scale = mixer.mup_vector[0, 0, -len(bias) :] if hasattr(mixer, "mup_vector") else 1.0
    # The inverse of softplus; Falcon-H1 scales the outputs of `in_proj` before adding the bias.
    least, highest = (
        ((x + math.log(-math.expm1(-x)) if x > 0 else -math.inf) - bias) / scale
        for x in (low, high)
    )

    def limit(_: nn.Module, __: Any, projected: Tensor) -> Tensor:
        steps = projected[..., -len(bias) :]
        limited = torch.minimum(torch.maximum(steps.float(), least), highest)
        return torch.cat([projected[..., : -len(bias)], limited.to(projected.dtype)], dim=-1)

    handle = mixer.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        handle.remove()
