"""Checkpoints of an engine: a snapshot in memory, written in the background by all ranks.

A trained model is saved as a Hugging Face folder (or a PEFT adapter), its optimizer state as
safetensors under the names of its parameters. Tensors are divided among the ranks as wholes, and
each rank writes its own file. Any number of ranks can read them: the first rank reads from disk
and sends to the others.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from ppo_cli.atomic import atomic_replace, open_to_readers
from ppo_cli.digests import write_rank_digests
from ppo_cli.engine.ranks import Ranks, gather_objects, run_on_all_ranks
from ppo_cli.engine.sharding.tensors import gather_copy, gather_tensor, scatter_from_rank0
from ppo_cli.engine.training.optimizer import MOMENTS, Optimizer
from ppo_cli.errors import ModelError

# The suffix of one of several files: its number, and how many there are.
NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")


def file_name(stem: str, number: int, of: int) -> str:
    """Return the name of file `number` (counted from 0) of `of` files."""
    part = "" if of == 1 else f"-{number + 1:05d}-of-{of:05d}"
    return f"{stem}{part}.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and sync a safetensors file as Hugging Face does."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with atomic_replace(path) as fresh:
        save_file(contiguous, fresh, metadata={"format": "pt"})
        open_to_readers(fresh)


def write_file(path: Path, content: bytes) -> None:
    """Write and sync a small file."""
    with atomic_replace(path) as fresh:
        fresh.write_bytes(content)


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint's files with one stem, each read on access.

    Raises ModelError when a file is missing or not a safetensors file.
    """

    def __init__(self, directory: Path, stem: str) -> None:
        self._stem = stem
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._closing = ExitStack()
        for path in _find_files(directory, stem):
            try:
                file = self._closing.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                self.close()
                raise ModelError(f"{_describe_path(path)} cannot be read ({error}).") from error
            for name in file.keys():  # noqa: SIM118 - no mapping
                self._files[name], self._paths[name] = file, path

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def require(self, names: Iterable[str]) -> None:
        """Raise ModelError for the first name that is missing."""
        for name in names:
            if name not in self._files:
                raise ModelError(f"{self._stem}.safetensors lacks the tensor {name}.")

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for the first tensor that is missing, misshapen or unknown."""
        self.require(shapes)
        for name, file in self._files.items():
            where = _describe_path(self._paths[name])
            if name not in shapes:
                raise ModelError(f"{where} holds a tensor that the model lacks: {name}.")
            shape = tuple(file.get_slice(name).get_shape())
            if shape != shapes[name]:
                raise ModelError(
                    f"{where} holds {name} as {shape}, but the model takes {shapes[name]}."
                )

    def close(self) -> None:
        """Close the files."""
        self._closing.close()


def _find_files(directory: Path, stem: str) -> list[Path]:
    """The file of `stem`, or all of several; raises ModelError when one is missing."""
    # One unnumbered file, or all of a numbered set.
    alone = directory / file_name(stem, 0, 1)
    if alone.exists():
        return [alone]
    numbered_paths = sorted((directory / stem).parent.glob(f"{Path(stem).name}-*.safetensors"))
    numbered = [match for path in numbered_paths if (match := NUMBERED.search(path.name))]
    if not numbered:
        raise ModelError(f"{_describe_path(alone)} is missing.")
    # Any of the names says how many files there must be.
    count = int(numbered[0].group(2))
    names = (f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
    paths = [directory / name for name in names]
    for path in paths:
        if not path.exists():
            raise ModelError(f"{_describe_path(path)} is missing.")
    return paths


def _describe_path(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


LAYER = re.compile(r".*?\.\d+\.")  # a tensor's name up to the number of its layer


@dataclass(frozen=True, eq=False)
class RankShare:
    """The tensors that this rank writes, and the assignment of all tensors to ranks.

    `writers` has, in the order of the files, each writer's tensors without data; `number` is this
    rank's index in it, None if it writes nothing.
    """

    stem: str
    tensors: dict[str, Tensor]
    writers: list[dict[str, Tensor]]
    number: int | None
    model: Any = None

    def write(self, directory: Path) -> list[str]:
        """Write this rank's file, without the other ranks; returns its name, or an empty list."""
        if self.number is None:
            return []
        name = file_name(self.stem, self.number, len(self.writers))
        write_tensors(directory / name, to_file_layout(self.model, self.tensors))
        return [name]

    def write_index(self, directory: Path) -> None:
        """Write Hugging Face's index of which tensor is in which file, if there are several."""
        if len(self.writers) == 1 or self.model is None:
            return
        # Tensor -> file, as it is after the conversion to the file layout.
        places: dict[str, str] = {}
        stored_tensors_list: list[Tensor] = []
        for number, empty in enumerate(self.writers):
            stored = to_file_layout(self.model, empty)
            name = Path(file_name(self.stem, number, len(self.writers))).name
            places |= dict.fromkeys(stored, name)
            stored_tensors_list += stored.values()
        sizes = {
            "total_parameters": sum(t.numel() for t in stored_tensors_list),
            "total_size": sum(t.numel() * t.element_size() for t in stored_tensors_list),
        }
        index = {"metadata": sizes, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_file(directory / f"{self.stem}.safetensors.index.json", text.encode())


def build_rank_share(
    stem: str,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    writer_count: int,
    model: Any = None,
    *,
    copied: bool = True,
) -> RankShare:
    """Gather this rank's share of `tensors` in host memory; all ranks call.

    All ranks pass the same names in the same order. Bytes are balanced over the first
    `writer_count` ranks. Without `copied`, whole CPU tensors are the live ones, not copies.
    """
    # Which rank writes what; all ranks compute the same.
    owners = assign_owners(tensors, writer_count)
    places = sorted(set(owners.values())) or [0]  # without any tensor there is a file all the same
    writers: list[dict[str, Tensor]] = [{} for _ in places]
    own_tensors: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        writers[places.index(owners[name])][name] = empty
        # Gathering a sharded tensor is a collective: all ranks take part, the owner keeps it.
        is_owner = owners[name] == ranks.rank
        if is_owner or isinstance(tensor, DTensor):
            tensor_copy = gather_copy(tensor) if copied else gather_tensor(tensor).cpu()
            if is_owner:
                own_tensors[name] = tensor_copy
    number = places.index(ranks.rank) if ranks.rank in places else None
    return RankShare(stem, own_tensors, writers, number, model)


def assign_owners(tensors: Mapping[str, Tensor], writers: int) -> dict[str, int]:
    """Assign tensors to ranks, layer by layer: the largest layer to the rank with the fewest bytes.

    A layer stays together, because a family's files may split or join its tensors.
    """
    layers: dict[str, list[str]] = defaultdict(list)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in tensors.items():
        key = _layer_key(name)
        layers[key].append(name)
        sizes[key] += tensor.numel() * tensor.element_size()
    written_bytes = [0] * writers
    owners: dict[str, int] = {}
    for key in sorted(layers, key=lambda key: -sizes[key]):
        rank = written_bytes.index(min(written_bytes))
        written_bytes[rank] += sizes[key]
        owners |= dict.fromkeys(layers[key], rank)
    return owners


def _layer_key(name: str) -> str:
    """Return the common prefix of a layer's tensors; outside of layers, the name itself."""
    layer = LAYER.match(name)
    return layer.group() if layer else name


def to_file_layout(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors to the layout of the family's files, such as separate experts."""
    return tensors if model is None else revert_weight_conversion(model, dict(tensors))


def convert_layers(
    model: Any, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensors to the layout of the family's files, one layer at a time."""
    for _, layer in groupby(tensors, key=lambda named: _layer_key(named[0])):
        yield from to_file_layout(model, dict(layer)).items()


# Weight version, budgets and sampler capacities.
ENGINE_FILE = "engine.json"


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """What a checkpoint saves of a trained model; the same on all ranks.

    `weights` are live tensors by the names of its files, DTensors if the model is sharded.
    `files` are the other files of its folder, at least on the first rank. `model` is the Hugging
    Face model if all of it is saved, None for an adapter.
    """

    name: str
    weights: Mapping[str, Tensor]
    optimizer: Optimizer
    files: Mapping[str, bytes]
    model: Any = None

    @property
    def stem(self) -> str:
        """Return the path of the weights in a checkpoint, up to the file number."""
        return f"{self.name}/{'adapter_model' if self.model is None else 'model'}"

    @property
    def optimizer_stem(self) -> str:
        """Return the path of the optimizer's moments, up to the file number."""
        return f"state/{self.name}_optimizer"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """This rank's part of a checkpoint in host memory: copies, except for the last checkpoint."""

    shares: Sequence[RankShare]
    files: Mapping[str, bytes]
    rank: int

    def write(self, directory: Path) -> None:
        """Write and sync this rank's files in `directory`; can run in a thread.

        The checkpoint is complete when `write` has returned on all ranks.
        """
        # Create all folders first: an abandoned checkpoint's folder must not be created again.
        for name in (*(share.stem for share in self.shares), *self.files):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
        written: list[str] = []
        for share in self.shares:
            written += share.write(directory)
            if self.rank == 0:
                share.write_index(directory)
        if self.rank == 0:
            for name, content in self.files.items():
                write_file(directory / name, content)
        # Digests of the files are compared before a checkpoint is loaded.
        if written:
            write_rank_digests(directory, self.rank, written)

    def write_in_background(self, directory: Path) -> Future[None]:
        """Write in a separate thread; errors are in the future."""
        thread = ThreadPoolExecutor(1, "checkpoint")
        try:
            return thread.submit(self.write, directory)
        finally:
            thread.shutdown(wait=False)


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Return the live tensors that a model's files contain, without a tied output head."""
    seen: set[int] = set()
    # Private attributes of transformers 5.19: tied weights, and buffers that are never saved.
    left_out = set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())
    tensors: dict[str, Tensor] = {}
    # During a step `named_parameters` may be gathered ones; the state dict has the shards.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in left_out and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def take_snapshot(
    trained: Sequence[TrainedModel],
    state: Mapping[str, Any],
    ranks: Ranks,
    writers: int | None = None,
    *,
    last: bool = False,
) -> Snapshot:
    """Copy this rank's share of all models, moments and `state`; all ranks call.

    The first `writers` ranks write (all by default): those that see the run folder. The `last`
    snapshot avoids copies, because nothing is trained until it is written.
    """
    # Weights and moments of each model, and the small files on the first rank.
    shares: list[RankShare] = []
    files = {f"state/{ENGINE_FILE}": json.dumps(state, indent=2).encode()}
    for part in trained:
        writer_count = ranks.size if writers is None else writers
        several = 1 if part.model is None else writer_count  # an adapter is always one file
        moments = part.optimizer.moments()
        shares += [
            build_rank_share(part.stem, part.weights, ranks, several, part.model, copied=not last),
            build_rank_share(part.optimizer_stem, moments, ranks, writer_count, copied=not last),
        ]
        files |= {f"{part.name}/{name}": content for name, content in part.files.items()}
    return Snapshot(shares, files, ranks.rank)


def restore(directory: Path, trained: Sequence[TrainedModel], ranks: Ranks) -> dict[str, Any]:
    """Load a checkpoint into models and optimizers; returns its `state`; all ranks call.

    Only the first rank reads. Raises ModelError on all ranks, with the tensor and the file.
    """
    try:
        read = run_on_all_ranks(ranks, lambda: _read_state(directory) if ranks.rank == 0 else {})
        state: dict[str, Any] = gather_objects(ranks, read)[0]
        for part in trained:
            _load_weights(directory, part, ranks)
            _load_moments(directory, part, ranks)
    except (ModelError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"The checkpoint {directory} does not fit this run or is damaged: {error} "
            "Start afresh with --resume never, or name another checkpoint with --resume PATH."
        ) from error
    return state


def _read_state(directory: Path) -> dict[str, Any]:
    """Return the JSON state of a checkpoint; raises ModelError if the file is not a JSON object."""
    path = directory / "state" / ENGINE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path.name} cannot be read ({error}).") from error
    if not isinstance(state, dict):
        raise ModelError(f"{path.name} holds no table.")
    return state


@torch.no_grad()
def _load_weights(directory: Path, part: TrainedModel, ranks: Ranks) -> None:
    """Read one model's weights on the first rank, and copy them into the model on all ranks."""
    # The expected shapes in the layout of the files; if the layouts differ, transformers converts.
    shapes = {name: tuple(tensor.shape) for name, tensor in part.weights.items()}

    def read() -> Mapping[str, Tensor] | StoredTensors:
        """Open the saved weights by the model's own names; raises ModelError if shapes differ.

        If the files use another layout than the model, transformers loads and converts all of them.
        """
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        on_disk = {name: tuple(t.shape) for name, t in to_file_layout(part.model, empty).items()}
        stored = StoredTensors(directory, part.stem)
        stored.check(on_disk)
        if on_disk == shapes:
            return stored
        stored.close()
        model = type(part.model).from_pretrained(directory / part.name, dtype=torch.float32)
        return stored_tensors(model)

    # The first rank reads each tensor just before it is sent.
    stored = run_on_all_ranks(ranks, lambda: read() if ranks.rank == 0 else {})
    for name, target in part.weights.items():
        scatter_from_rank0(target, stored[name] if ranks.rank == 0 else None, ranks)
    if isinstance(stored, StoredTensors):
        stored.close()


def _load_moments(directory: Path, part: TrainedModel, ranks: Ranks) -> None:
    """Read one optimizer's moments on the first rank, and load them on all ranks.

    Raises ModelError, with the tensor's name, for a moment of the wrong shape.
    """
    stored = run_on_all_ranks(
        ranks, lambda: _open_moments(directory, part) if ranks.rank == 0 else None
    )
    # All ranks need the names, only the first one the tensors.
    names: Collection[str] = gather_objects(ranks, [] if stored is None else list(stored))[0]
    names_read: list[str] = []

    def read(name: str) -> Tensor | None:
        names_read.append(name)
        return None if stored is None else stored[name]

    try:
        part.optimizer.load_moments(names, read)
    except ModelError:
        raise
    except ValueError as error:  # the shape of the last one
        raise ModelError(
            f"{part.optimizer_stem}: {names_read[-1]} does not fit ({error})."
        ) from error
    finally:
        if stored is not None:
            stored.close()


def _open_moments(directory: Path, part: TrainedModel) -> StoredTensors:
    stored = StoredTensors(directory, part.optimizer_stem)
    for parameter in {name.rpartition(".")[0] for name in stored}:
        stored.require(f"{parameter}.{moment}" for moment in MOMENTS)
    return stored
