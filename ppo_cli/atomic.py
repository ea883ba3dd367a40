"""Atomic writes: a file, folder or link is replaced when the new one is complete, or not at all.

What is written lies beside its target under a hidden name until it is complete and synced to the
disk. The name holds the number of the process, and of a file that of the write, so two that write
the same target do not meet: the last one to finish wins. What a killed process left is removed by
the next write of that target.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = ".unfinished-"
_WRITER = re.compile(rf"{re.escape(UNFINISHED)}(\d+)(\.\d+)?-")
_writes = itertools.count(1)


def unfinished(path: Path) -> Path:
    """Return the hidden name under which `path` is written."""
    return path.with_name(f"{UNFINISHED}{os.getpid()}-{path.name}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the hidden name to write; on leaving it becomes `path`, on an error it is removed."""
    fresh = path.with_name(f"{UNFINISHED}{os.getpid()}.{next(_writes)}-{path.name}")
    _sweep(path)
    try:
        yield fresh
        install(fresh, path)
    finally:
        with suppress(OSError):
            remove(fresh)


def install(fresh: Path, path: Path) -> None:
    """Sync what lies at `fresh` and give it the name `path`; a folder there is deleted after."""
    if not fresh.is_symlink():
        for part in (fresh, *fresh.rglob("*")):
            _sync(part)
    old = _set_aside(path) if path.is_dir() and not path.is_symlink() else None
    os.replace(fresh, path)
    _sync(path.parent)
    if old is not None:
        remove(old)


def discard(folder: Path) -> None:
    """Delete a folder that must not be seen half-deleted: it gets a hidden name first."""
    remove(_set_aside(folder))


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sweep_unfinished(folder: Path) -> None:
    """Remove what this process and killed ones left half-written; what others write now stays."""
    for path in folder.glob(f"{UNFINISHED}*"):
        writer = _WRITER.match(path.name)
        if writer is None or _is_over(writer):
            remove(path)


def _sweep(path: Path) -> None:
    """Remove what this process and killed ones left of `path`; what others write now stays."""
    for left in path.parent.glob(f"{UNFINISHED}*"):
        writer = _WRITER.match(left.name)
        if writer and left.name == f"{writer[0]}{path.name}" and _is_over(writer):
            remove(left)


def _is_over(writer: re.Match[str]) -> bool:
    """Whether nobody writes under this name any more; another thread may, where it has a number."""
    pid = int(writer[1])
    return not lives(pid) or (pid == os.getpid() and writer[2] is None)


def lives(pid: int) -> bool:
    """Tell whether a process runs: neither gone nor, on Linux, waiting to be reaped."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    except (FileNotFoundError, IndexError):  # no /proc here, or the process ended meanwhile
        return not Path("/proc/self").exists()


def _set_aside(folder: Path) -> Path:
    renamed = folder.with_name(f"old-{folder.name}")
    _sweep(renamed)
    old = unfinished(renamed)
    os.replace(folder, old)
    return old


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
