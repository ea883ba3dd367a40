"""Atomic writes: a file, folder or link is replaced when the new one is complete, or not at all.

The new one is written next to its target under a hidden name until it is complete and synced to the
disk. The name contains the process id, and for files the number of the write, so that two writers
of the same target do not collide: the last one to finish wins. The next write of a target removes
what a killed process left.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppo_cli.errors import ConfigError, UserError, refuse_out_address
from ppo_cli.paths import can_write, nearest_existing

# Prefix of hidden names; the process id and the number of the write follow.
UNFINISHED = ".unfinished-"
_WRITER = re.compile(rf"{re.escape(UNFINISHED)}(\d+)(\.\d+)?-")
_writes = itertools.count(1)  # threads may write the same target


def unfinished_path(path: Path) -> Path:
    """Return the hidden path under which `path` is written."""
    return path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a hidden path to write; it becomes `path` at the end, and is deleted after an error."""
    fresh = path.with_name(f"{UNFINISHED}{os.getpid()}.{next(_writes)}-{path.name}")
    _sweep_leftovers(path)
    try:
        yield fresh
        move_into_place(fresh, path)
    finally:
        with suppress(OSError):
            delete(fresh)


def check_out_folder(out: Path) -> None:
    """Raise UserError if a folder cannot be written to `--out`, before hours of work."""
    refuse_out_address(out)
    place = out.resolve()
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--out {out} is a file; name a folder.")
    # The nearest existing parent must be writable.
    if not can_write(parent := nearest_existing(place.parent)):
        raise ConfigError(f"--out {out}: the folder {parent} cannot be written.")


@contextmanager
def replace_model(out: Path) -> Iterator[Path]:
    """Yield a hidden folder to fill with a model; it replaces `out` at the end."""
    place = out.resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(place) as fresh:
            fresh.mkdir()
            yield fresh
    except OSError as error:
        raise UserError(
            f"The model could not be written to {out}: {error.strerror or error}. Free some "
            "space, or choose another --out."
        ) from error


def move_into_place(fresh: Path, path: Path) -> None:
    """Sync `fresh` and rename it to `path`; an existing folder `path` is deleted afterwards."""
    if not fresh.is_symlink():
        for part in (fresh, *fresh.rglob("*")):
            _sync(part)
    # A folder cannot be replaced by a rename: the old one gets another name first.
    old = _set_aside(path) if path.is_dir() and not path.is_symlink() else None
    os.replace(fresh, path)
    # The rename is on the disk only after its folder is synced too.
    _sync(path.parent)
    if old is not None:
        delete(old)


def open_to_readers(file: Path) -> None:
    """Give a file the mode that the umask gave its new folder; safetensors writes 0600."""
    file.chmod(0o666 & file.parent.stat().st_mode)


def delete_atomically(folder: Path) -> None:
    """Delete a folder without showing it half-deleted: it is renamed first."""
    delete(_set_aside(folder))


def delete(path: Path) -> None:
    """Delete a file, a link or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep_unfinished(folder: Path) -> None:
    """Remove unfinished files of this and of dead processes in a folder; keep those of others."""
    for path in folder.glob(f"{UNFINISHED}*"):
        writer = _WRITER.match(path.name)
        if writer is None or _is_abandoned(writer):
            delete(path)


def _sweep_leftovers(path: Path) -> None:
    """Remove unfinished versions of `path` of this and of dead processes; keep those of others."""
    for leftover in path.parent.glob(f"{UNFINISHED}*"):
        writer = _WRITER.match(leftover.name)
        if writer and leftover.name == f"{writer[0]}{path.name}" and _is_abandoned(writer):
            delete(leftover)


def _is_abandoned(writer: re.Match[str]) -> bool:
    """Whether nobody writes under this name any more; a numbered one may be another thread's."""
    # A name without a number belongs to a folder, which one thread writes at a time.
    pid = int(writer[1])
    return not is_running(pid) or (pid == os.getpid() and writer[2] is None)


def is_running(pid: int) -> bool:
    """Whether a process runs: it exists and, on Linux, is not a zombie."""
    try:
        # Signal 0 only checks whether the process exists.
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    except (FileNotFoundError, IndexError):  # no /proc on this system, or the process just ended
        return not Path("/proc/self").exists()


def _set_aside(folder: Path) -> Path:
    """Rename a folder to a hidden name, and return that path."""
    renamed = folder.with_name(f"old-{folder.name}")
    _sweep_leftovers(renamed)
    old = unfinished_path(renamed)
    os.replace(folder, old)
    return old


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
