"""What `ppo doctor --self-test` has proven about the GPUs of this machine.

The record is a JSON file in the cache folder. Its name is a digest of what it depends on: the GPUs,
their driver and the versions of torch, vLLM and ppo-cli. After a change of any of these there is no
record. A setting that is not set uses the fast way on a GPU only if the record proves it.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from pydantic import FiniteFloat, TypeAdapter

from ppo_cli.addresses import cache_root
from ppo_cli.atomic import atomic_replace
from ppo_cli.digests import digest_text
from ppo_cli.errors import UserError, ppo
from ppo_cli.machine.gpus import driver_version, list_gpus
from ppo_cli.machine.versions import installed_version
from ppo_cli.paths import user_path

# Parts of the program that are slower or refused on a GPU until a self-test has proven them.
Feature = Literal[
    "packed_attention", "transfer_ipc", "transfer_nccl", "sleep", "shared_prompts",
    "keep_gathered", "expandable_segments", "float16", "compiled_layers",
]  # fmt: skip
FEATURES: tuple[Feature, ...] = get_args(Feature)
State = Literal["ok", "differs", "failed", "skipped"]
PROBE_BYTES = 2**16  # larger than a record


@dataclass(frozen=True)
class DeviceKey:
    """What a record depends on, without the number of GPUs: workers see only some of them."""

    gpus: tuple[str, ...]  # names, each once
    driver: str | None
    versions: dict[str, str | None]  # package -> installed version

    @classmethod
    def of_this_machine(cls) -> DeviceKey:
        """Return the key of the GPUs that this process may use and of the installed packages."""
        names = tuple(sorted({gpu.name for gpu in list_gpus()}))
        versions = {name: _installed_version(name) for name in ("torch", "ppo-cli", "vllm")}
        return cls(names, driver_version() if names else None, versions)


@dataclass(frozen=True)
class CheckRecord:
    """How a check ended, and what it measured."""

    check: str
    state: State
    detail: str
    seconds: FiniteFloat
    figures: dict[str, int | FiniteFloat | str]


@dataclass(frozen=True)
class DeviceRecord:
    """The outcome of a self-test: its checks, and the features that these prove."""

    key: DeviceKey
    time: str  # ISO 8601, UTC
    checks: list[CheckRecord]
    proven: list[Feature]


@cache
def _file_format() -> TypeAdapter[DeviceRecord]:
    """Return what reads a record, built where there is one: most machines have none."""
    return TypeAdapter(DeviceRecord)


def is_proven(feature: Feature) -> bool:
    """Whether the self-test has passed for a feature on these GPUs; False without a record."""
    record = read_record()
    return record is not None and feature in record.proven


def read_record() -> DeviceRecord | None:
    """Read the record of this machine; None if there is none or it is damaged."""
    # A damaged or foreign file counts as no record.
    key = DeviceKey.of_this_machine()
    path = record_path(key)
    if path is None:
        return None
    with suppress(OSError, ValueError):
        content = path.read_bytes()
        record = _file_format().validate_json(content, strict=True)
        # The name is a shortened digest: compare the whole key.
        if record.key == key:
            return record
    return None


def require_record(flag: str) -> DeviceRecord:
    """Read the record of this machine; raise UserError, with the `flag` that needs it, without."""
    if (record := read_record()) is not None:
        return record
    path = record_path(DeviceKey.of_this_machine())
    what = "there is no record of a self-test on these devices with these versions"
    if path is not None and path.exists():
        what = f"the record {path} is damaged"
    raise UserError(
        f"{flag}: {what}. Make one with `{ppo('doctor --self-test')}`, or leave {flag} out."
    )


def write_record(record: DeviceRecord) -> Path:
    """Write a record, replacing the previous one; raise UserError if that fails."""
    folder = _make_folder()
    path = folder / _file_name(record.key)
    try:
        with atomic_replace(path) as unfinished:
            unfinished.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return path


def require_writable() -> None:
    """Raise UserError if no record can be written: no folder, no permission, no space."""
    folder = _make_folder()
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _make_folder() -> Path:
    """Create the folder of the records and return it.

    Raises UserError without a home folder, or if the folder cannot be created.
    """
    # The folder is created when the first record is written.
    folder = record_folder()
    if folder is None:
        raise UserError("there is no home folder; name a folder with XDG_CACHE_HOME")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: OSError) -> UserError:
    reason = error.strerror or error
    return UserError(f"{folder} cannot be written: {reason}; XDG_CACHE_HOME names another folder")


def record_path(key: DeviceKey) -> Path | None:
    """Return the file of a key's record; None without a home folder."""
    folder = record_folder()
    return None if folder is None else folder / _file_name(key)


def _file_name(key: DeviceKey) -> str:
    digest = digest_text(json.dumps(asdict(key), sort_keys=True), 32)
    return f"{digest}.json"


def record_folder() -> Path | None:
    """Return the folder of self-test records; None without a home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "self_tests"


def cache_folder() -> Path | None:
    """Return the folder for files that can be computed again; None without a home folder."""
    try:
        return user_path(cache_root())
    except RuntimeError:
        return None


_installed_version = cache(installed_version)  # a plan reads the record hundreds of times
