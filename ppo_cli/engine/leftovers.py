"""Temporary folders that belong to one process, and the removal of those of dead processes.

A killed process cannot clean up; the next process of the same user does it.
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
OWNER = "owner"  # the file in a folder that names its process


def create_folder(kind: str) -> Path:
    """Create a private folder `ppo-KIND-…`, in shared memory if available.

    Removes the folders of dead processes first.
    """
    remove_stale_folders()
    # mkdtemp makes it readable for this user only.
    folder = Path(tempfile.mkdtemp(prefix=f"ppo-{kind}-", dir=_place()))
    claim_folder(folder)
    return folder


def list_rendezvous_files(folder: Path) -> list[str]:
    """Return the names of vLLM's rendezvous files; its shared memory is named after them."""
    return [path.name for path in folder.glob("vllm_dist_*")]


def remove(folder: Path, met_at: Iterable[str]) -> None:
    """Remove a folder, and the shared memory of the processes that met in it."""
    # vLLM's processes cannot remove shared memory after they were killed.
    for name in met_at:
        for path in SHARED_MEMORY.glob(f"{name}-*"):
            with suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def claim_folder(folder: Path) -> None:
    """Record in a folder `ppo-…` that it belongs to this process."""
    (folder / OWNER).write_text(f"{_boot()} {_namespace()} {os.getpid()}")


def remove_stale_folders(place: Path | None = None) -> None:
    """Remove the folders of this machine's dead processes, by default in shared memory.

    Other machines and containers may share `place`: their folders are left alone.
    """
    for note in (place or _place()).glob(f"ppo-*/{OWNER}"):
        with suppress(OSError, ValueError):
            # A process id is only meaningful within one boot and one pid namespace.
            boot, namespace, pid = note.read_text().split()
            is_local = (boot, namespace) == (_boot(), str(_namespace()))
            if is_local and note.parent.lstat().st_uid == os.getuid() and not is_running(int(pid)):
                remove(note.parent, list_rendezvous_files(note.parent))


def _place() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _boot() -> str:
    """Return the id of this machine's boot; its host name if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> int:
    """Return the pid namespace; 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
