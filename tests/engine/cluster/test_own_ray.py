"""A Ray of a run's own before anybody has joined it: where it lives, and how its start ends."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from ppo_cli.config.reward_models import hub_cache
from ppo_cli.engine.cluster import _prepare_ray
from ppo_cli.engine.cluster.own_ray import OwnRay
from ppo_cli.errors import Interrupted

pytestmark = pytest.mark.ray
SESSION = "session_2026-12-31_23-59-59_999999_4194304/sockets/plasma_store"
SOCKET_BYTES = 107


@pytest.mark.parametrize("more", [0, 5, 10, 20, 40])
def test_sockets_fit_below_a_temporary_folder_of_any_length(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp")) / ("x" * (more + 1))
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    ray = OwnRay(gpus=0, logs=tmp_path)
    try:
        assert len(os.fsencode(ray.folder / SESSION)) <= SOCKET_BYTES
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


def test_a_user_whom_the_system_does_not_know_needs_no_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "environ", {})
    _prepare_ray()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert hub_cache().name == "hub"
