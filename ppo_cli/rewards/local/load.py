"""Loads a reward model: its head, its format, and the length that it can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer

from ppo_cli.config.known_models import Found, find_adapter, find_folder, is_url, read_json
from ppo_cli.config.reward_schema import ModelReward
from ppo_cli.errors import ModelError, RewardError, first_line
from ppo_cli.rewards.local.base import LoadedModel
from ppo_cli.rewards.local.checkpoint import Checkpoint, fetch
from ppo_cli.rewards.local.heads import HEADS, Parts

_UNKNOWN = 2048
_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")
# A tokenizer that knows no limit says so with a huge number.
_NO_LIMIT = 10**6


def hard_limit(config: Any, tokenizer: Any) -> int:
    """How many positions the body has; without such a number, what its tokenizer says."""
    text = config.get_text_config()
    for field in _FIELDS:
        value = getattr(text, field, None)
        if isinstance(value, int) and value > 0:
            return value - _position_offset(text)
    said = getattr(tokenizer, "model_max_length", _NO_LIMIT)
    return int(said) if said < _NO_LIMIT else _UNKNOWN


def _position_offset(config: Any) -> int:
    """RoBERTa and its kin begin to count after the pad token's own position."""
    kin = ("roberta", "camembert", "longformer", "mpnet", "xmod", "data2vec-text", "ibert")
    if any(word in config.model_type for word in kin):
        return int(config.pad_token_id or 0) + 1
    return 0


# What loaders raise for files that are absent, cut off, or not what they should be.
DAMAGED = (OSError, ValueError, KeyError, ImportError, RuntimeError, EOFError, SafetensorError)


def load_reward_model(settings: ModelReward) -> LoadedModel:
    """Load body, head and tokenizer of `settings.path`, onto its device, ready to score."""
    if settings.path is None or is_url(settings.path):
        raise RewardError(f"{settings.path} is no local reward model; give --reward_model FOLDER.")
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    folder = _folder(settings)
    found = find_adapter(str(folder), settings.adapter)
    config = _load_config(folder, settings.tokenizer, found)
    tokenizer = _load_tokenizer(folder, settings.tokenizer)
    checkpoint = Checkpoint(folder)
    head = HEADS[found.adapter]
    try:
        network = head.load(Parts(checkpoint, config, dtype, tokenizer, settings.outputs))
        checkpoint.check_all_used(found.adapter)
        network.module.to(device)
    except ModelError:
        raise
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            f"{settings.path} does not fit into the free memory of {device}: choose another with "
            "--reward_model_device, or bring less there."
        ) from error
    except DAMAGED as error:
        raise ModelError(f"{settings.path} does not load: {first_line(error)}.") from error
    return LoadedModel(
        adapter=found.adapter,
        reason=found.reason,
        network=network,
        tokenizer=tokenizer,
        max_length=min(hard_limit(config, tokenizer), settings.max_length or head.max_length),
        pad_token_id=_pad_token_id(tokenizer, config),
    )


def choose_device(name: str | None) -> torch.device:
    """The device that was named, or a GPU where there is one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RewardError(
            f"--reward_model_device {name} is no device; give cpu, cuda or cuda:1."
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RewardError(
            f"--reward_model_device {name}: this machine has {torch.cuda.device_count()} GPUs that "
            "PyTorch can use; give cpu, or the number of one of them."
        )
    if device.type not in ("cpu", "cuda", "mps"):
        raise RewardError(
            f"--reward_model_device {name}: reward models run on cpu or cuda, not {device.type}."
        )
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Precision of the body: bfloat16 on a GPU, float32 elsewhere, unless it was named."""
    if name is None:
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _folder(settings: ModelReward) -> Path:
    path = str(settings.path)
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if settings.revision is None and (cached := find_folder(path)) is not None:
        return cached
    find_folder(path)  # a name that can be no hub model is refused here
    return fetch(path, settings.revision)


def _load_config(folder: Path, base: str | None, found: Found) -> Any:
    """The checkpoint's config; one without `model_type` borrows that of the base model."""
    written = read_json(folder / "config.json")
    if "quantization_config" in written:
        raise ModelError(f"{folder} is quantised; give the reward model's plain weights.")
    source = str(folder)
    if not written.get("model_type"):
        if base is None:
            raise ModelError(
                f"{folder} has no config.json that says its model_type, so its body cannot be "
                "built: put the config.json of its base model there, or name a folder that holds "
                "config and tokenizer of the base model with reward.model.tokenizer."
            )
        source = base
    what = f"The config of {source} cannot be read as {found.adapter}"
    return _read(AutoConfig, source, what, "Code that lies with a model is never run.")


def _load_tokenizer(folder: Path, named: str | None) -> Any:
    source = named or str(folder)
    what = f"The tokenizer of the reward model {source} does not load"
    return _read(AutoTokenizer, source, what, "Name another with reward.model.tokenizer.")


def _read(loader: Any, source: str, what: str, mend: str) -> Any:
    """Load a part of a model; a failure names its fix."""
    try:
        return loader.from_pretrained(source, trust_remote_code=False)
    except DAMAGED as error:
        raise ModelError(f"{what}: {first_line(error)}. {mend}") from error


def _pad_token_id(tokenizer: Any, config: Any) -> int:
    """A token to pad with; any that the embedding has a row for will do."""
    rows = int(getattr(config.get_text_config(), "vocab_size", 1))
    for candidate in (tokenizer.pad_token_id, config.pad_token_id, tokenizer.eos_token_id):
        if isinstance(candidate, int) and 0 <= candidate < rows:
            return candidate
    return 0
