"""Checkpoints of reward models: downloads them, and reads them tensor by tensor."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModel
from transformers.utils import logging as transformers_logging

from ppo_cli.config.models.known_models import announce_download
from ppo_cli.config.models.weight_files import SAFETENSORS, has_weights, weight_files
from ppo_cli.errors import ModelError, first_line, list_some

# What is downloaded: small files, and the weights in the first format that the hub has.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
FORMATS = ("*.safetensors", "*.bin", "*.pt")
# Not downloaded: subfolders (copies for other programs), and the state of a training run.
NOT_DOWNLOADED = ("*/*", "optimizer*", "scheduler*", "training_args*", "rng_state*")


def fetch(name: str, revision: str | None) -> Path:
    """Download a hub model, or find it in the cache; returns the folder of its snapshot."""
    announce_download(name)
    for pattern in FORMATS:
        try:
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*SMALL_FILES, pattern],
                    ignore_patterns=list(NOT_DOWNLOADED),
                )
            )
        except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
            at = f" at revision {revision}" if revision else ""
            raise ModelError(
                f"The reward model {name}{at} could not be loaded: there is no such folder, "
                f"and the hub did not return it ({first_line(error)}). Give a local folder with "
                "--reward_model, or check the name and the connection."
            ) from error
        if has_weights(folder):  # an index may exist without the shards that it lists
            return folder
    raise ModelError(f"The hub's {name} holds no weights (*.safetensors, *.bin or *.pt).")


# Tensors that a reward model does not need: the language model's output layer, tables that are
# computed, heads of an encoder's pretraining. A name that ends in a dot is a prefix.
UNNEEDED = (
    "lm_head.", "embed_out.", "cls.predictions.", "cls.seq_relationship.", "lm_predictions.",
    "mask_predictions.", "position_embeddings._weight", "word_embeddings._weight",
    "rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "embeddings.position_ids",
    "embeddings.token_type_ids", ".attn.bias", ".attn.masked_bias", ".attention.bias",
    ".attention.masked_bias",
)  # fmt: skip
_MODULES = tuple(name for name in UNNEEDED if name.endswith("."))
_BUFFERS = tuple(name for name in UNNEEDED if not name.endswith("."))


class Checkpoint:
    """All tensors of a folder by name; files are mapped, and a tensor is read on access."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._where: dict[str, Any] = {}  # name -> open safetensors file, or the tensor itself
        # Every read marks its tensor: what is left over at the end shows a wrong adapter.
        self._used: set[str] = set()  # names for `check_all_used`
        for file in weight_files(folder):
            self._register_file(file)

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
        """Return a tensor, or a slice of safetensors that transformers reads later."""
        self._used.add(name)
        source = self._where[name]
        return source if isinstance(source, Tensor) else source.get_slice(name)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor now."""
        self._used.add(name)
        source = self._where[name]
        return source if isinstance(source, Tensor) else source.get_tensor(name)

    def head(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of a head in float32; ModelError if one is missing."""
        required = list(names)
        missing = [name for name in required if name not in self._where]
        if missing:
            raise ModelError(
                f"{self.folder} lacks {list_names(missing)} of its reward head: its scores would "
                "come from random weights. Download the complete checkpoint, or use another one."
            )
        return {name: self.tensor(name).float() for name in required}

    def mark_unneeded(self, names: Iterable[str]) -> None:
        """Mark tensors as not needed, such as a second copy of the body."""
        self._used.update(names)

    def check_all_used(self, adapter: str) -> None:
        """Raise ModelError for a checkpoint with tensors that the network does not use."""
        unused = sorted(
            name for name in self._where if name not in self._used and not is_unneeded(name)
        )
        if unused:
            raise ModelError(
                f"{self.folder} contains {list_names(unused)}, unused by the adapter {adapter}, "
                "so its scores would not be this model's. Choose another with "
                "--reward_model_adapter, or save the checkpoint without them."
            )

    def _register_file(self, file: Path) -> None:
        """Register the tensors of a weight file; ModelError if it cannot be read."""
        try:
            if file.suffix == SAFETENSORS:
                opened = safe_open(file, framework="pt")
                names = opened.keys()  # type: ignore[no-untyped-call]
                self._where.update(dict.fromkeys(names, opened))
            else:
                self._where.update(_read_state_dict(file))
        except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
            raise ModelError(f"{file} does not load: {first_line(error)}.") from error
        except pickle.UnpicklingError as error:
            raise ModelError(
                f"{file} contains more than weights, and unpickling it would run code: "
                "save it as safetensors."
            ) from error


def is_unneeded(name: str) -> bool:
    """Whether reward models do not need this tensor."""
    return name.endswith(_BUFFERS) or any(
        name.startswith(prefix) or f".{prefix}" in name for prefix in _MODULES
    )


def list_names(names: Iterable[str]) -> str:
    """Return the first names of tensors and the number of others, as text."""
    return list_some(sorted(names), 4)


def _read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of torch.save, memory-mapped if its layout allows it."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the older layout cannot be mapped
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise ValueError(f"it holds a {type(loaded).__name__}, not tensors by name")
    inner = [value for value in loaded.values() if isinstance(value, dict)]
    if len(inner) == 1 and not any(isinstance(value, Tensor) for value in loaded.values()):
        loaded = inner[0]  # some trainers save {"model": {...}}
    return {str(name): value for name, value in loaded.items() if isinstance(value, Tensor)}


# Its progress bars and hints would interrupt our output; problems are raised as errors below.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


def load_body(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, *, prefer: tuple[str, ...] = ()
) -> nn.Module:
    """Load the bare transformer; `prefer` orders the prefixes if the file has several copies."""
    # Find the prefix of the body by the name of its embedding.
    with torch.device("meta"):
        bare = AutoModel.from_config(config, trust_remote_code=False)
    # Every body has an embedding, whose name shows the prefix.
    table = bare.get_input_embeddings()
    embedding = next(f"{name}.weight" for name, part in bare.named_modules() if part is table)
    prefixes = [
        name.removesuffix(embedding)
        for name in checkpoint.names
        if name == embedding or name.endswith("." + embedding)
    ]
    if not prefixes:
        raise ModelError(
            f"{checkpoint.folder} lacks {embedding} under any prefix: it does not contain the "
            f"{type(bare).__name__} of its config.json."
        )
    # Load the preferred copy; others must be identical.
    order = {prefix: place for place, prefix in enumerate(prefer)}
    prefixes.sort(key=lambda prefix: (order.get(prefix, len(order)), len(prefix), prefix))
    prefix = prefixes[0]
    _check_copies(checkpoint, prefix, prefixes[1:])
    weights = {
        name.removeprefix(prefix): checkpoint.lazy(name)
        for name in _body_names(checkpoint, prefix, bare)
    }
    body: nn.Module = load_module(type(bare), checkpoint, config, weights, dtype, prefix)
    return body


def load_module(
    kind: Any,
    checkpoint: Checkpoint,
    config: Any,
    weights: dict[str, Any],
    dtype: torch.dtype,
    prefix: str = "",
) -> Any:
    """Load `weights` into a transformers module; ModelError if names or shapes do not match."""
    # With a state dict and no path, transformers (tried: 5.19) loads nothing from disk.
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    folder = checkpoint.folder
    # Each kind of mismatch has its own message, with what to do about it.
    if missing := info["missing_keys"]:
        raise ModelError(
            f"{folder} lacks {list_names(prefix + name for name in missing)}: download the "
            "complete checkpoint."
        )
    if mismatched := info["mismatched_keys"]:
        name, actual_shape, expected_shape = sorted(mismatched)[0]
        raise ModelError(
            f"{folder}: {prefix}{name} has the shape {list(actual_shape)}, but its config.json "
            f"requires {list(expected_shape)} ({len(mismatched)} such tensors): config and weights "
            "are not of one model."
        )
    if unexpected := info["unexpected_keys"]:
        raise ModelError(
            f"{folder} contains {list_names(prefix + name for name in unexpected)}, which its "
            "config.json does not describe: config and weights are not of one model."
        )
    return freeze(model)


def freeze(module: Any) -> Any:
    """Set a module to evaluation: no dropout, no gradients."""
    return module.eval().requires_grad_(False)


def pack_left(
    ids_BL: Tensor, mask_BL: Tensor, type_ids_BL: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move the tokens under the mask to the left of each row, and cut to the longest row."""
    mask_BL = mask_BL.bool()
    if bool((mask_BL.sum(-1) == 0).any()):
        raise ValueError("a sample without a token cannot be scored")
    # A stable sort of the mask keeps the tokens in order.
    order_BL = (~mask_BL).int().argsort(dim=-1, stable=True)
    longest = int(mask_BL.sum(-1).max())
    order_BL = order_BL[:, :longest]
    packed_BL = mask_BL.gather(-1, order_BL)
    types_BL = None if type_ids_BL is None else type_ids_BL.gather(-1, order_BL)
    return ids_BL.gather(-1, order_BL), packed_BL, types_BL


def last_BH(hidden_BLH: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the hidden state at the last token of each left-packed row, in float32."""
    rows = torch.arange(len(mask_BL), device=mask_BL.device)
    return hidden_BLH[rows, mask_BL.sum(-1) - 1].float()


def check_finite(tensors: Iterable[tuple[str, Tensor]], folder: object) -> None:
    """Raise ModelError if a tensor has values that are not finite."""
    for name, tensor in tensors:
        if not math.isfinite(float(tensor.float().abs().sum())):
            raise ModelError(f"{folder}: {name} has values that are not finite: it is damaged.")


def _body_names(checkpoint: Checkpoint, prefix: str, bare: nn.Module) -> list[str]:
    """Return the names of the body: by prefix, or without one by its top-level modules."""
    # Without a prefix, the names of the top-level modules separate the body from the head.
    body_names = set(bare.state_dict())
    stems = (prefix,) if prefix else tuple({name.split(".")[0] + "." for name in body_names})
    return [
        name
        for name in checkpoint.starting_with(*stems)
        if name.removeprefix(prefix) in body_names or not is_unneeded(name)
    ]


def _check_copies(checkpoint: Checkpoint, prefix: str, others: list[str]) -> None:
    """Mark further copies of the body as not needed; ModelError if a copy differs.

    Some classes save their body under two names. Only vectors (norms, biases) are compared: they
    are small, and two different bodies differ in them.
    """
    for other in others:
        for name in checkpoint.starting_with(other) if other else []:
            twin = prefix + name.removeprefix(other)
            if twin not in checkpoint.names:
                continue
            checkpoint.mark_unneeded([name])
            if len(checkpoint.shape(twin)) == 1 and not torch.equal(
                checkpoint.tensor(twin), checkpoint.tensor(name)
            ):
                raise ModelError(
                    f"{checkpoint.folder}: {twin} and {name} should be copies of each other "
                    "but differ, so it is unclear which body belongs to the head."
                )
