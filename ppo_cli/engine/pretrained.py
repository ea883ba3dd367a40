"""Load configs and tokenizers, with one-sentence errors for files that do not fit; no torch.

`ppo data check` loads only this part of the engine.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.folder import check_folder, folder_problem, read_config, refetch_advice
from ppo_cli.config.models.known_models import announce_download, describe_missing_folder
from ppo_cli.config.models.limits import describe_eager_only
from ppo_cli.config.models.weight_files import list_tensors
from ppo_cli.errors import ModelError, first_line, is_out_of_memory
from ppo_cli.paths import user_path

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


def load_config(path: str, flag: str, trust_remote_code: bool) -> Any:
    """Load a model's config."""
    return load_part(AutoConfig, path, "config", flag, trust_remote_code=trust_remote_code)


def load_tokenizer(path: str, *, trust_remote_code: bool = False, flag: str = "--model") -> Any:
    """Load the tokenizer of a folder, a hub name or `embedded`; ModelError names the flag."""
    tokenizer = load_part(
        AutoTokenizer, model_folder(path), "tokenizer", flag, trust_remote_code=trust_remote_code
    )
    if pad_token_id(tokenizer) is None:
        raise ModelError(f"The tokenizer of {path} has neither a pad nor an end-of-text token.")
    return tokenizer


def pad_token_id(tokenizer: Any, vocabulary_size: int | None = None) -> int:
    """Return the id for padding: the pad token, else the end-of-text token.

    The tokenizer itself is not changed, so checkpoints and exports keep it as it was. Token 0
    replaces an id without an embedding; no other token attends to padding.
    """
    token_id: int = tokenizer.pad_token_id
    token_id = tokenizer.eos_token_id if token_id is None else token_id
    return token_id if vocabulary_size is None or token_id < vocabulary_size else 0


def load_part(loader: Any, path: str, what: str, flag: str = "--model", **options: Any) -> Any:
    """Call `from_pretrained`; raises ModelError in one sentence for known failures."""
    check_folder(path, flag)
    local = user_path(path)
    if local.is_dir():
        weights = what not in ("tokenizer", "config")
        if problem := folder_problem(local, flag, tokenizer=what == "tokenizer", weights=weights):
            raise ModelError(problem)
    else:
        announce_download(path)
    with name_load_errors(path, what, flag):
        return loader.from_pretrained(str(local) if local.is_dir() else path, **options)


@contextmanager
def name_load_errors(path: str, what: str, flag: str) -> Iterator[None]:
    """Turn known failures of a loader into one ModelError."""
    try:
        yield
    except Exception as error:
        # Of files: the tokenizers library raises plain Exceptions.
        if is_out_of_memory(error) or not (type(error) is Exception or isinstance(error, DAMAGED)):
            raise
        raise ModelError(_describe_load_error(path, what, flag, error)) from error


def _describe_load_error(path: str, what: str, flag: str, error: Exception) -> str:
    """Return the message for a model or tokenizer that failed to load: the cause, and what to do.

    `what` is the part, such as "tokenizer"; `flag` is the setting that names `path`.
    """
    # Specific causes first, then what is wrong with the files.
    if text := foreign_code(path, error) or _known_limit(path, what, flag, error):
        return text
    local = user_path(path)
    if local.is_dir():
        unmade = list_tensors("its files do not hold all parts of", _unconverted(error))
        reason = unmade or _reason(error)
        return f"The {what} in {path} does not load: {reason}. {refetch_advice(flag)}"
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        return describe_missing_folder(path, flag)
    return (
        f"The {what} of {path} could not be loaded: there is no such folder here, and the model "
        f"hub did not give it ({_reason(error)}). Give a local folder with {flag}, or check the "
        f"name and the connection; {flag} embedded tries the rest with the bundled model."
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
