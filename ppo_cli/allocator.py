"""Memory at the start of a process: its allocator, and imports without garbage collection.

On the CPU a run uses Ray's copy of jemalloc if possible, else the system's allocator.

glibc cannot put an aligned block into a freed one of the same size, so that temporary tensors leave
holes: a step needs a fifth more memory, and more time (notes/lab_book.md). An allocator is loaded
when a process starts, so commands that compute replace their process by one with jemalloc.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

CHOICE = "PPO_ALLOCATOR"  # "system" switches it off
STARTED = "jemalloc"  # its value while a process is replaced
# Freed memory stays in the process, as `keep_freed_memory` does with glibc, and any later tensor
# may use a piece of it. By default only tensors of at least a 64th of its size may, so that the
# memory of a large model's activations, in one piece, would never be used again.
SETTINGS = "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:40"


def find_jemalloc(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return Ray's copy of jemalloc if it can be used: Linux on x86-64, no GPU, no other setting.

    Other processors may have larger pages than it was built for.
    """
    on_x86_64 = sys.platform == "linux" and os.uname().machine == "x86_64"
    # Devices of a GPU under Linux and under WSL2.
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
    """Whether this process uses jemalloc."""
    import ctypes

    return hasattr(ctypes.CDLL(None), "mallctl")


def start_with_jemalloc() -> None:
    """Replace this process by the same one with jemalloc; return if it has it or cannot use it.

    Its child processes use the system's allocator: they do not inherit the variables.
    """
    if os.environ.get(CHOICE) == STARTED:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for name in (CHOICE, "LD_PRELOAD", "MALLOC_CONF"):
            os.environ.pop(name, None)
        return
    library = find_jemalloc()
    if library is None:
        return
    variables = {CHOICE: STARTED, "LD_PRELOAD": str(library), "MALLOC_CONF": SETTINGS}
    # A Ctrl-C while Python starts would print a traceback: it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variables)


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause garbage collection while large libraries are imported.

    The collector would scan their objects many times; without it the import of torch and
    transformers takes a sixth less time (notes/lab_book.md).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
