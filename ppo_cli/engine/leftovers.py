"""Folders that belong to one process, and go when it is gone.

A killed process cannot tidy up; the next one of the same user, or whoever killed it, does.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ppo_cli.atomic import is_running

SHARED_MEMORY = Path("/dev/shm")
OWNER = "owner"


def create_folder(kind: str) -> Path:
    """Make a folder `ppo-KIND-…` that nobody else reads, in shared memory where there is any.

    Removes first what processes that are no more have left there.
    """
    remove_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"ppo-{kind}-", dir=_place()))
    claim_folder(folder)
    return folder


def list_rendezvous_files(folder: Path) -> list[str]:
    """Names of the files by which vLLM's processes met; shared memory is named after them."""
    return [path.name for path in folder.glob("vllm_dist_*")]


def remove(folder: Path, met_at: Iterable[str]) -> None:
    """Remove a folder, and the shared memory of those that met in it."""
    for name in met_at:
        for path in SHARED_MEMORY.glob(f"{name}-*"):
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def claim_folder(folder: Path) -> None:
    """Write into a folder `ppo-…` that it belongs to this process."""
    (folder / OWNER).write_text(f"{_boot()} {_namespace()} {os.getpid()}")


def remove_stale_folders(place: Path | None = None) -> None:
    """Remove the folders there that processes of this machine have claimed and that are no more.

    Other machines and containers may share the place, which is shared memory by default.
    """
    for note in (place or _place()).glob(f"ppo-*/{OWNER}"):
        with suppress(OSError, ValueError):
            boot, namespace, pid = note.read_text().split()
            is_local = (boot, namespace) == (_boot(), str(_namespace()))
            if is_local and note.parent.lstat().st_uid == os.getuid() and not is_running(int(pid)):
                remove(note.parent, list_rendezvous_files(note.parent))


def _place() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _boot() -> str:
    """This machine since it was started; its name where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> int:
    """Among whom a process id is unique; 0 where the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
