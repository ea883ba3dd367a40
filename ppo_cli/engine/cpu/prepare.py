"""Preparation of a loaded model for its device and precision, before it is sharded or used.

The learner calls it for every model. Most of it is for processors: layers that keep less memory,
trained weights spread for bfloat16 products, and lookups and norms that round once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppo_cli.engine.cpu.bfloat16 import (
    cast_frozen_layers,
    cast_frozen_weights,
    make_master_weights,
    round_embeddings,
)
from ppo_cli.engine.cpu.lean_layers import round_norms, use_lean_layers


@dataclass(frozen=True)
class Preparation:
    """Prepares models for products in `dtype` on a device; `alone`: in a single process."""

    device: torch.device
    dtype: torch.dtype
    alone: bool
    keeps_layers: bool  # tensor parallelism or compilation, which need forward passes as they are

    @property
    def _rounds_on_cpu(self) -> bool:
        """Whether autocast rounds the inputs of products in a single process on the CPU."""
        return self.alone and self.device.type == "cpu" and self.dtype != torch.float32

    def prepare_weights(
        self, model: nn.Module, *, trained: bool, adds_noise: bool, seed: int
    ) -> None:
        """Prepare a model in place on every rank, before it is sharded.

        It gets lean layers on the CPU. If it is `trained`, its weights become float32 copies;
        otherwise they need no gradients. Frozen weights are cast to `dtype`. With `adds_noise`,
        noise below bfloat16's precision, drawn from `seed`, is added to trained weights (see
        `bfloat16.py`).
        """
        on_cpu = self.device.type == "cpu"
        if on_cpu and not self.keeps_layers:
            use_lean_layers(model)
        # Trained weights are float32 copies, frozen ones need no gradients.
        if trained:
            make_master_weights(model, self.dtype, seed, adds_noise, sharded=not self.alone)
        else:
            model.requires_grad_(False)
        if self.dtype == torch.float32:
            return
        if self.alone:
            round_embeddings(model, self.dtype, untied=not on_cpu)
        # On the CPU in one process, `prepare_reference` casts a frozen model's layers instead.
        if not self._rounds_on_cpu:
            # An actor that trains its experts computes them in float32, and is compared with them.
            cast_frozen_weights(model, self.dtype, norms=not self.alone, experts=trained)

    def prepare_norms(self, model: nn.Module, probe_states: Callable[[], Tensor]) -> None:
        """Let norms round once, after the model is loaded; `probe_states` computes its output."""
        if self._rounds_on_cpu and not self.keeps_layers:
            round_norms(model, probe_states)

    def prepare_reference(self, model: nn.Module) -> None:
        """Keep a frozen model's linear layers as their products need them."""
        if self._rounds_on_cpu:
            cast_frozen_layers(model, self.dtype)
