"""What travels between processes: tensors as arrays, which Ray keeps in shared memory.

Ray copies a tensor into every message; an array it lays down once, for all readers of a node.
What is sent again and again to the same node lies in memory of its own (`SharedTensors`).
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray import cloudpickle
from torch import Tensor

from ppo_cli.records import Prompt, Rollout


def send_tensors_as_arrays() -> None:
    """From now on, what this process gives to Ray holds arrays in the place of tensors.

    They come out as tensors in shared memory, which may only be read.
    """
    ray.util.register_serializer(Tensor, serializer=to_array, deserializer=to_tensor)


def to_array(tensor: Tensor) -> tuple[NDArray[np.uint8], str, tuple[int, ...]]:
    """The bytes of a tensor, and what they are."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy(), str(tensor.dtype).partition(".")[2], tuple(tensor.shape)


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    return to_tensor, (to_array(tensor),)


def to_tensor(sent: tuple[NDArray[np.uint8], str, tuple[int, ...]]) -> Tensor:
    """Undo `to_array`, without a copy."""
    array, name, shape = sent
    dtype = getattr(torch, name)
    if not array.size:
        return torch.zeros(shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns of memory that must not be written to.
        warnings.simplefilter("ignore")
        return torch.from_numpy(array).view(dtype).reshape(shape)


ALIGNED = 64  # bytes, as an allocator would


class SharedTensors(Mapping[str, Tensor]):
    """CPU tensors in memory that processes of one node and user share.

    Pickling sends their place, not their bytes. They are written in place, so that pages are taken
    once: each put into Ray's store takes new ones. The memory has no name, and goes with the last
    process that has it. Only on Linux, and only while the process that made it lives can others
    open it.
    """

    def __init__(self, path: str, size: int, places: bytes) -> None:
        # The places are pickled once: Ray's own pickler takes a millisecond for a hundred.
        self._sent = path, size, places

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Room for such tensors."""
        places: list[tuple[str, int, int, torch.dtype, torch.Size]] = []
        size = 0
        for name, tensor in tensors.items():
            start = -(-size // ALIGNED) * ALIGNED
            size = start + tensor.nbytes
            places.append((name, start, size, tensor.dtype, tensor.shape))
        descriptor = os.memfd_create("ppo-tensors")
        os.ftruncate(descriptor, size)
        return cls(f"/proc/{os.getpid()}/fd/{descriptor}", size, pickle.dumps(places))

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        path, size, places = self._sent
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        return {
            name: memory[start:end].view(dtype).reshape(shape)
            for name, start, end, dtype, shape in pickle.loads(places)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, self._sent


@cache  # mapped once
def _opened(*sent: Any) -> SharedTensors:
    return SharedTensors(*sent)


class _Pickler(cloudpickle.CloudPickler):
    """Cloudpickle, for functions of a script; torch's own way makes an archive of each tensor."""

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {Tensor: _reduced}, cloudpickle.CloudPickler.dispatch_table
    )


def dumps(value: Any) -> bytes:
    """Pickle for another process of this machine; `pickle.loads` undoes it."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def lighten_prompt(prompt: Prompt) -> Prompt:
    """What a sampler reads of a prompt."""
    return replace(prompt, messages=(), ground_truth=None, extra_info={}, rendered="")


def shed_prompt(rollout: Rollout) -> tuple[str, Rollout]:
    """A rollout without its prompt, which the driver has, and the prompt's uid."""
    return rollout.prompt.uid, replace(rollout, prompt=None)  # type: ignore[arg-type]


def rejoin_prompt(sent: tuple[str, Rollout], prompts: Mapping[str, Prompt]) -> Rollout:
    """Undo `shed_prompt`; what is kept of it is ours, not a window on shared memory."""
    uid, rollout = sent
    logprobs = rollout.sampler_logprobs.copy()
    return replace(rollout, prompt=prompts[uid], sampler_logprobs=logprobs)
