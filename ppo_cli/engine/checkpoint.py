"""Checkpoints of an engine: a snapshot at once, written in the background by all ranks.

A trained model is a Hugging Face folder (or a PEFT adapter), its optimizer safetensors under the
names of its parameters. Every rank keeps whole tensors, its share of them, and writes a file of
its own. Any number of ranks reads them: the first from the disk, the others from the first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from ppo_cli.engine.optimizer import MOMENTS, Optimizer
from ppo_cli.engine.ranks import Ranks, gather_objects, together
from ppo_cli.engine.sharding import fill_from_rank0
from ppo_cli.engine.shares import Share, cut_share, to_disk
from ppo_cli.engine.tensor_files import StoredTensors, write_file
from ppo_cli.errors import ModelError

ENGINE_FILE = "engine.json"


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model as a checkpoint holds it, the same on all ranks.

    `weights` are live tensors under the names of its files; DTensors where the model is in
    pieces. `files` is what else its folder needs, on the first rank at least. `model` is the
    Hugging Face model when all of it is saved, None for an adapter.
    """

    name: str
    weights: Mapping[str, Tensor]
    optimizer: Optimizer
    files: Mapping[str, bytes]
    model: Any = None

    @property
    def stem(self) -> str:
        """Where the weights are in a checkpoint, up to the number of the file."""
        return f"{self.name}/{'adapter_model' if self.model is None else 'model'}"

    @property
    def optimizer_stem(self) -> str:
        """Where the optimizer's moments are, up to the number of the file."""
        return f"state/{self.name}_optimizer"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What this rank writes of a checkpoint: copies in host memory, untouched by training."""

    shares: Sequence[Share]
    files: Mapping[str, bytes]
    speaks: bool

    def write(self, directory: Path) -> None:
        """Write this rank's files into `directory` and bring them to the disk; may be a thread's.

        The checkpoint is whole when `write` has ended on all ranks.
        """
        self._make_folders(directory)
        for share in self.shares:
            share.write(directory)
            if self.speaks:
                share.write_index(directory)
        if self.speaks:
            for name, content in self.files.items():
                write_file(directory / name, content)

    def _make_folders(self, directory: Path) -> None:
        """Make all folders first: one that has been given up must not come to life again."""
        for name in (*(share.stem for share in self.shares), *self.files):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)

    def write_in_background(self, directory: Path) -> Future[None]:
        """Write in a thread of its own; the future holds what went wrong."""
        thread = ThreadPoolExecutor(1, "checkpoint")
        try:
            return thread.submit(self.write, directory)
        finally:
            thread.shutdown(wait=False)


def saved_model(name: str, model: Any, optimizer: Optimizer, files: Mapping[str, bytes]) -> Trained:
    """A model all of whose weights are saved; `name` is "actor" or "critic".

    An adapter is `Trained(name, its tensors by PEFT's names, optimizer, files)`.
    """
    return Trained(name, stored_tensors(model), optimizer, files, model)


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """The live tensors that a model's files hold; a tied output head is left out."""
    seen: set[int] = set()
    left_out = set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())
    found: dict[str, Tensor] = {}
    # Named parameters may be gathered ones in the middle of a step; these never are.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in left_out and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def model_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """All files of a Hugging Face folder but the weights.

    They stay the same for a whole run: render them once.
    """

    def write(folder: Path) -> None:
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, str(folder), config=model.config)
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return render_files(write)


def render_files(write: Callable[[Path], object]) -> dict[str, bytes]:
    """What `write` writes into a folder, by name: tokenizers and models only know folders."""
    with tempfile.TemporaryDirectory(prefix="ppo-") as folder:
        root = Path(folder)
        write(root)
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def take_snapshot(
    trained: Sequence[Trained],
    state: Mapping[str, Any],
    ranks: Ranks,
    writers: int | None = None,
) -> Snapshot:
    """Copy this rank's share of all models, moments and `state`; all ranks call.

    The first `writers` ranks write (all by default): those that see the run folder.
    """
    shares: list[Share] = []
    files = {f"state/{ENGINE_FILE}": json.dumps(state, indent=2).encode()}
    for part in trained:
        most = ranks.size if writers is None else writers
        several = 1 if part.model is None else most  # an adapter is always one file
        shares.append(cut_share(part.stem, part.weights, ranks, several, part.model))
        shares.append(cut_share(part.optimizer_stem, part.optimizer.moments(), ranks, most))
        files |= {f"{part.name}/{name}": content for name, content in part.files.items()}
    return Snapshot(shares, files, speaks=ranks.rank == 0)


def restore(directory: Path, trained: Sequence[Trained], ranks: Ranks) -> dict[str, Any]:
    """Put a checkpoint back into models and optimizers; returns its `state`; all ranks call.

    Only the first rank reads. Raises ModelError, on all ranks, that names tensor and file.
    """
    try:
        state: dict[str, Any] = _read_on_first(ranks, lambda: _read_state(directory))
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
    path = directory / "state" / ENGINE_FILE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path.name} cannot be read ({error}).") from error
    if not isinstance(state, dict):
        raise ModelError(f"{path.name} holds no table.")
    return state


def _read_on_first(ranks: Ranks, read: Callable[[], Any]) -> Any:
    """What the first rank reads, on all ranks."""
    found = together(ranks, lambda: read() if ranks.rank == 0 else None)
    return gather_objects(ranks, found)[0]


@torch.no_grad()
def _load_weights(directory: Path, part: Trained, ranks: Ranks) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in part.weights.items()}

    def read() -> Mapping[str, Tensor] | StoredTensors:
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        on_disk = {name: tuple(t.shape) for name, t in to_disk(part.model, empty).items()}
        stored = StoredTensors(directory, part.stem)
        stored.check(on_disk)
        if on_disk == shapes:
            return stored
        stored.close()
        whole = type(part.model).from_pretrained(directory / part.name, dtype=torch.float32)
        return stored_tensors(whole)

    stored = together(ranks, lambda: read() if ranks.rank == 0 else {})
    for name, target in part.weights.items():
        fill_from_rank0(target, stored[name] if ranks.rank == 0 else None, ranks)
    if isinstance(stored, StoredTensors):
        stored.close()


def _load_moments(directory: Path, part: Trained, ranks: Ranks) -> None:
    stored = together(ranks, lambda: _open_moments(directory, part) if ranks.rank == 0 else None)
    names: Collection[str] = gather_objects(ranks, [] if stored is None else list(stored))[0]
    asked: list[str] = []

    def read(name: str) -> Tensor | None:
        asked.append(name)
        return None if stored is None else stored[name]

    try:
        part.optimizer.load_moments(names, read)
    except ModelError:
        raise
    except ValueError as error:  # the shape of the last one
        raise ModelError(f"{part.optimizer_stem}: {asked[-1]} does not fit ({error}).") from error
    finally:
        if stored is not None:
            stored.close()


def _open_moments(directory: Path, part: Trained) -> StoredTensors:
    stored = StoredTensors(directory, part.optimizer_stem)
    for parameter in {name.rpartition(".")[0] for name in stored}:
        stored.require(f"{parameter}.{moment}" for moment in MOMENTS)
    return stored
