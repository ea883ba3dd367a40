"""The sampler's key/value cache: columns written in place, rows that come and go.

Every row ends at the same column; a row that is shorter begins later (`starts`). Sliding-window
layers keep their whole past too: the window is applied by the attention mask.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ppo_cli.errors import ModelError

HOLDABLE = (DynamicLayer, DynamicSlidingWindowLayer)


class KVLayer(CacheLayerMixin):
    """One layer's keys and values in buffers with room to grow (rows, heads, columns, size)."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers like the first states."""
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns and return all that are filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.keys.shape[2]:
            capacity = self.length if start == 0 else self.length + 32 + self.length // 4
            self.keys = _with_capacity(self.keys, start, capacity)
            self.values = _with_capacity(self.values, start, capacity)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns the next attention sees, and the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of filled columns."""
        return self.length

    def get_max_length(self) -> int:
        """Say that there is no maximum."""
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, which may repeat."""
        self.keys, self.values = self.keys[indices], self.values[indices]

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]
        self.length -= columns

    def append_rows(self, other: KVLayer, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, so that both end at the same column."""
        self.keys = _stack_rows(self.keys, self.length, other.keys[:, :, : other.length][rows])
        self.values = _stack_rows(
            self.values, self.length, other.values[:, :, : other.length][rows]
        )


class KVCache(Cache):
    """A `KVLayer` for each layer of the model."""

    layers: list[KVLayer]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[KVLayer() for _ in range(num_layers)])

    def trim(self, columns: int) -> None:
        """Forget the first columns of every layer."""
        for layer in self.layers:
            layer.trim(columns)

    def append_rows(self, other: KVCache, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, right-aligned."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.append_rows(theirs, rows)


def plan_layers(config: PreTrainedConfig) -> tuple[int, bool]:
    """Return how many cache layers a model needs, and whether any of them slides.

    Raises ModelError for a model that keeps something else than keys and values.
    """
    layers = DynamicCache(config=config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) not in HOLDABLE})
    if odd:
        raise ModelError(
            f"The hf sampler cannot hold the state of a {config.model_type} model "
            f"({', '.join(odd)}); use a model whose layers are attention with keys and values."
        )
    return len(layers), any(layer.is_sliding for layer in layers)


def _with_capacity(buffer: Tensor, filled: int, capacity: int) -> Tensor:
    rows, heads, _, size = buffer.shape
    roomy = buffer.new_empty((rows, heads, capacity, size))
    roomy[:, :, :filled] = buffer[:, :, :filled]
    return roomy


def _stack_rows(buffer: Tensor, filled: int, extra: Tensor) -> Tensor:
    """Put `extra` below, ending at column `filled`; zeros before it, for 0 x NaN is NaN."""
    rows, heads, capacity, size = buffer.shape
    stacked = buffer.new_empty((rows + extra.shape[0], heads, capacity, size))
    stacked[:rows, :, :filled] = buffer[:, :, :filled]
    start = filled - extra.shape[2]
    stacked[rows:, :, :start] = 0
    stacked[rows:, :, start:filled] = extra
    return stacked
