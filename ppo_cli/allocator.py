"""Memory at the start of a process: its allocator, and imports without garbage collection.

On the CPU a run has jemalloc where Ray brings it, else the system's allocator.

glibc cannot put an aligned block into a freed one of its size, so that tensors which come and go
leave holes: a step takes a fifth more memory, and more time (docs/log.md). An allocator must be
there when a process begins, so commands that compute replace their process by one with it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

CHOICE = "PPO_ALLOCATOR"  # "system" switches it off
STARTED = "jemalloc"  # its value while a process is replaced
# What is freed stays for the next tensors, as `keep_freed_memory` has it with glibc, and any of
# them may take a piece of it: by default only those of at least a 64th of its size do, so that what
# the activations of a large model leave, in one piece, is never used again.
SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:40"


def find_jemalloc(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Ray's copy, where it can be used: Linux on x86-64, no GPU, nothing else asked for.

    Other processors may have larger pages than it was built for.
    """
    on_x86_64 = sys.platform == "linux" and os.uname().machine == "x86_64"
    # Of a GPU under Linux, and under WSL2.
    if not on_x86_64 or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return None
    if any(environ.get(name) for name in (CHOICE, "LD_PRELOAD", "MALLOC_CONF")):
        return None
    ray = find_spec("ray")
    if ray is None or ray.origin is None:
        return None
    library = Path(ray.origin).parent / "core/libjemalloc.so"
    return library if library.is_file() else None


def has_jemalloc() -> bool:
    """Whether this process has it."""
    import ctypes

    return hasattr(ctypes.CDLL(None), "mallctl")


def start_with_jemalloc() -> None:
    """Replace this process by the same one with jemalloc; returns where that is done or not due.

    Its own children have the system's allocator: they inherit nothing of this.
    """
    if os.environ.get(CHOICE) == STARTED:
        for name in (CHOICE, "LD_PRELOAD", "MALLOC_CONF"):
            os.environ.pop(name, None)
        return
    library = find_jemalloc()
    if library is None:
        return
    told = {CHOICE: STARTED, "LD_PRELOAD": str(library), "MALLOC_CONF": SETTINGS}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | told)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import large libraries in this block: the collector would search all they make, many times.

    Without it torch and transformers take a sixth less time (docs/log.md).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
