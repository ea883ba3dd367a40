"""What is wrong with a model folder, as far as its files tell without being loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppo_cli.config.bundled import model_folder
from ppo_cli.config.derived import critic_path, uses_critic, uses_reference
from ppo_cli.config.known_models import read_json, tensor_names
from ppo_cli.config.schema import Config
from ppo_cli.errors import ModelError

SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "n_embd", "n_layer", "n_head",
)  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer")
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
# Every tokenizer but the byte-level ones keeps its vocabulary in a file of its own.
_VOCABULARY = re.compile(
    r"tokenizer\.(?!config)|vocab|spiece|sentencepiece|tekken|merges|.*\.(?:tiktoken|model|spm|bpe)$"
)
_BYTE_LEVEL = ("ByT5", "Canine", "Perceiver", "MyT5")
SAVED = "to which model and tokenizer were both saved, such as RUN/checkpoints/latest/actor"


def broken_models(config: Config) -> list[str]:
    """Return one sentence for each local model folder of a run that cannot be trained."""
    asked = [("--model", config.model.path)]
    if uses_critic(config):
        asked.append(("--critic_model", critic_path(config)))
    if uses_reference(config) and config.ref.path:
        asked.append(("ref.path", config.ref.path))
    problems = []
    for path, flag in {path: flag for flag, path in reversed(asked)}.items():
        folder = Path(model_folder(path)).expanduser()
        if (folder / "config.json").is_file():
            problems.append(folder_problem(folder, flag, tokenizer=path == config.model.path))
    return [problem for problem in problems if problem]


def folder_problem(folder: Path, flag: str, *, tokenizer: bool) -> str:
    """Say what keeps a folder with a config.json from being a model; empty when nothing is seen.

    With `tokenizer` it has to hold one, and a vocabulary that the model has room for.
    """
    try:
        config = read_json(folder / "config.json")
        wrong = next(_size_problems(config, tensor_names(folder)), "")
        if tokenizer and not wrong:
            wrong = _tokenizer_problem(folder, config)
    except ModelError as error:
        wrong = str(error).rstrip(".")
    return f"{wrong}. Name a folder with {flag} {SAVED}." if wrong else ""


def template_remark(config: Config) -> list[str]:
    """Tell of a local model that its prompts will go without a chat template."""
    folder = Path(model_folder(config.model.path)).expanduser()
    if not config.data.apply_chat_template or not (folder / "config.json").is_file():
        return []
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    written = any(file.is_file() and file.stat().st_size for file in files)
    if written or read_json(folder / "tokenizer_config.json").get("chat_template"):
        return []
    return [
        f"The tokenizer in {config.model.path} has no chat template: prompts are used as plain "
        "text, and prompts that are lists of messages are refused."
    ]


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _size_problems(config: Mapping[str, Any], names: frozenset[str]) -> Iterator[str]:
    text = _text_model(config)
    for key in SIZES:
        value = text.get(key)
        if isinstance(value, int | float | str) and not (type(value) is int and value > 0):
            yield f"config.json has {key} {value!r}, which is no size: a whole number from 1 up"
    held = max((int(found[1]) + 1 for found in map(_LAYER.search, names) if found), default=0)
    wanted = next((text[key] for key in LAYERS if type(text.get(key)) is int), 0)
    if 0 < held < wanted:
        yield f"config.json asks for {wanted} layers, but the weights hold {held}"


def _tokenizer_problem(folder: Path, config: Mapping[str, Any]) -> str:
    told = read_json(folder / "tokenizer_config.json")
    kind = str(told.get("tokenizer_class", ""))
    named = any(_VOCABULARY.match(file.name) for file in folder.iterdir())
    if not named and not kind.startswith(_BYTE_LEVEL) and "auto_map" not in told:
        return f"There is no tokenizer in {folder}: no tokenizer.json, and no other vocabulary"
    model = read_json(folder / "tokenizer.json").get("model")
    words = model.get("vocab") if isinstance(model, Mapping) else None
    room = _text_model(config).get("vocab_size")
    if isinstance(words, Mapping):
        last = max((i for i in words.values() if isinstance(i, int)), default=-1)
    else:
        last = len(words) - 1 if isinstance(words, list) else -1
    if type(room) is int and last >= room:
        return (
            f"config.json has vocab_size {room}, but the tokenizer of {folder} has {last + 1} words"
        )
    return ""
