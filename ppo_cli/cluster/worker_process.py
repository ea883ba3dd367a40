"""The actor behind every role: holds one object and calls it, and never raises into Ray.

What goes wrong travels as a value, so that the driver can raise it as it was, and only once.
Each worker writes a log, whose last lines are told when it is lost.
No torch here: the environment of the process is made before its object brings that along.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray

from ppo_cli.cluster.addresses import free_port
from ppo_cli.config.machine.gpus import pin_gpu_order
from ppo_cli.config.machine.processor import count_cores
from ppo_cli.engine.leftovers import create_folder
from ppo_cli.errors import FULL_DISK_ERRNOS, ConfigError, MissingPart, PpoError, is_picklable
from ppo_cli.redact import redact

VISIBLE = "CUDA_VISIBLE_DEVICES"
FLUSH_S = 0.02  # what finishes within that time travels together


@dataclass(frozen=True)
class Failure:
    """An exception of a worker: pickled when people caused it, and its traceback."""

    pickled: bytes | None
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or how it failed."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """Hosts the object that a factory makes. All calls of the object happen in one thread.

    An object that streams has a thread for itself (`build_streaming`), because Ray's thread sends
    its items meanwhile. vLLM has a CUDA stream for each thread: an engine that loads in one thread
    and samples in another would do so on two, unordered. Other objects live in Ray's thread, the
    main one: glibc keeps freed memory (`keep_freed_memory`) for that one alone.

    Ray starts a call when the one before it has ended, a stream too.
    """

    def __init__(self) -> None:
        self._held: Any = None
        self._thread: ThreadPoolExecutor | None = None

    def arrive(self, log: str, gpus: tuple[int, ...], threads: int | None) -> Outcome:
        """Open the log, see these GPUs of the node and no others, and say where this is.

        In the words of a `Member`. Without `threads` a worker of GPUs takes their share of the
        node's cores.
        """

        def settle() -> dict[str, Any]:
            write_into(Path(log))
            ignore_signals()
            pin_gpu_order(os.environ)
            os.environ[VISIBLE] = visible_gpus(gpus, os.environ.get(VISIBLE))
            here = ray.get_runtime_context().get_node_id()
            if gpus:  # Ray has set it to 1
                os.environ["OMP_NUM_THREADS"] = str(threads or share_cores(len(gpus), here))
            return {
                "node": ray.util.get_node_ip_address(), "node_id": here, "pid": os.getpid()
            }  # fmt: skip

        return _try(settle)

    def run(self, work: Callable[..., Any], *args: Any) -> Outcome:
        """Do something that needs no object."""
        return _try(lambda: work(*args))

    def build(self, factory: Callable[..., Any] | str, *args: Any) -> Outcome:
        """Make the object that calls go to; `factory` is a function or its `module:name`."""

        def work() -> None:
            from ppo_cli.cluster.serialise import send_tensors_as_arrays  # brings torch
            from ppo_cli.engine.device import require_gpus

            try:
                require_gpus(len(list(filter(None, os.environ.get(VISIBLE, "").split(",")))))
            except MissingPart as error:
                raise MissingPart(f"{socket.gethostname()}: {error}") from None
            send_tensors_as_arrays()
            make = resolve_name(factory) if isinstance(factory, str) else factory
            self._held = make(*args)

        return self._work(work)

    def build_streaming(self, factory: Callable[..., Any] | str, *args: Any) -> Outcome:
        """Make an object whose methods may be streamed too, in a thread for itself."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ppo-object")
        return self.build(factory, *args)

    def call(self, name: str, *args: Any) -> Outcome:
        """Call a method of the object; what another worker gave is passed on as its value."""
        if self._held is None and name == "close":  # it was never built
            return Outcome()

        values = [arg.value if isinstance(arg, Outcome) else arg for arg in args]
        return self._work(lambda: getattr(self._held, name)(*values))

    def stream(self, name: str, *args: Any) -> Iterator[Outcome]:
        """Call a method that yields; what it yields comes in lists, as soon as there is any."""
        assert self._thread is not None, "only an object of build_streaming streams"
        made: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        closed = threading.Event()

        def produce() -> None:
            try:
                with closing(getattr(self._held, name)(*args)) as source:
                    for item in source:
                        made.put(("item", item))
                        if closed.is_set():
                            return
                made.put(("end", None))
            except BaseException as error:
                made.put(("failure", _failure(error)))

        making = self._thread.submit(produce)
        try:
            yield from _in_lists(made)
        finally:
            closed.set()
            making.result()

    def _work(self, work: Callable[[], Any]) -> Outcome:
        """Do something with the object in its thread."""
        return _try(work) if self._thread is None else self._thread.submit(_try, work).result()


def _in_lists(made: queue.SimpleQueue[tuple[str, Any]]) -> Iterator[Outcome]:
    """Gather what comes, and let nothing wait longer than FLUSH_S for company."""
    items: list[Any] = []
    flushed = 0.0
    while True:
        left = flushed + FLUSH_S - time.monotonic()
        try:
            kind, what = made.get(timeout=max(left, 0.0) if items else None)
        except queue.Empty:
            kind, what = "flush", None
        if kind == "item":
            items.append(what)
        if items and (kind != "item" or time.monotonic() - flushed >= FLUSH_S):
            yield Outcome(items)
            items, flushed = [], time.monotonic()
        if kind == "failure":
            yield Outcome(failure=what)
        if kind in ("end", "failure"):
            return


def load_code(module: str) -> None:
    """Import a module, which may take long, before anybody waits for anybody."""
    import_module(module)


def meeting_point(node: str, one_node: bool) -> str:
    """A file of this node, or an address on it where nobody listens yet.

    Whoever reaches such an address could take part: torch listens on all interfaces.
    """
    if one_node:
        return f"file://{create_folder('ranks')}/meet"  # swept when this process is gone
    return f"tcp://{node}:{free_port(node)}"


def share_cores(gpus: int, node_id: str) -> int:
    """The share of the cores of this node that goes with so many of its GPUs."""
    (there,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return max(1, count_cores() * gpus // max(gpus, int(there.get("GPU", 0))))


def visible_gpus(gpus: Sequence[int], inherited: str | None) -> str:
    """Name some of the GPUs that this node lets us see, by their number among those."""
    if not inherited:
        return ",".join(str(gpu) for gpu in gpus)
    names = [name.strip() for name in inherited.split(",")]
    if gpus and max(gpus) >= len(names):
        raise ConfigError(
            f"This node shows GPUs {inherited} ({VISIBLE}), so it has no GPU number {max(gpus)}; "
            "lower --n_gpus or show more."
        )
    return ",".join(names[gpu] for gpu in gpus)


def _try(work: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(work())
    except (Exception, SystemExit) as error:  # an exit would look like a death
        return Outcome(failure=_failure(error))


def _failure(error: BaseException) -> Failure:
    text = redact("".join(traceback.format_exception(error)))
    print(text, flush=True)
    # What a worker is not permitted may be no file but a device or a socket: that stays a bug.
    full = isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS
    told = (isinstance(error, PpoError) or full) and is_picklable(error)
    return Failure(pickle.dumps(error) if told else None, text)


LINES, BYTES = 6, 8000
CRASH = "Fatal Python error"
MARK = "--- process "
KILLED = "was killed (signal 9; out of memory?)"


def write_into(path: Path) -> None:
    """Send all that this process says into a file, C libraries and last words included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", line_buffering=True)
        for number in (1, 2)
    )
    faulthandler.enable(file=2)
    print(f"{_mark(os.getpid())} {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)


def ignore_signals() -> None:
    """Let the driver decide what Ctrl-C and a polite end mean for its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def last_lines(path: Path, pid: int = 0) -> list[str]:
    """The end of a log, or of what one process wrote, without empty lines and secrets.

    A crash is told from its first line on. Nothing when the log is not readable here.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in redact(text).splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith(_mark(pid))]
    lines = lines[starts[-1] + 1 :] if pid and starts else lines
    lines = [line for line in lines if not line.startswith(MARK)]
    crash = next((i for i, line in enumerate(lines) if line.startswith(CRASH)), None)
    return lines[-LINES:] if crash is None else lines[crash : crash + LINES]


def _mark(pid: int) -> str:
    return f"{MARK}{pid},"


def read_tail(path: Path, pid: int = 0) -> str:
    """Say where a log is, and how it ends, or what one process wrote."""
    lines = last_lines(path, pid)
    if not lines:
        return f"Its log: {path}."
    return "\n  ".join([f"The last lines of its log, {path}:", *lines])
