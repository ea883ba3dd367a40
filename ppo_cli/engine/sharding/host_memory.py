"""Weights and moments that are kept in host memory between uses (offloading).

Each tensor has one host buffer for the whole run. For a GPU it is pinned: copies are then
asynchronous and several times as fast, and the host waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ppo_cli.engine.models.policy import WeightsContext, Work

# Pinned memory is requested in slabs: torch rounds each request up to a power of two.
SLAB_BYTES = 1 << 30
ALIGNMENT = 64  # bytes: a cache line


def allocate_host(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Allocate uninitialised host tensors with the layout of these."""
    if not pinned:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
    sizes = [-(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT for t in tensors]
    places: list[Tensor] = []
    # Fill slabs with as many tensors as fit, at least one each.
    while len(places) < len(tensors):
        first = len(places)
        end, total = first, 0
        while end < len(sizes) and (end == first or total + sizes[end] <= SLAB_BYTES):
            end, total = end + 1, total + sizes[end]
        slab = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        for tensor, part in zip(tensors[first:end], slab.split(sizes[first:end]), strict=True):
            used = part[: tensor.numel() * tensor.element_size()]
            places.append(used.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()))
    return places


class HostCopies:
    """Host buffers of tensors, by key; a key has the same buffer for the whole run."""

    def __init__(self) -> None:
        self._places: dict[Any, Tensor] = {}

    def reserve(self, tensors: Mapping[Any, Tensor], *, pinned: bool) -> dict[Any, Tensor]:
        """Return the buffers of these keys; missing ones are allocated together."""
        missing = {key: t for key, t in tensors.items() if key not in self._places}
        new = allocate_host([*missing.values()], pinned=pinned)
        self._places |= zip(missing, new, strict=True)
        return {key: self._places[key] for key in tensors}

    def store(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy device tensors to their buffers, wait for all copies, and return the buffers."""
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        places = self.reserve(tensors, pinned=on_gpu)
        for key, tensor in tensors.items():
            places[key].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return places


class OffloadedModel(WeightsContext):
    """A model on one device whose weights are in host memory between uses."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        parameters = [*model.parameters()]
        self._places: dict[nn.Parameter, Tensor] = {p: p.detach() for p in parameters}
        if device.type == "cuda":
            places = allocate_host(parameters, pinned=True)
            for parameter, place in zip(parameters, places, strict=True):
                parameter.data = self._places[parameter] = place.copy_(parameter.detach())

    def __call__(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Do the work on the device. A backward pass needs the weights too: keep `awake` for it."""
        with self.awake():
            return work(*tensors)

    def _wake(self) -> None:
        """Move weights and gradients to the device."""
        self._model.to(self._device, non_blocking=True)

    def _rest(self) -> None:
        """Move weights and gradients back to host memory."""
        self._model._apply(self._take_home)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _take_home(self, tensor: Tensor) -> Tensor:
        """Copy a trained weight to its host buffer; of a frozen one only drop the device copy."""
        place = self._places.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if place is None or tensor.device.type == "cpu":  # a buffer, a gradient, a tied weight
            return tensor.to("cpu")
        return place.copy_(tensor, non_blocking=True) if tensor.requires_grad else place
