"""How values travel between processes: tensors as arrays, which Ray keeps in shared memory.

Ray copies a tensor into every message, but stores an array once for all readers of a node.
Weights, which are sent again and again, are in memory that is written in place (`SharedTensors`).
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
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
    """Register a serializer: this process sends tensors through Ray as arrays.

    The receiver gets read-only tensors in shared memory.
    """
    ray.util.register_serializer(Tensor, serializer=to_array, deserializer=to_tensor)


def to_array(tensor: Tensor) -> tuple[NDArray[np.uint8], str, tuple[int, ...]]:
    """The bytes of a tensor, its dtype and shape."""
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
        # torch warns about read-only memory.
        warnings.simplefilter("ignore")
        return torch.from_numpy(array).view(dtype).reshape(shape)


ALIGNED = 64  # bytes, as an allocator would


class SharedTensors(Mapping[str, Tensor]):
    """CPU tensors in memory that processes of one node and user share.

    Pickling sends their place, not their bytes. They are written in place, so that pages are
    allocated once: each put into Ray's store allocates new ones. The memory has no name and is
    freed with the last process that has it open. Only on Linux, and other processes can open it
    only while the process that made it runs.
    """

    def __init__(self, path: str, size: int, places: bytes) -> None:
        # The places are pickled once: Ray's own pickler takes a millisecond for a hundred.
        self._sent = path, size, places

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Allocate memory for such tensors."""
        places: list[tuple[str, int, int, torch.dtype, torch.Size]] = []
        size = 0
        for name, tensor in tensors.items():
            # Each tensor starts at a multiple of ALIGNED.
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


def dumps(value: Any, head: bytes = b"") -> bytes:
    """Pickle for another process of this machine, behind `head`; `pickle.loads` undoes it."""
    file = io.BytesIO()
    file.write(head)
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def lighten_prompt(prompt: Prompt) -> Prompt:
    """A prompt reduced to the fields that a sampler reads."""
    return replace(prompt, messages=(), ground_truth=None, extra_info={}, rendered="")


def shed_prompt(rollout: Rollout) -> tuple[str, Rollout]:
    """Remove the prompt, which the driver has, from a rollout; returns its uid and the rest."""
    return rollout.prompt.uid, replace(rollout, prompt=None)  # type: ignore[arg-type]


def prompts_by_uid(prompts: Sequence[Prompt], begun: Sequence[Rollout]) -> dict[str, Prompt]:
    """Return the prompts of new and of begun rollouts by uid, as `rejoin_prompt` needs them."""
    return {prompt.uid: prompt for prompt in (*prompts, *(rollout.prompt for rollout in begun))}


def rejoin_prompt(sent: tuple[str, Rollout], prompts: Mapping[str, Prompt]) -> Rollout:
    """Undo `shed_prompt`. Arrays are copied out of shared memory."""
    uid, rollout = sent
    # A view would keep Ray's object in shared memory.
    logprobs = rollout.sampler_logprobs.copy()
    return replace(rollout, prompt=prompts[uid], sampler_logprobs=logprobs)
