"""Weight files of a model folder: their list, their tensor names, and missing tensors.

Names are read without torch: from the headers of safetensors files, and from pickles, without
running the pickles' code.
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
from ppo_cli.paths import load_json, read_text

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = ".safetensors"
# Pickles without weights: the optimizer and the settings of the run that wrote them.
NOT_WEIGHTS = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors format
# In torch's older file layout the fourth pickle is the one with the names.
_OLD_LAYOUT_PICKLES = 4


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files with a checkpoint's weights: all shards, in one format."""
    for name in INDEXES:
        if (folder / name).is_file():
            return _shards(folder / name)
    for preferred in ("model.safetensors", "pytorch_model.bin"):
        if (folder / preferred).is_file():
            return (folder / preferred,)
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        files = sorted(p for p in folder.glob(pattern) if not p.name.startswith(NOT_WEIGHTS))
        if files:
            return tuple(files)
    return ()


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights, with all shards."""
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of all tensors in a checkpoint; empty without weights."""
    names: set[str] = set()
    for file in weight_files(folder):
        names |= {*(shapes_in_safetensors if file.suffix == SAFETENSORS else names_in_pickle)(file)}
    return frozenset(names)


def shapes_in_safetensors(file: Path) -> dict[str, list[int]]:
    """Return name -> shape of the tensors in the header of one safetensors file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(stream.read(length))
            end = stream.seek(0, os.SEEK_END)
        # A file that was cut off ends before its last tensor does.
        tensors = {name: facts for name, facts in header.items() if name != "__metadata__"}
        tensors_end = max((facts["data_offsets"][1] for facts in tensors.values()), default=0)
        if 8 + length + tensors_end > end:
            raise ValueError(f"it has {end} bytes of {8 + length + tensors_end}")
        return {name: [*facts["shape"]] for name, facts in tensors.items()}
    except (
        OSError, ValueError, TypeError, KeyError, RecursionError, struct.error
    ) as error:  # fmt: skip
        raise _damaged_error(file, error) from error


def names_in_pickle(file: Path) -> set[str]:
    """Return the tensor names in a file of torch.save, without running the file's code."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as stream:
                pickled = [_NamesUnpickler(stream).load() for _ in range(_OLD_LAYOUT_PICKLES)]
        else:
            with zipfile.ZipFile(file) as archive:
                inside = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                with archive.open(inside) as stream:
                    pickled = [_NamesUnpickler(stream).load()]
        return {name for root in pickled for name in _find_tensor_names(root)}
    except Exception as error:  # damaged pickles raise errors of every kind
        raise _damaged_error(file, error) from error


class _PickleStub(dict[Any, Any]):
    """Replaces every object of a pickle: keeps the items of mappings and ignores other content."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    tensor = False

    def __init__(self, *parts: object) -> None:
        super().__init__()
        self.tensor = self.tensor or any(getattr(part, "tensor", False) for part in parts)

    def extend(self, items: object) -> None:
        """Ignore the items of a list."""

    append = __setstate__ = extend

    def __call__(self, *parts: object) -> _PickleStub:
        """Replace the result of a pickled function call."""
        return _PickleStub(*parts)


class _TensorStub(_PickleStub):
    tensor = True


class _NamesUnpickler(pickle.Unpickler):
    """An unpickler that resolves every class and function to a stub."""

    def find_class(self, module: str, name: str) -> type[_PickleStub]:
        rebuilds = module == "torch._utils" and name.startswith("_rebuild_tensor")
        return _TensorStub if rebuilds else _PickleStub

    def persistent_load(self, pid: object) -> None:
        """Skip the numbers of a tensor."""


def _find_tensor_names(pickled: object) -> Iterator[str]:
    for key, value in pickled.items() if isinstance(pickled, dict) else ():
        if getattr(value, "tensor", False) and isinstance(key, str):
            yield key
        else:
            yield from _find_tensor_names(value)


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a checkpoint; {} if there is no such file."""
    if not file.is_file():
        return {}
    try:
        loaded = load_json(read_text(file))
    except (OSError, ValueError) as error:
        raise _damaged_error(file, error) from error
    if not isinstance(loaded, dict):
        raise ModelError(f"{file} should hold a JSON object and holds a {type(loaded).__name__}.")
    return loaded


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the weight files that an index lists.

    Raises ModelError if it lists none, if one is outside the folder, or if one is missing.
    """
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index} lists no weights (weight_map): fetch the checkpoint again.")
    names = sorted({str(value) for value in shards.values()})
    # An index of a downloaded checkpoint must not point to files elsewhere.
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


def _damaged_error(file: Path, error: Exception) -> ModelError:
    why = str(error).strip() or type(error).__name__
    return ModelError(f"{file} is damaged or cut off ({why}): fetch or save it again.")


# Files that transformers loads; it ignores shards without their index.
WEIGHT_FILES: Final = (*INDEXES, "model.safetensors", "pytorch_model.bin")
MAX_LISTED: Final = 3  # names of tensors in a message
LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYER = re.compile(r"((?:.*?\.)?(?:layers?|h|blocks?))\.(\d+)\.(.+)")
# Module names that may precede `layers.0` and the like in language models.
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
_MAX_MISSING: Final = 3  # a layer that lacks more tensors than this is of another kind
# Layers of these differ or are used several times, and config.json does not say so.
_UNEVEN: Final = ("hrm_text", "modernbert-decoder", "rwkv", "zaya")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json about text; for most models that is all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def weights_problem(folder: Path, config: Mapping[str, Any], *, head: bool) -> str:
    """Explain which weights a folder lacks according to its config.json and headers; "" for none.

    With `head` it must have an output layer, unless that is tied to the embedding.
    """
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        return f"There are no weights in {folder}: none of {', '.join(WEIGHT_FILES)}"
    names = tensor_names(folder)
    lists = _group_by_layer(names)
    problems = _find_foreign_names(config, names, lists) or [
        *_find_missing_embedding(config, names),
        *_find_missing_layers(config, lists),
        *(_find_missing_head(config, names) if head else ()),
    ]
    return f"The files in {folder} do not fit its config.json ({problems[0]})" if problems else ""


def list_tensors(label: str, names: Iterable[str]) -> str:
    """Return a label with the first names and the number of further ones; "" without names."""
    ordered = sorted(names)
    if not ordered:
        return ""
    rest = f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    return f"{label}: {', '.join(ordered[:MAX_LISTED])}{rest}"


LayerLists = Mapping[str, Mapping[int, frozenset[str]]]  # path of the layers -> number -> tensors


def _group_by_layer(names: Iterable[str]) -> LayerLists:
    """Return list of layers -> layer number -> names of the tensors in it."""
    lists: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in filter(None, map(_LAYER.fullmatch, names)):
        lists[match[1]][int(match[2])].add(match[3])
    return {
        path: {number: frozenset(tensors) for number, tensors in layers.items()}
        for path, layers in lists.items()
    }


def _is_composite(config: Mapping[str, Any]) -> bool:
    """Whether a model has parts besides its text model, or custom code with unknown names."""
    parts = (key for key, part in config.items() if key.endswith("_config") and part)
    return "auto_map" in config or any(key != "quantization_config" for key in parts)


def _find_foreign_names(
    config: Mapping[str, Any], names: Iterable[str], lists: LayerLists
) -> list[str]:
    """Return a reason if no layers are at a path where a language model has its layers."""
    if not lists or _is_composite(config):
        return []
    for path in lists:
        parts = path.split(".")[:-1]
        twice = any(part == following for part, following in pairwise(parts))
        if set(parts) <= _CONTAINERS and not twice:
            return []
    return [list_tensors("unexpected tensors", names)]


def _find_missing_layers(config: Mapping[str, Any], lists: LayerLists) -> Iterator[str]:
    """Yield reasons if layers are missing, or lack tensors that similar layers have."""
    text = text_config(config)
    if text.get("model_type") in _UNEVEN:
        return
    count = min((text[key] for key in LAYERS if type(text.get(key)) is int), default=0)
    if len(lists) == 1 and not _is_composite(config):
        ((path, layers),) = lists.items()
        absent = (f"{path}.{number}.*" for number in range(count) if number not in layers)
        # Extra layers for multi-token prediction follow the others, and have more tensors.
        alike = {layers[number] for number in range(count) if number in layers}
        beyond = (f"{path}.{n}.*" for n in layers if n >= count and layers[n] in alike)
        yield from filter(None, [list_tensors("missing tensors", absent)])
        yield from filter(None, [list_tensors("unexpected tensors", beyond)])
    if text.get("num_kv_shared_layers"):  # then the last layers have no keys and values
        return
    kinds = text["layer_types"] if isinstance(text.get("layer_types"), list) else []
    # A layer that lacks a few tensors of another one, and that no other layer equals.
    lost = {
        f"{path}.{number}.{name}"
        for path, layers in lists.items()
        for alike in [Counter(layers.values())]
        for number, tensors in layers.items()
        if alike[tensors] == 1
        for other, complete in layers.items()
        if tensors < complete and len(complete - tensors) <= _MAX_MISSING
        if kinds[number : number + 1] == kinds[other : other + 1]
        for name in complete - tensors
    }
    if lost:
        yield list_tensors("missing tensors", lost)


def _find_missing_embedding(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    # The files may have the tied output layer instead.
    stored = any(map(_EMBEDDING.search, names))
    if not stored and not (_is_tied(config) and any(map(_HEAD.search, names))):
        yield "missing tensors: those of the embedding, such as model.embed_tokens.weight"


def _is_tied(config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is not False


def _find_missing_head(config: Mapping[str, Any], names: Iterable[str]) -> Iterator[str]:
    if not _is_tied(config) and not _is_composite(config) and not any(map(_HEAD.search, names)):
        yield (
            "missing tensors: those of the output layer, such as lm_head.weight, which "
            "tie_word_embeddings=false asks for"
        )
