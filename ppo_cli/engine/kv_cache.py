"""Keys and values of the rows that are sampled together, all ending at the same column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 64  # a cache is copied once in so many tokens


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
        """Add columns; return all."""
        device = key_states.device.type
        if torch.is_autocast_enabled(device):  # attention would cast all columns in every pass
            dtype = torch.get_autocast_dtype(device)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        new = key_states, value_states
        held = self.get_seq_length()
        columns = held + key_states.shape[2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._wide or self._wide[0].shape[2] < columns:
            self._wide = tuple(
                part.new_empty((*part.shape[:2], columns + SPARE_COLUMNS, part.shape[3]))
                for part in new
            )
            if held:
                for wide, before in zip(self._wide, (self.keys, self.values), strict=True):
                    wide[:, :, :held] = before
        for wide, part in zip(self._wide, new, strict=True):
            wide[:, :, held:columns] = part
        self.keys, self.values = (wide[:, :, :columns] for wide in self._wide)
        return self.keys, self.values

    def trim(self, columns: int) -> None:
        """Forget the first columns."""
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]
        self._wide = tuple(wide[:, :, columns:] for wide in self._wide)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only."""
        super().batch_select_indices(indices)
        self._wide = ()

    def append_rows(self, other: KVLayer, rows: Tensor) -> None:
        """Add rows of a cache that is not longer, so that both end at the same column."""
        # Zeros before them, for 0 x NaN is NaN.
        before = (0, 0, self.get_seq_length() - other.get_seq_length(), 0)
        self.keys = torch.cat([self.keys, pad(other.keys[rows], before)])
        self.values = torch.cat([self.values, pad(other.values[rows], before)])
        self._wide = ()


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
