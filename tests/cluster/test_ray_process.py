"""Ray on this machine before anybody has joined it: where it is, and how its start ends."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppo_cli.cluster import prepare_ray, ray_process
from ppo_cli.cluster.ray_process import INNER_FOLDER, RayOptions, RayProcess
from ppo_cli.config.models.known_models import hub_cache
from ppo_cli.errors import Interrupted, WorkerLost
from ppo_cli.processes.program import Program

SESSION = "session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
SOCKET_BYTES = 107
HEAD = RayOptions(1, 0, node_address="127.0.0.1")


@pytest.mark.parametrize("extra_bytes", [0, 5, 12, 13, 20, 40])
def test_sockets_fit_below_a_temporary_folder_of_any_length(
    extra_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp")) / ("x" * (extra_bytes + 1))
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    ray = RayProcess(HEAD, log=tmp_path / "log")
    try:
        assert len(os.fsencode(ray.folder / INNER_FOLDER / SESSION)) <= SOCKET_BYTES
    finally:
        ray.close()
    assert not ray.folder.exists()
    root.rmdir()
    root.parent.rmdir()


def test_a_stop_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    ray = RayProcess(HEAD, log=tmp_path / "log")
    try:
        with pytest.raises(Interrupted, match=r"Stopped while starting \(SIGINT\)"):
            ray.await_address(60, lambda: "SIGINT")
    finally:
        ray.close()
    assert not Path(f"/proc/{ray.pid}").exists() and not ray.folder.exists()


def test_a_start_that_fails_gives_the_reason() -> None:
    head = RayOptions(1, 0, head_address="127.0.0.1")
    ray = RayProcess(head, label="node 1 (host-b)")
    try:
        with pytest.raises(WorkerLost, match=r"did not start on node 1 \(host-b\)") as caught:
            ray.await_address(300)
        assert "127.0.0.1" in str(caught.value).partition("\n")[2]
    finally:
        ray.close()


def test_ray_gets_no_secret_and_no_other_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environs: list[dict[str, str]] = []

    def record(command: list[str], **options: Any) -> Program:
        environs.append(options["environ"])
        return Program(["true"], **options)

    monkeypatch.setattr(ray_process, "Program", record)
    environ = {"PPO_CLUSTER_SECRET": "s", "RAY_ADDRESS": "a", "OTHER": "yes"}
    RayProcess(HEAD, log=tmp_path / "log", environ=environ).close()
    assert environs[0]["OTHER"] == "yes"
    assert not {"PPO_CLUSTER_SECRET", "RAY_ADDRESS"} & environs[0].keys()


def stop_raylet(folder: Path) -> None:
    """Stop the raylet of a Ray that starts below a folder, so that it does not register."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if command[0].endswith(b"/raylet") and os.fsencode(folder) in b" ".join(command):
                    os.kill(int(entry.name), signal.SIGSTOP)
                    return
        time.sleep(0.005)


@pytest.mark.slow
def test_a_ray_that_is_too_slow_is_started_again(tmp_path: Path) -> None:
    ray = RayProcess(HEAD, log=tmp_path / "log")
    first = ray.folder
    threading.Thread(target=stop_raylet, args=(first,), daemon=True).start()
    try:
        assert ray.await_address(600).count(":") == 1
        assert ray.folder != first and not first.exists()
        # Ray opens its own folder to all users, but nobody else can enter the one around it.
        assert ray.folder.stat().st_mode & 0o777 == 0o700
        assert (ray.folder / INNER_FOLDER / "session_latest").exists()
    finally:
        ray.close()
    assert not ray.folder.exists()


def test_a_user_whom_the_system_does_not_know_needs_no_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in (
        "HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "RAY_ADDRESS",
        "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
    ):  # fmt: skip
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    assert prepare_ray()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert not prepare_ray()  # as in a process that inherits it
    assert hub_cache().name == "hub"
