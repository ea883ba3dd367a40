"""Load configs, tokenizers and weights, with one-sentence errors for files that do not fit.

Policies, value models, reward models to fit and bases of adapters all load through `load_weights`.
It turns transformers' warnings into errors: missing tensors would be initialised at random.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from ppo_cli.config.models.folder import check_folder, folder_problem, read_config, refetch_advice
from ppo_cli.config.models.known_models import announce_download, describe_missing_folder
from ppo_cli.config.models.limits import describe_eager_only
from ppo_cli.config.models.weight_files import list_tensors
from ppo_cli.errors import MissingPart, ModelError, first_line, is_out_of_memory

# Their progress bars and advice would interrupt our own output; problems are raised as errors.
transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()
hub_logging.set_verbosity(logging.ERROR)

# What loaders raise for files that are missing, truncated or of another kind.
DAMAGED = (
    OSError, ValueError, KeyError, ImportError, RuntimeError, EOFError, SafetensorError,
    AssertionError, AttributeError, ArithmeticError, IndexError, RecursionError, TypeError,
    pickle.UnpicklingError, StrictDataclassError,
)  # fmt: skip
# transformers' errors about an attention kernel that a family does not support.
ATTENTION_ERROR = re.compile(r"attn_implementation|attention implementation|Flash ?Attention")
GENERATION_CODE = "generation/configuration_utils.py"  # transformers' checks of that config
# Constants that older versions of transformers wrote next to the weights.
CONSTANTS = re.compile(r"\.(masked_bias|inv_freq)$")
LAYER = re.compile(r"\blayers\.(\d+)\.")


def load_config(path: str, flag: str, trust_remote_code: bool) -> Any:
    """Load a model's config."""
    return load_part(AutoConfig, path, "config", flag, trust_remote_code=trust_remote_code)


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
        with torch.device("meta"), _naming_errors(path, what, flag):
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


def load_part(loader: Any, path: str, what: str, flag: str = "--model", **options: Any) -> Any:
    """Call `from_pretrained`; raises ModelError in one sentence for known failures."""
    check_folder(path, flag)
    local = Path(path).expanduser()
    if local.is_dir():
        weights = what not in ("tokenizer", "config")
        if problem := folder_problem(local, flag, tokenizer=what == "tokenizer", weights=weights):
            raise ModelError(problem)
    else:
        announce_download(path)
    with _naming_errors(path, what, flag):
        return loader.from_pretrained(str(local) if local.is_dir() else path, **options)


@contextmanager
def _naming_errors(path: str, what: str, flag: str) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(_describe_load_error(path, what, flag, error)) from error


def _describe_load_error(path: str, what: str, flag: str, error: Exception) -> str:
    """Return the message for a model or tokenizer that failed to load: the cause, and what to do.

    `what` is the part, such as "tokenizer"; `flag` is the setting that names `path`.
    """
    # Specific causes first, then what is wrong with the files.
    if text := foreign_code(path, error) or _known_limit(path, what, flag, error):
        return text
    local = Path(path).expanduser()
    if local.is_dir():
        unmade = list_tensors("its files do not hold all parts of", _unconverted(error))
        reason = unmade or _reason(error)
        return f"The {what} in {path} does not load: {reason}. {refetch_advice(flag)}"
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        return describe_missing_folder(path, flag)
    return (
        f"The {what} of {path} could not be loaded: there is no such folder here, and the model "
        f"hub did not give it ({_reason(error)}). Give a local folder with {flag}, or check the "
        "name and the connection."
    )


def _known_limit(path: str, what: str, flag: str, error: Exception) -> str:
    """Return a message if transformers does not support this model; "" for other errors."""
    text, kind = " ".join(str(error).split()), read_config(path).get("model_type")
    if ATTENTION_ERROR.search(text):
        return describe_eager_only(path)
    if "does not recognize this architecture" in text:
        return (
            f"The installed transformers does not know the model_type {kind!r} of {path}: install "
            f"a later one (pip install -U transformers), or name another model with {flag}."
        )
    if text.startswith("Unrecognized configuration class"):
        return (
            f"{path} is a {kind} model, of which transformers has no {what}: name another with "
            f"{flag}."
        )
    # transformers' text does not name the file.
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    if any(frame.f_code.co_filename.endswith(GENERATION_CODE) for frame in frames):
        return (
            f"{path} has a generation_config.json that cannot be used: {_reason(error)}. Mend the "
            "file, or remove it."
        )
    if isinstance(error, ImportError):
        return f"The {what} of {path} does not load: {_reason(error)}. Install what is missing."
    return ""


def _reason(error: Exception) -> str:
    """Return the sentence of an error's text that says what is wrong."""
    if isinstance(error, KeyError) and " " not in str(error.args[0]):  # its text is the key
        return f"transformers does not know {error} in its files"
    if isinstance(error, StrictDataclassError):  # behind the name of a validator
        return str(error).strip().splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
    return re.split(r"\. (?=[A-Z])", first_line(error))[0].strip('"')


def _unconverted(error: Exception) -> set[str]:
    """Return tensors that transformers could not convert, such as experts from their parts.

    transformers 5.19 names them in its log, which is off here, and in a local variable of the
    frame that raised.
    """
    names: set[str] = set()
    for frame, _ in walk_tb(error.__traceback__):
        info = frame.f_locals.get("loading_info")
        names |= set(getattr(info, "conversion_errors", ()))
    return names


def foreign_code(path: str, error: Exception) -> str:
    """Return how to allow a model's own Python code; "" if that is not the problem."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        f"{path} comes with Python code, which runs only if you allow it: read the *.py files "
        "there, then add model.trust_remote_code=true to the command (ppo export: "
        "--trust_remote_code; reward models run none)."
    )


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
