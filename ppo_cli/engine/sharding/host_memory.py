"""Weights and moments that wait in host memory between uses.

Each tensor has one place there for the whole run. For a GPU it is pinned: the device copies from
and to it by itself, at several times the speed, and the host waits once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ppo_cli.engine.models.policy import Work

SLAB_BYTES = 1 << 30  # of pinned memory at once: torch rounds each request up to a power of two
ALIGNMENT = 64  # bytes


def allocate_host(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Allocate tensors laid out as these are in host memory, without values."""
    if not pinned:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
    sizes = [-(-t.numel() * t.element_size() // ALIGNMENT) * ALIGNMENT for t in tensors]
    places: list[Tensor] = []
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
    """The places in host memory of tensors that come back under the same keys."""

    def __init__(self) -> None:
        self._places: dict[Any, Tensor] = {}

    def reserve(self, tensors: Mapping[Any, Tensor], *, pinned: bool) -> dict[Any, Tensor]:
        """The places of tensors like these, allocated together where there are none yet."""
        missing = {key: t for key, t in tensors.items() if key not in self._places}
        new = allocate_host([*missing.values()], pinned=pinned)
        self._places |= zip(missing, new, strict=True)
        return {key: self._places[key] for key in tensors}

    def store(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy tensors of a device to their places, and wait for all of them; returns these."""
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        places = self.reserve(tensors, pinned=on_gpu)
        for key, tensor in tensors.items():
            places[key].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return places


class OffloadedModel:
    """Keeps the weights of a model on one device in host memory between uses."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._depth = 0
        parameters = [*model.parameters()]
        self._places: dict[nn.Parameter, Tensor] = {p: p.detach() for p in parameters}
        if device.type == "cuda":
            places = allocate_host(parameters, pinned=True)
            for parameter, place in zip(parameters, places, strict=True):
                parameter.data = self._places[parameter] = place.copy_(parameter.detach())

    def __call__(self, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Work on the device. A backward needs the weights there too: stay `awake` for it."""
        with self.awake():
            return work(*tensors)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Bring the weights, with what gradients they have, and take them home at the end."""
        if self._depth == 0:
            self._model.to(self._device, non_blocking=True)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._model._apply(self._take_home)
                if self._device.type == "cuda":
                    torch.cuda.synchronize()

    def _take_home(self, tensor: Tensor) -> Tensor:
        """Let go of a frozen weight on the device; copy what may have changed to its place."""
        place = self._places.get(tensor) if isinstance(tensor, nn.Parameter) else None
        if place is None or tensor.device.type == "cpu":  # a buffer, a gradient, a tied weight
            return tensor.to("cpu")
        return place.copy_(tensor, non_blocking=True) if tensor.requires_grad else place

    def sync_gradients(self, now: bool) -> None:
        """There are no other ranks."""

    def begin_micro_batch(self) -> None:
        """There are no other ranks."""

    def begin_replay(self) -> None:
        """There are no other ranks."""

    def reset(self) -> None:
        """Nothing stays behind here."""
