"""Weight files of a model folder: which they are, the tensors that they name, and what is lost.

Names are read without torch, from the headers of safetensors files and from pickles whose code does
not run.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ppo_cli.errors import ModelError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = ".safetensors"
# Pickles that hold no weights: the optimizer and the settings of the run that made them.
NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")
_LONGEST_HEADER = 100_000_000  # the format's own limit
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
            end = stream.seek(0, os.SEEK_END)
        tensors = {name: facts for name, facts in header.items() if name != "__metadata__"}
        whole = max((facts["data_offsets"][1] for facts in tensors.values()), default=0)
        if 8 + length + whole > end:
            raise ValueError(f"it has {end} bytes of {8 + length + whole}")
        return {*tensors}
    except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
        raise _damaged(file, error) from error


def names_in_pickle(file: Path) -> set[str]:
    """Names in a file of torch.save: the keys of its tensors. No code of the file runs."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as stream:
                held = [_InertUnpickler(stream).load() for _ in range(_OLD_LAYOUT_PICKLES)]
        else:
            with zipfile.ZipFile(file) as archive:
                inside = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                with archive.open(inside) as stream:
                    held = [_InertUnpickler(stream).load()]
        return {name for one in held for name in _tensor_keys(one)}
    except Exception as error:  # damaged pickles raise errors of every kind
        raise _damaged(file, error) from error


class _Inert(dict[Any, Any]):
    """Stands for every object of a pickle: keeps the items of a mapping, and does nothing."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    tensor = False

    def __init__(self, *parts: object) -> None:
        super().__init__()
        self.tensor = self.tensor or any(getattr(part, "tensor", False) for part in parts)

    def extend(self, items: object) -> None:
        """Drop what belongs to a list."""

    append = __setstate__ = extend

    def __call__(self, *parts: object) -> _Inert:
        """Stand for what a function that was found by `getattr` would return."""
        return _Inert(*parts)


class _InertTensor(_Inert):
    tensor = True


class _InertUnpickler(pickle.Unpickler):
    """Finds no class and no function but those above."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        rebuilds = module == "torch._utils" and name.startswith("_rebuild_tensor")
        return _InertTensor if rebuilds else _Inert

    def persistent_load(self, pid: object) -> None:
        """Leave the numbers where they are."""


def _tensor_keys(held: object) -> Iterator[str]:
    for key, value in held.items() if isinstance(held, dict) else ():
        if getattr(value, "tensor", False) and isinstance(key, str):
            yield key
        else:
            yield from _tensor_keys(value)


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
            "folder itself are read."
        )
    files = [index.parent / name for name in names]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{index.parent} lacks {len(absent)} of its {len(files)} weight files "
            f"({', '.join(absent[:3])}): fetch the rest."
        )
    return tuple(files)


def _damaged(file: Path, error: Exception) -> ModelError:
    why = str(error).strip() or type(error).__name__
    return ModelError(f"{file} is damaged or cut off ({why}): fetch or save it again.")


# What transformers loads: a shard without its index does not count.
LOADED: Final = (*INDEXES, "model.safetensors", "pytorch_model.bin")
LISTED: Final = 3  # names of tensors in a message
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|h|blocks?))\.(\d+)\.(.+)")
# Where layers are in language models: components of what is in front of `layers.0` and the like.
_CONTAINERS: Final = frozenset({
    "H_module", "L_module", "backbone", "bert", "biogpt", "cpmant", "data2vec_text", "decoder",
    "electra", "encoder", "ernie", "gpt_neox", "gpt_neox_japanese", "language_model", "model",
    "prophetnet", "rembert", "roberta", "roberta_prelayernorm", "roc_bert", "roformer", "rwkv",
    "text_model", "transformer",
})  # fmt: skip
_HEAD = re.compile(
    r"(?:^|[._])(?:lm_head|embed_out|output|output_projection|lm_loss|proj_out|pred_layer|head|"
    r"predictions|decoder)\.(?:\w+\.)*weight$"
)
_EMBEDDING = re.compile(r"embed|wte|^(?:transformer\.)?w\.weight$")
_MOST_LOST: Final = 3  # layers that differ in more tensors are of another kind
# Layers of these differ, or are used several times, without a word in config.json.
_UNEVEN: Final = ("hrm_text", "modernbert-decoder", "rwkv", "zaya")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that is about text; of most models that is all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def weights_problem(folder: Path, config: Mapping[str, Any], *, head: bool) -> str:
    """Say which weights a folder lacks, as far as its config.json and headers tell; "" for none.

    With `head` it has to hold an output layer, unless that is tied to the embedding.
    """
    if not any((folder / name).is_file() for name in LOADED):
        return f"There are no weights in {folder}: none of {', '.join(LOADED)}"
    names = tensor_names(folder)
    lists = _layers_of(names)
    problems = _foreign_names(config, names, lists) or [
        *_lost_embedding(config, names),
        *_lost_layers(config, lists),
        *(_lost_head(config, names) if head else ()),
    ]
    return f"The files in {folder} do not fit its config.json ({problems[0]})" if problems else ""


def list_tensors(label: str, names: Iterable[str]) -> str:
    """Write the first names after a label, and how many more there are; "" without names."""
    ordered = sorted(names)
    if not ordered:
        return ""
    rest = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return f"{label}: {', '.join(ordered[:LISTED])}{rest}"


Lists = Mapping[str, Mapping[int, frozenset[str]]]  # path of the layers -> number -> tensors


def _layers_of(names: Iterable[str]) -> Lists:
    lists: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_LAYER.fullmatch, names)):
        lists[match[1]][int(match[2])].add(match[3])
    return {
        path: {number: frozenset(tensors) for number, tensors in layers.items()}
        for path, layers in lists.items()
    }


def _is_composite(config: Mapping[str, Any]) -> bool:
    """Whether a model has parts beyond its text model, or code that names tensors as it likes."""
    parts = (key for key, part in config.items() if key.endswith("_config") and part)
    return "auto_map" in config or any(key != "quantization_config" for key in parts)


def _foreign_names(config: Mapping[str, Any], names: Iterable[str], lists: Lists) -> list[str]:
    """Return a reason where no list of layers is where a language model has its layers."""
    if not lists or _is_composite(config):
        return []
    for path in lists:
        parts = path.split(".")[:-1]
        twice = any(part == following for part, following in pairwise(parts))
        if set(parts) <= _CONTAINERS and not twice:
            return []
    return [list_tensors("unexpected tensors", names)]


def _lost_layers(config: Mapping[str, Any], lists: Lists) -> Iterator[str]:
    """Yield reasons where layers are missing, or lack tensors that a layer of their kind has."""
    text = text_config(config)
    if text.get("model_type") in _UNEVEN:
        return
    count = min((text[key] for key in LAYERS if type(text.get(key)) is int), default=0)
    if len(lists) == 1 and not _is_composite(config):
        ((path, layers),) = lists.items()
        absent = (f"{path}.{number}.*" for number in range(count) if number not in layers)
        # Layers that predict further ahead follow the others, and hold more than those.
        alike = {layers[number] for number in range(count) if number in layers}
        beyond = (f"{path}.{n}.*" for n in layers if n >= count and layers[n] in alike)
        yield from filter(None, [list_tensors("missing tensors", absent)])
        yield from filter(None, [list_tensors("unexpected tensors", beyond)])
    if text.get("num_kv_shared_layers"):  # the last layers have no keys and values
        return
    kinds = text["layer_types"] if isinstance(text.get("layer_types"), list) else []
    lost = {
        f"{path}.{number}.{name}"
        for path, layers in lists.items()
        for alike in [Counter(layers.values())]
        for number, tensors in layers.items()
        if alike[tensors] == 1
        for other, whole in layers.items()
        if tensors < whole and len(whole - tensors) <= _MOST_LOST
        if kinds[number : number + 1] == kinds[other : other + 1]
        for name in whole - tensors
    }
    if lost:
        yield list_tensors("missing tensors", lost)


def _lost_embedding(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    # A tied output layer may be in the files in its place.
    stored = any(map(_EMBEDDING.search, names))
    if not stored and not (_is_tied(config) and any(map(_HEAD.search, names))):
        yield "missing tensors: those of the embedding, such as model.embed_tokens.weight"


def _is_tied(config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is not False


def _lost_head(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    if not _is_tied(config) and not _is_composite(config) and not any(map(_HEAD.search, names)):
        yield (
            "missing tensors: those of the output layer, such as lm_head.weight, which "
            "tie_word_embeddings=false asks for"
        )
