"""What travels between processes: tensors as arrays, which Ray keeps in shared memory.

Ray copies a tensor into every message; an array it lays down once, for all readers of a node.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppo_cli.records import Prompt, Rollout


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """The bytes of a tensor, and what they are."""

    bytes_: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedRecord:
    """A dataclass whose fields are packed."""

    kind: type
    fields_: dict[str, Any]


def pack(value: Any) -> Any:
    """Replace the tensors of dataclasses, mappings and tensors themselves by arrays."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return PackedTensor(flat.numpy(), str(value.dtype).partition(".")[2], tuple(value.shape))
    if isinstance(value, Mapping):
        return {name: pack(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return PackedRecord(
            type(value), {f.name: pack(getattr(value, f.name)) for f in fields(value)}
        )
    return value


def unpack(value: Any, *, copy: bool = True) -> Any:
    """Undo `pack`. Without `copy` tensors lie in shared memory: they may only be read."""
    if isinstance(value, PackedTensor):
        return _tensor(value, copy)
    if isinstance(value, Mapping):
        return {name: unpack(item, copy=copy) for name, item in value.items()}
    if isinstance(value, PackedRecord):
        return value.kind(**{n: unpack(item, copy=copy) for n, item in value.fields_.items()})
    return value


def _tensor(packed: PackedTensor, copy: bool) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.bytes_.size:
        return torch.zeros(packed.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns of memory that must not be written to.
        warnings.simplefilter("ignore")
        flat = torch.from_numpy(packed.bytes_.copy() if copy else packed.bytes_)
    return flat.view(dtype).reshape(packed.shape)


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
