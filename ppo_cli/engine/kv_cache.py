"""The sampler's key/value cache, with rows that come and go.

Every row ends at the same column; a row that is shorter begins later (`starts`). Sliding-window
layers keep their whole past too: the window is applied by the attention mask.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ppo_cli.errors import ModelError

HOLDABLE = (DynamicLayer, DynamicSlidingWindowLayer)


class KVLayer(DynamicLayer):
    """One layer's keys and values (rows, heads, columns, size)."""

    keys: Tensor
    values: Tensor

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]

    def append_rows(self, other: KVLayer, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, so that both end at the same column."""
        # Zeros before them, for 0 x NaN is NaN.
        before = (0, 0, self.get_seq_length() - other.get_seq_length(), 0)
        self.keys = torch.cat([self.keys, pad(other.keys[rows], before)])
        self.values = torch.cat([self.values, pad(other.values[rows], before)])


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
