"""Load weights, with one-sentence errors for files that do not fit.

Policies, value models, reward models to fit and bases of adapters all load through `load_weights`.
It turns transformers' warnings into errors: missing tensors would be initialised at random.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.core_model_loading import revert_weight_conversion

from ppo_cli.config.models.folder import refetch_advice
from ppo_cli.config.models.weight_files import list_tensors
from ppo_cli.engine.pretrained import load_part, name_load_errors
from ppo_cli.errors import MissingPart, ModelError

# Constants that older versions of transformers wrote next to the weights.
CONSTANTS = re.compile(r"\.(masked_bias|inv_freq)$")
LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_weights(
    builder: Any,
    path: str,
    what: str,
    flag: str = "--model",
    *,
    config: Any,
    heads: Collection[str] = (),
    replace_heads: bool = False,
    empty: bool = False,
    **options: Any,
) -> tuple[Any, set[str]]:
    """Load a model in float32; returns it and the tensors of `heads` that are not in the files.

    `heads` are modules on top of a backbone: the files may lack them, and have a language head
    instead. With `replace_heads` they may have another shape in the files. Raises ModelError that
    names every other tensor that is missing, unexpected or of another shape. An `empty` model has
    all tensors on the meta device.
    """
    options["config"] = config
    if empty:
        with torch.device("meta"), name_load_errors(path, what, flag):
            return builder.from_config(dtype=torch.float32, **options).eval(), set()
    model, info = load_part(
        builder,
        path,
        what,
        flag,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    # Compare the names and shapes of model and files.
    shapes = {name: shapes for name, *shapes in info["mismatched_keys"]}
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    new = missing | unexpected | (shapes.keys() if replace_heads else set())
    # Heads that the files lack start with new weights.
    fresh = {name for name in new if name.partition(".")[0] in heads}
    # Older files contain buffers that the class now computes.
    computed = {name for name, _ in model.named_buffers()}
    unexpected = {name for name in unexpected - computed - fresh if not CONSTANTS.search(name)}
    if unexpected:
        unexpected -= _whole_names(config, options.get("trust_remote_code", False))
        unexpected = {name for name in unexpected if not _predicts_ahead(name, config)}
    reshaped = (
        f"{name} {[*stored]} instead of {[*needed]}"
        for name, (stored, needed) in shapes.items()
        if name not in fresh
    )
    problems = [
        list_tensors("missing tensors", missing - fresh),
        list_tensors("unexpected tensors", unexpected),
        list_tensors("tensors of another shape", reshaped),
    ]
    if text := "; ".join(problem for problem in problems if problem):
        raise ModelError(
            f"The files in {path} do not fit its config.json as a {what} ({text}). "
            f"{refetch_advice(flag)}"
        )
    # The config ties the output head, but the files have two tensors: saved configs must say so.
    if model.get_expanded_tied_weights_keys(all_submodels=True) and not model.all_tied_weights_keys:
        for owner in (model.config, model.config.get_text_config()):
            owner.tie_word_embeddings = False
    return model, fresh


def _whole_names(config: Any, trust_remote_code: bool) -> set[str]:
    """Return the tensor names of the full model, which a backbone or text part need not use.

    These are the language head and, in a composite checkpoint, towers for images and sound.
    """
    names: set[str] = set()
    for builder in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        remote = builder.__name__ in getattr(config, "auto_map", {})
        if type(config) in builder._model_mapping or (remote and trust_remote_code):
            with torch.device("meta"):
                model = builder.from_config(config, trust_remote_code=trust_remote_code)
            tensors = dict(model.state_dict())
            names |= tensors.keys() | revert_weight_conversion(model, tensors).keys()
    return names


def _predicts_ahead(name: str, config: Any) -> bool:
    """Whether a tensor belongs to the extra layers for multi-token prediction."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    ahead = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = LAYER.search(name)
    return layer is not None and layers <= int(layer[1]) < layers + ahead


def import_bitsandbytes(setting: str) -> Any:
    """Import bitsandbytes, or raise MissingPart that names the `setting` that needs it."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingPart(
            f"{setting} needs the package bitsandbytes, which is not installed: pip install "
            "bitsandbytes, or leave that out."
        ) from error
    return bitsandbytes
