"""Who writes which tensors of a checkpoint: each rank a share of whole ones, a file each."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from ppo_cli.engine.ranks import Ranks
from ppo_cli.engine.sharding import full_tensor
from ppo_cli.engine.tensor_files import file_name, write_file, write_tensors

LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, eq=False)
class Share:
    """What this rank writes of a set of tensors, and who writes what.

    `writers` holds, in the order of the files, the names of each writer's tensors as empty
    ones; `number` is this rank's place among them, None when it has nothing to write.
    """

    stem: str
    tensors: dict[str, Tensor]
    writers: list[dict[str, Tensor]]
    number: int | None
    model: Any = None

    def write(self, directory: Path) -> None:
        """Write this rank's file; no other rank is needed."""
        if self.number is not None:
            path = directory / file_name(self.stem, self.number, len(self.writers))
            write_tensors(path, to_disk(self.model, self.tensors))

    def write_index(self, directory: Path) -> None:
        """Write which tensor is in which of several files, as Hugging Face has it."""
        if len(self.writers) == 1 or self.model is None:
            return
        places: dict[str, str] = {}
        found: list[Tensor] = []
        for number, empty in enumerate(self.writers):
            stored = to_disk(self.model, empty)
            name = Path(file_name(self.stem, number, len(self.writers))).name
            places |= dict.fromkeys(stored, name)
            found += stored.values()
        sizes = {
            "total_parameters": sum(t.numel() for t in found),
            "total_size": sum(t.numel() * t.element_size() for t in found),
        }
        index = {"metadata": sizes, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_file(directory / f"{self.stem}.safetensors.index.json", text.encode())


def cut_share(
    stem: str, tensors: Mapping[str, Tensor], ranks: Ranks, most: int, model: Any = None
) -> Share:
    """This rank's share of `tensors` among the first `most` ranks; all ranks call."""
    owners = assign_owners(tensors, most)
    places = sorted(set(owners.values())) or [0]  # without any tensor there is a file all the same
    writers: list[dict[str, Tensor]] = [{} for _ in places]
    for name, rank in owners.items():
        tensor = tensors[name]
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        writers[places.index(rank)][name] = empty
    number = places.index(ranks.rank) if ranks.rank in places else None
    return Share(stem, take_share(tensors.items(), ranks, most), writers, number, model)


def take_share(
    named: Iterable[tuple[str, Tensor]], ranks: Ranks, writers: int
) -> dict[str, Tensor]:
    """Whole copies, in host memory, of the tensors that this rank writes; all ranks call.

    The same names in the same order on all ranks. Bytes are balanced over the first `writers`.
    """
    tensors = dict(named)
    owners = assign_owners(tensors, writers)
    share: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours = owners[name] == ranks.rank
        if ours or isinstance(tensor, DTensor):
            whole = full_tensor(tensor)
            if ours:
                share[name] = whole
    return share


def assign_owners(tensors: Mapping[str, Tensor], writers: int) -> dict[str, int]:
    """Which rank writes each tensor: the largest layer next to the rank with the least.

    A layer stays together, since a file may hold its tensors cut or joined in other ways.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        layer = LAYER.match(name)
        key = layer.group() if layer else name
        layers[key].append(name)
        sizes[key] += tensor.numel() * tensor.element_size()
    held = [0] * writers
    owners: dict[str, int] = {}
    for key in sorted(layers, key=lambda key: -sizes[key]):
        rank = held.index(min(held))
        held[rank] += sizes[key]
        owners |= dict.fromkeys(layers[key], rank)
    return owners


def to_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as the files of this family have them: experts one by one, say."""
    return tensors if model is None else revert_weight_conversion(model, dict(tensors))
