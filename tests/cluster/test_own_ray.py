"""A Ray of a run's own before anybody has joined it: where it lives, and how its start ends."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from ppo_cli.cluster import _prepare_ray
from ppo_cli.cluster.addresses import free_port
from ppo_cli.cluster.ray_process import RayProcess
from ppo_cli.cluster.ray_session import INNER, OwnRay, end_session
from ppo_cli.config.models.known_models import hub_cache
from ppo_cli.errors import Interrupted

ROOT = Path(__file__).resolve().parents[3]
SESSION = "session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
SOCKET_BYTES = 107


@pytest.mark.parametrize("more", [0, 5, 12, 13, 20, 40])
def test_sockets_fit_below_a_temporary_folder_of_any_length(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp")) / ("x" * (more + 1))
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    ray = OwnRay(gpus=0, logs=tmp_path)
    try:
        assert len(os.fsencode(ray.folder / INNER / SESSION)) <= SOCKET_BYTES
    finally:
        ray.close()
    assert not ray.folder.exists()
    root.rmdir()
    root.parent.rmdir()


def test_a_stop_while_it_starts_ends_it_at_once(tmp_path: Path) -> None:
    ray = OwnRay(gpus=0, logs=tmp_path)
    try:
        with pytest.raises(Interrupted, match=r"Stopped while starting \(SIGINT\)"):
            ray.await_address(60, lambda: "SIGINT")
    finally:
        ray.close()
    assert not Path(f"/proc/{ray.pid}").exists() and not ray.folder.exists()


def stop_raylet(folder: Path) -> None:
    """Stop the raylet of a Ray that starts below a folder, so that it does not register."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"/raylet") and os.fsencode(folder) in b" ".join(words):
                    os.kill(int(entry.name), signal.SIGSTOP)
                    return
        time.sleep(0.005)


def raylet_stopper(folder: Path) -> threading.Thread:
    thread = threading.Thread(target=stop_raylet, args=(folder,), daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_ray_that_is_too_slow_is_started_again(tmp_path: Path) -> None:
    own = OwnRay(gpus=0, logs=tmp_path)
    first = own.folder
    raylet_stopper(first)
    host = "127.0.0.1"
    options = ["--head", "--port", str(free_port(host, 6379)), "--node-ip-address", host]
    node = RayProcess([*options, "--include-dashboard", "false"], os.environ, "this node")
    stopper = raylet_stopper(node.folder)
    try:
        assert own.await_address(240, lambda: None).startswith(host)
        assert own.folder != first and not first.exists()
        node.wait(240)
        assert not stopper.is_alive() and node.alive()
        # Ray opens its own folder to all users; nobody else comes that far.
        for folder in (own.folder, node.folder):
            assert folder.stat().st_mode & 0o777 == 0o700
            assert (folder / INNER / "session_latest").exists()
    finally:
        own.close()
        node.stop()
    assert not own.folder.exists() and not node.folder.exists()


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
    _prepare_ray()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert hub_cache().name == "hub"


def test_an_owner_that_dies_while_it_starts_is_noticed(tmp_path: Path) -> None:
    place = tempfile.mkdtemp(prefix="ppo-", dir="/tmp")
    wish = {"folder": place, "num_cpus": 1, "num_gpus": 0, "object_store_memory": 100_000_000}
    with (tmp_path / "log").open("w+") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ppo_cli.cluster.ray_session", json.dumps(wish)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        assert head.stdin is not None and head.stdout is not None
        try:
            head.stdin.close()
            head.stdout.close()
            assert head.wait(120) == 0
        finally:
            head.kill()
            head.wait()
            end_session(head.pid)
            shutil.rmtree(place, ignore_errors=True)
        log.seek(0)
        assert "Traceback" not in log.read()
