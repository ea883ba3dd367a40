"""The record of the self-test: what it proves, and when it no longer does."""

from __future__ import annotations

import json
import math
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.errors import UserError
from ppo_cli.machine import device_record
from ppo_cli.machine.device_record import (
    FEATURES,
    CheckRecord,
    DeviceKey,
    DeviceRecord,
    is_proven,
    read_record,
    record_path,
    require_writable,
    write_record,
)
from ppo_cli.machine.gpus import Gpu

GPUS = (Gpu("NVIDIA A", "GPU-1", 80 * 2**30, (9, 0)), Gpu("NVIDIA A", "GPU-2", 80 * 2**30, (9, 0)))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_gpus(monkeypatch, GPUS)


def set_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], driver: str = "580.65"
) -> None:
    monkeypatch.setattr(device_record, "list_gpus", lambda: gpus)
    monkeypatch.setattr(device_record, "driver_version", lambda: driver)


def record(*features: device_record.Feature) -> DeviceRecord:
    key = DeviceKey.of_this_machine()
    check = CheckRecord("attention", "ok", "2 comparisons", 1.5, {"agree_ms": 2, "by": "NCCL"})
    return DeviceRecord(key, "2026-01-01T00:00:00Z", [check], [*features])


def test_only_what_a_record_lists_is_proven() -> None:
    assert not any(map(is_proven, FEATURES))
    path = write_record(record("packed_attention", "sleep"))
    assert path == record_path(DeviceKey.of_this_machine())
    assert [name for name in FEATURES if is_proven(name)] == ["packed_attention", "sleep"]
    assert read_record() == record("packed_attention", "sleep")
    write_record(record("sleep"))
    assert not is_proven("packed_attention")


def test_a_worker_that_sees_one_of_the_gpus_reads_the_same_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_record(record("sleep"))
    set_gpus(monkeypatch, GPUS[1:])
    assert is_proven("sleep")


@pytest.mark.parametrize("package", ["torch", "vllm", "ppo-cli"])
def test_another_version_has_no_record(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(record("sleep"))
    version = device_record._installed_version

    def installed_version(name: str) -> str | None:
        return "99" if name == package else version(name)

    monkeypatch.setattr(device_record, "_installed_version", installed_version)
    assert read_record() is None


def test_another_driver_or_gpu_has_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(record("sleep"))
    set_gpus(monkeypatch, GPUS, driver="590.10")
    assert read_record() is None
    set_gpus(monkeypatch, (replace(GPUS[0], name="NVIDIA B"),))
    assert read_record() is None


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "NaN", '{"key": {}}', '{"key": {"gpus": 1}, "checks": []}']
)
def test_a_damaged_record_is_none(text: str) -> None:
    write_record(record("sleep")).write_text(text)
    assert read_record() is None and not is_proven("sleep")


CHECK = {"check": "attention", "state": "ok", "detail": "", "seconds": 1.0, "figures": {}}


@pytest.mark.parametrize(
    "damage",
    [
        {"checks": None}, {"checks": [3]}, {"checks": {}}, {"proven": None}, {"proven": "sleep"},
        {"checks": [{k: v for k, v in CHECK.items() if k != "state"}]}, {"time": 3},
        {"checks": [CHECK | {"state": "fine"}]}, {"checks": [CHECK | {"seconds": math.nan}]},
        {"checks": [CHECK | {"figures": {"agree_ms": math.inf}}]}, {"proven": ["sleep", None]},
        {"checks": [CHECK | {"figures": None}]}, {"checks": [CHECK | {"seconds": "1.0"}]},
    ],
)  # fmt: skip
def test_a_record_with_a_damaged_field_is_none(damage: dict[str, Any]) -> None:
    path = write_record(record("sleep"))
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"checks": [CHECK]}))
    assert is_proven("sleep")
    path.write_text(json.dumps(fields | damage))
    assert read_record() is None


def test_a_record_with_an_unknown_feature_is_none() -> None:
    path = write_record(record("sleep"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"proven": ["teleport"]}))
    assert read_record() is None


def test_no_cache_folder_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reason = re.escape(f"{tmp_path}/file/ppo-cli/self_tests cannot be written: Not a directory")
    with pytest.raises(UserError, match=reason):
        write_record(record("sleep"))
    with pytest.raises(UserError, match=reason):
        require_writable()
    assert read_record() is None


def test_a_full_disk_is_seen_before_the_test() -> None:
    require_writable()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # an error of writing, as ENOSPC
    try:
        with pytest.raises(UserError, match="self_tests cannot be written: File too large"):
            require_writable()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
