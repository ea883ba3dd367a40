"""The tensors of a checkpoint, read one by one, and an account of which of them were used.

Only safetensors and PyTorch's weights-only reader touch the files: nothing in them can run.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_cli.config.known_models import SAFETENSORS, weight_files
from ppo_cli.errors import ModelError

# What checkpoints carry beside the weights that a reward model needs: the language model's output
# layer, tables that are computed anyway, heads of an encoder's pretraining.
SPARE = (
    "lm_head.", "embed_out.", "cls.predictions.", "cls.seq_relationship.", "lm_predictions.",
    "mask_predictions.", "position_embeddings._weight", "word_embeddings._weight",
    "rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "embeddings.position_ids",
    "embeddings.token_type_ids", ".attn.bias", ".attn.masked_bias", ".attention.bias",
    ".attention.masked_bias",
)  # fmt: skip
_BUFFERS = tuple(spare for spare in SPARE if not spare.endswith("."))


class Checkpoint:
    """All tensors of a folder by name; a file is mapped, and a tensor read when it is wanted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[str, Any] = {}  # name -> open safetensors file, or the tensor itself
        self._used: set[str] = set()
        for file in weight_files(folder):
            self._open(file)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._where)

    def starting_with(self, *prefixes: str) -> list[str]:
        """Sorted names that begin with one of the prefixes."""
        return sorted(name for name in self._where if name.startswith(prefixes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        source = self._where[name]
        slice_ = source if isinstance(source, Tensor) else source.get_slice(name)
        return tuple(slice_.shape if isinstance(slice_, Tensor) else slice_.get_shape())

    def lazy(self, name: str) -> Any:
        """A tensor, or safetensors' slice of it that is read when transformers asks."""
        self._used.add(name)
        source = self._where[name]
        return source if isinstance(source, Tensor) else source.get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read now."""
        self._used.add(name)
        source = self._where[name]
        return source if isinstance(source, Tensor) else source.get_tensor(name)

    def head(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of a head in float32; all must be there, for a head is never drawn at random."""
        wanted = list(names)
        missing = [name for name in wanted if name not in self._where]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {listed(missing)} of its reward head: its scores would come "
                "from random weights. Fetch the whole checkpoint, or another one."
            )
        return {name: self.tensor(name).float() for name in wanted}

    def spare(self, names: Iterable[str]) -> None:
        """Mark tensors that are known to be of no use here, such as a second copy of the body."""
        self._used.update(names)

    def check_all_used(self, adapter: str) -> None:
        """Refuse a checkpoint that holds more than the network could take up."""
        left = sorted(name for name in self._where if name not in self._used and not is_spare(name))
        if left:
            raise ModelError(
                f"{self.folder} holds {listed(left)}, for which the adapter {adapter} has no use: "
                "its scores would not be this model's. Choose another with "
                "--reward_model_adapter, or save the checkpoint without them."
            )

    def _open(self, file: Path) -> None:
        try:
            if file.suffix == SAFETENSORS:
                opened = safe_open(file, framework="pt")
                names = opened.keys()  # type: ignore[no-untyped-call]
                self._where.update(dict.fromkeys(names, opened))
            else:
                self._where.update(_state_dict(file))
        except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
            raise ModelError(f"{file} does not load: {_first_line(error)}.") from error
        except pickle.UnpicklingError as error:
            raise ModelError(
                f"{file} holds more than weights, and running what is in it is not safe: "
                "save it as safetensors."
            ) from error


def is_spare(name: str) -> bool:
    """Whether a tensor is one that reward models do without."""
    return name.endswith(_BUFFERS) or any(
        name.startswith(spare) or f".{spare}" in name for spare in SPARE if spare.endswith(".")
    )


def listed(names: Iterable[str], most: int = 4) -> str:
    """Name a few, and count the rest."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def _state_dict(file: Path) -> dict[str, Tensor]:
    """Tensors of a file of torch.save, mapped where its layout allows it."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the older layout cannot be mapped
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not tensors by name")
    inner = [value for value in loaded.values() if isinstance(value, dict)]
    if len(inner) == 1 and not any(isinstance(value, Tensor) for value in loaded.values()):
        loaded = inner[0]  # {"model": {...}}, as some trainers save it
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .:")
