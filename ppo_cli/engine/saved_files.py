"""The small files of a Hugging Face folder: configs and tokenizer, for older and newer readers.

transformers 5 has renamed settings. transformers 4, servers and converters read the older names,
and silently take defaults where they are missing, so both names are written.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from transformers.dynamic_module_utils import custom_object_save

from ppo_cli.engine.pretrained import DAMAGED
from ppo_cli.errors import ModelError, first_line

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# Families with RoPE parameters for each type of layer that transformers 4 knows too.
ROPE_BY_LAYER_TYPE = ("gemma3_text", "gemma3n_text", "olmo3")
# Families of which transformers 4 takes exactly these fields of scaled RoPE.
ROPE_FIELDS = {
    "phi3": ("type", "short_factor", "long_factor"),
    "phi4_multimodal": ("type", "short_factor", "long_factor"),
    "olmo": ("type", "factor"),
}  # fmt: skip
OLDER_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}  # of Granite's hybrids
# What transformers 5 notes about the machine on which a tokenizer was loaded.
MACHINE_KEYS = ("is_local", "local_files_only", "vocab_file")
# Patterns of files that belong to a tokenizer.
TOKENIZER_FILES = (
    "*token*", "*vocab*", "merges*", "spiece*", "*.tiktoken", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip


def model_files(
    model: Any, tokenizer: Any = None, end_ids: Collection[int] = ()
) -> dict[str, bytes]:
    """Render the files of a Hugging Face folder except the weights, once before a run begins.

    Without a tokenizer, only those of the model. `end_ids` are the tokens that end a response.
    Raises ModelError if a file cannot be saved.
    """

    def write(folder: Path) -> None:
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        if model.is_remote_code():
            custom_object_save(model, str(folder), config=model.config)
        _save_config(model.config, folder, CONFIG)

    # The config names the dtype and class of the weights that are saved.
    files = add_older_names(render_files(write, f"config of {model.name_or_path}"))
    files |= generation_files(model, end_ids)
    return files if tokenizer is None else files | tokenizer_files(tokenizer)


def generation_files(model: Any, end_ids: Collection[int]) -> dict[str, bytes]:
    """Render generation_config.json, which lists `end_ids` too; nothing for a value model."""
    if not model.can_generate():
        return {}
    config = copy.deepcopy(model.generation_config)
    listed = config.eos_token_id
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if missing := sorted(set(end_ids) - set(ids)):
        config.eos_token_id = [*ids, *missing]
    return render_files(
        lambda folder: _save_config(config, folder, GENERATION_CONFIG),
        f"generation config of {model.name_or_path}",
    )


def _save_config(config: Any, folder: Path, name: str) -> None:
    """Save a config; some that transformers loads but refuses to save are written directly."""
    try:
        config.save_pretrained(folder)
    except (ValueError, StrictDataclassError):
        config.to_json_file(folder / name)


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer: as transformers saves it, else copied from its folder."""
    try:
        files = render_files(tokenizer.save_pretrained, f"tokenizer of {tokenizer.name_or_path}")
    except ModelError:
        folder = Path(tokenizer.name_or_path)
        paths = [path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)]
        if not folder.is_dir() or not paths:
            raise
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    # transformers 5 leaves the SentencePiece model out, which llama.cpp converts.
    vocabulary = Path(getattr(tokenizer, "vocab_file", None) or "")
    if vocabulary.suffix == ".model" and vocabulary.is_file():
        files[vocabulary.name] = vocabulary.read_bytes()
    return add_older_names(files)


def render_files(write: Callable[[Path], object], what: str) -> dict[str, bytes]:
    """Return the contents of the files that `write` writes into a folder, by name.

    Goes through a temporary folder, because tokenizers and configs only save into folders.
    Raises ModelError that says why `what` cannot be saved.
    """
    with tempfile.TemporaryDirectory(prefix="ppo-") as folder:
        root = Path(folder)
        try:
            write(root)
        except DAMAGED as error:
            raise ModelError(
                f"The {what} loads but cannot be saved, so no checkpoint could be written: "
                f"{first_line(error)}. Mend its file, or choose another model."
            ) from error
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write small files into a folder, subfolders included."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def add_older_names(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with the names of transformers 4 in their configs, next to those of 5."""
    renamed = dict(files)
    if CONFIG in files:
        config = _name_model_settings(json.loads(files[CONFIG]))
        renamed[CONFIG] = _render_json(config)
    if TOKENIZER_CONFIG in files:
        config = _name_tokenizer_settings(json.loads(files[TOKENIZER_CONFIG]), files.get(TOKENIZER))
        renamed[TOKENIZER_CONFIG] = _render_json(config)
    return renamed


def _render_json(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _name_model_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which both generations find dtype, RoPE and the number of experts."""
    older: dict[str, Any] = {
        key: _name_model_settings(value)
        for key, value in config.items()
        if key.endswith("_config") and isinstance(value, dict)
    }
    for name, older_name in (("dtype", "torch_dtype"), ("num_local_experts", "num_experts")):
        if name in config:
            older[older_name] = config[name]
    rope, kind = config.get("rope_parameters") or {}, str(config.get("model_type"))
    if kind == "granitemoehybrid":
        older["layer_types"] = [OLDER_LAYERS.get(layer, layer) for layer in config["layer_types"]]
    if kind in ROPE_BY_LAYER_TYPE and rope:
        if kind.startswith("gemma3"):
            older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:  # no RoPE, or a family that transformers 4 does not know
        return {**config, **older}
    older["rope_theta"] = rope["rope_theta"]
    if (share := rope.get("partial_rotary_factor")) is not None:
        older["partial_rotary_factor"] = share
    if kind.startswith("gpt_neox"):
        older |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": share}
    # A rope_scaling that is there replaces rope_parameters in transformers 5: it must say the same.
    scaling = {k: v for k, v in rope.items() if k not in ("rope_theta", "partial_rotary_factor")}
    plain = scaling == {"rope_type": "default"}
    if not plain and kind in ROPE_FIELDS:
        scaling["type"] = scaling["rope_type"]
        scaling = {field: scaling[field] for field in ROPE_FIELDS[kind]}
    older["rope_scaling"] = None if plain else scaling
    return {**config, **older}


def _name_tokenizer_settings(config: dict[str, Any], tokenizer: bytes | None) -> dict[str, Any]:
    """Return a tokenizer's config in a form that both generations of transformers open."""
    config = {key: value for key, value in config.items() if key not in MACHINE_KEYS}
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    # transformers 4 adds a start token by default in some families, whatever tokenizer.json says.
    if tokenizer is not None:
        backend = Tokenizer.from_buffer(tokenizer)
        tokens = backend.encode("a").tokens
        for key, place in (("bos_token", 0), ("eos_token", -1)):
            token = config.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            config[f"add_{key}"] = bool(tokens) and tokens[place] == text
    return config
