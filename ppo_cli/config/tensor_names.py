"""Names of the tensors in a checkpoint, read without loading one of them and without torch.

Safetensors files begin with a JSON header. PyTorch files are pickles: their instructions are
read, never run.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ppo_cli.errors import ModelError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = ".safetensors"
# Pickles that hold no weights: the optimizer and the settings of the run that made them.
NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")
_LONGEST_HEADER = 100_000_000  # the format's own limit
# What an instruction leaves on the stack, as far as it matters here.
_PUSHES = {
    "SHORT_BINUNICODE": "text:", "BINUNICODE": "text:", "BINUNICODE8": "text:", "UNICODE": "text:",
    "GLOBAL": "call:", "REDUCE": "made:",
}  # fmt: skip
_REBUILDS = "call:torch._utils _rebuild_tensor"
_STORES = {"BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"}
_RECALLS = {"BINGET", "LONG_BINGET", "GET"}
# A file of the older layout holds these pickles before the one with the names is through.
_OLD_LAYOUT_PICKLES = 4


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Files of a checkpoint that hold its weights: all shards, in one format."""
    for name in INDEXES:
        if (folder / name).is_file():
            return _shards(folder / name)
    for preferred in ("model.safetensors", "pytorch_model.bin"):
        if (folder / preferred).is_file():
            return (folder / preferred,)
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = sorted(p for p in folder.glob(pattern) if not p.name.startswith(NOT_WEIGHTS))
        if found:
            return tuple(found)
    return ()


def has_weights(folder: Path) -> bool:
    """Whether the weights are there, with all of their shards."""
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in the checkpoint that lies in `folder`; empty without weights."""
    names: set[str] = set()
    for file in weight_files(folder):
        names |= names_in_safetensors(file) if file.suffix == SAFETENSORS else names_in_pickle(file)
    return frozenset(names)


def names_in_safetensors(file: Path) -> set[str]:
    """Names in the header of one safetensors file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(stream.read(length))
        return {name for name in header if name != "__metadata__"}
    except (OSError, ValueError, TypeError, struct.error) as error:
        raise _damaged(file, error) from error


def names_in_pickle(file: Path) -> set[str]:
    """Names in a file of torch.save: what stands before each call that rebuilds a tensor."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as stream:
                return _names_in_old_layout(stream)
        with zipfile.ZipFile(file) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(inside) as stream:
                return set(_rebuilt(stream))
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile, pickle.PickleError) as error:
        raise _damaged(file, error) from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint; {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} should hold a JSON object and holds a {type(loaded).__name__}.")
    return loaded


def _shards(index: Path) -> tuple[Path, ...]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index} lists no weights (weight_map): fetch the checkpoint again.")
    names = sorted({str(value) for value in shards.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(
            f"{index} names weights that are not beside it ({outside[0]!r}): only files of the "
            "folder itself are read"
        )
    files = [index.parent / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{index.parent} lacks {len(absent)} of its {len(files)} weight files "
            f"({', '.join(absent[:3])}): fetch the rest."
        )
    return tuple(files)


def _names_in_old_layout(stream: IO[bytes]) -> set[str]:
    names: set[str] = set()
    for _ in range(_OLD_LAYOUT_PICKLES):
        names |= set(_rebuilt(stream))
    return names


def _rebuilt(stream: IO[bytes]) -> Iterator[str]:
    """Follow the text on a pickle's stack far enough to know the key of each tensor.

    A key is the last text before the call that rebuilds its tensor, or before the recall of a
    tensor that another key has too.
    """
    memo: dict[int, str] = {}
    texts: list[str] = []
    pushed = ""
    for opcode, argument, _ in pickletools.genops(stream):
        name, before = opcode.name, pushed
        if name in _STORES:
            memo[len(memo) if name == "MEMOIZE" else _index(argument)] = pushed
            continue
        if name in _RECALLS:
            pushed = memo.get(_index(argument), "")
        elif name == "STACK_GLOBAL":
            pushed = "call:" + " ".join(texts[-2:])
            del texts[-2:]
        else:
            pushed = f"{_PUSHES[name]}{argument}" if name in _PUSHES else ""
        if pushed.startswith("text:"):
            texts.append(pushed.removeprefix("text:"))
        shared = name in _RECALLS and pushed.startswith("made:") and before.startswith("text:")
        if texts and (shared or pushed.startswith(_REBUILDS)):
            yield texts[-1]


def _index(argument: object) -> int:
    return int(str(argument))


def _damaged(file: Path, error: Exception) -> ModelError:
    why = str(error).strip() or type(error).__name__
    return ModelError(f"{file} is damaged or cut off ({why}): fetch or save it again.")
