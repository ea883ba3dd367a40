"""A model folder as far as its small files tell: sizes, tokenizer, chat template. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppo_cli.config.models.bundled import model_folder
from ppo_cli.config.models.known_models import (
    describe_missing_folder,
    find_model_folder,
    hub_cache,
)
from ppo_cli.config.models.remote_configs import config_problem, find_config
from ppo_cli.config.models.weight_files import (
    SAFETENSORS,
    read_json,
    shapes_in_safetensors,
    text_config,
    weight_files,
    weights_problem,
)
from ppo_cli.errors import ModelError
from ppo_cli.paths import find_special_file, user_path

# Words of a config.json.
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(path: str) -> dict[str, Any]:
    """Return a model's config.json; {} without one."""
    return find_config(path)[0]


def vocabulary_size(path: str) -> int | None:
    """Return for how many tokens a model has embeddings; None where no config.json tells it."""
    size = text_config(read_config(path)).get("vocab_size")
    return size if type(size) is int else None


def has_placeholders(folder: Path) -> bool:
    """Whether the tokenizer in a folder has added tokens that the model has no embedding for."""
    size = vocabulary_size(str(folder))
    added = read_json(folder / "tokenizer.json").get("added_tokens") or ()
    return size is not None and any(token["id"] >= size for token in added)


def check_folder(path: str, flag: str) -> None:
    """Raise ModelError where a path can be no model; a name that a hub may know passes."""
    local = user_path(path)
    if local.exists() and not local.is_dir():
        raise ModelError(f"{flag} {path} is a file; give the folder that holds config.json.")
    if local.is_dir() and not (local / "config.json").exists():
        if (local / "adapter_config.json").is_file():
            raise ModelError(
                f"The folder {path} is a LoRA adapter, not a whole model. Merge it into its base "
                f"with `ppo export {shlex.quote(path)} --out DIR`, and give DIR with {flag}."
            )
        raise ModelError(
            f"The folder {path} holds no config.json, so it is not a model. Give a folder written "
            "by save_pretrained, such as RUN/checkpoints/latest/actor."
        )
    check_files(local)
    if local.exists():
        return
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(describe_missing_folder(path, flag))
    # The hub client would try for a minute to reach it.
    if "/" not in path and not (hub_cache() / f"models--{path}").is_dir():
        raise ModelError(
            f"{describe_missing_folder(path, flag)} Models of the hub are named OWNER/NAME."
        )


def check_files(folder: Path) -> None:
    """Raise ModelError where a folder has a pipe or a device, which loaders would wait for."""
    if special := find_special_file(folder):
        raise ModelError(f"{special} is a pipe, a socket or a device, not a file: remove it.")


VALUE_HEADS = ("score", "classifier")  # transformers' names of a token classifier's head
# A model of the same family may have a few added tokens: a fiftieth of the vocabulary may differ.
_MAX_OTHER_TOKENS = 1 / 50
# Every tokenizer but the byte-level ones keeps its vocabulary in a separate file.
_VOCABULARY = re.compile(
    r"tokenizer\.(?!config)|vocab|spiece|sentencepiece|tekken|merges|.*\.(?:tiktoken|model|spm|bpe)$"
)
_BYTE_LEVEL = ("ByT5", "Canine", "Perceiver", "MyT5")
SAVED_MODEL_HINT = (
    "to which model and tokenizer were both saved, such as RUN/checkpoints/latest/actor"
)


def folder_problem(
    folder: Path, flag: str, *, tokenizer: bool, weights: bool = True, head: bool = False
) -> str:
    """Say what keeps a folder with a config.json from being a model; empty when nothing is seen.

    With `tokenizer` it has to hold one, and a vocabulary that the model has room for; with
    `weights` and `head` those of a backbone, and of an output layer.
    """
    try:
        config = read_json(folder / "config.json")
        if problem := config_problem(config):
            return f"{problem}. Correct it, or name another folder with {flag}."
        read_json(folder / "generation_config.json")  # transformers ignores a damaged one
        if weights and (problem := weights_problem(folder, config, head=head)):
            return f"{problem}. {refetch_advice(flag)}"
        if tokenizer and (problem := _tokenizer_problem(folder, config)):
            return f"{problem}. Name a folder with {flag} {SAVED_MODEL_HINT}."
    except ModelError as error:
        return str(error)
    return ""


def refetch_advice(flag: str) -> str:
    """What to do about the files of a checkpoint that are not as they were saved."""
    return f"Fetch or save the checkpoint again, or name another with {flag}."


def has_template(folder: Path) -> bool:
    """Whether the tokenizer in a model's folder has a chat template."""
    files = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*")]
    written = any(file.is_file() and file.stat().st_size for file in files)
    return written or bool(read_json(folder / "tokenizer_config.json").get("chat_template"))


def describe_unused_head(path: str) -> str:
    """Say that a critic's checkpoint has a head that cannot be the value head; "" if it has none.

    Only the headers of safetensors files are read; pickles do not tell shapes.
    """
    try:
        folder = find_model_folder(model_folder(path))
        files = weight_files(folder) if folder else ()
        shapes = [shapes_in_safetensors(file) for file in files if file.suffix == SAFETENSORS]
    except ModelError:  # the loader, or a check of the folder, says so
        return ""
    for name, (outputs, *_) in ((n, s) for file in shapes for n, s in file.items() if s):
        if name in {f"{head}.weight" for head in VALUE_HEADS} and outputs != 1:
            return (
                f"The critic does not use the head of {path}: {name} has {outputs} labels, and a "
                "value head has one. Values start at 0; the head of a reward model with one label "
                "would be used."
            )
    return ""


def read_vocabulary(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return token -> id of the tokenizer.json in a folder, and of its added tokens among these.

    Both are empty if it does not list its tokens.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, list):  # of pairs: a token and its score
        vocabulary = {pair[0]: i for i, pair in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return ({**vocabulary, **added}, added) if isinstance(vocabulary, Mapping) else ({}, {})


def vocabulary_problem(
    path: str, flag: str, size: int | None, ids: Mapping[str, int],
    policy_path: str, policy_size: int | None, policy_ids: Mapping[str, int],
) -> str:  # fmt: skip
    """Say why a critic or a reference cannot read the policy's tokens; "" if it can.

    Of both models: for how many tokens they have embeddings, and token -> id. What is None or
    empty is not compared.
    """
    if size and policy_size and size < min(policy_size, len(policy_ids)):
        return (
            f"The tokenizer of {policy_path} has {len(policy_ids)} tokens and the model {path} "
            f"only {size}: they do not belong together. Name a model of the same family with "
            f"{flag}."
        )
    others = sum(ids.get(token) != at for token, at in policy_ids.items()) if ids else 0
    if others > len(policy_ids) * _MAX_OTHER_TOKENS:
        return (
            f"{path} has another tokenizer than {policy_path}, so it would read other text: name a "
            f"model of the same family with {flag}."
        )
    return ""


def full_kl_problem(
    path: str, size: int | None, policy_path: str, policy_size: int | None, keys: Sequence[str]
) -> str:
    """Say why a reference has no full KL to a policy; "" if it has, or if none of `keys` asks."""
    if not keys or size == policy_size or None in (size, policy_size):
        return ""
    return (
        f"{' and '.join(keys)} full compares whole vocabularies, but {policy_path} has "
        f"{policy_size} tokens and the reference {path} {size}: use "
        f"{' '.join(f'{key}=low_var_kl' for key in keys)}, which reads the sampled tokens alone, "
        "or another --ref_model."
    )


def _tokenizer_problem(folder: Path, config: Mapping[str, Any]) -> str:
    """Return what is wrong with the tokenizer of a model folder, "" if it fits the model."""
    settings = read_json(folder / "tokenizer_config.json")
    kind = str(settings.get("tokenizer_class", ""))
    named = any(_VOCABULARY.match(file.name) for file in folder.iterdir())
    if not named and not kind.startswith(_BYTE_LEVEL) and "auto_map" not in settings:
        return f"There is no tokenizer in {folder}: no tokenizer.json, and no other vocabulary"
    size = text_config(config).get("vocab_size")
    # Placeholders, of images for example, may be beyond: prompts are searched for them.
    ids, added = read_vocabulary(folder)
    last = max({*ids.values()} - {*added.values()}, default=-1)
    if type(size) is int and last >= size:
        return (
            f"config.json has vocab_size {size}, but the tokenizer of {folder} has {last + 1} words"
        )
    return ""


def template_raises(folder: Path) -> bool | None:
    """Tell whether the chat template in a model folder raises errors; None where there is none."""
    files = [folder / "tokenizer_config.json", *folder.glob("chat_template*")]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    return "raise_exception" in text if len(files) > 1 or '"chat_template"' in text else None
