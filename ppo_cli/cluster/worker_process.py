"""The Ray actor behind every role: holds one object, calls its methods, never raises into Ray.

An error travels as a value, so that the driver can raise it unchanged and once. Each worker writes
a log, and its last lines are part of the message when the worker is lost. This module does not
import torch: the environment of the process must be set before.
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
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray

from ppo_cli.cluster.addresses import free_port
from ppo_cli.engine.leftovers import create_folder
from ppo_cli.errors import (
    FULL_DISK_ERRNOS,
    ConfigError,
    MissingPart,
    PpoError,
    describe_device_fault,
    is_picklable,
)
from ppo_cli.machine.gpus import pin_gpu_order
from ppo_cli.machine.machine import Machine
from ppo_cli.machine.processor import count_cores
from ppo_cli.secrets.redact import redact

VISIBLE = "CUDA_VISIBLE_DEVICES"
# Where MKL's variable is set, torch prefers it to that of OpenMP.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FLUSH_S = 0.02  # results that finish within this time are sent together
LATE_SHARE = 0.9  # of the time for a call, after which it logs where it is
LATE, WENT_ON = "Timeout (", "The call that was late has ended."  # the first is faulthandler's


@dataclass(frozen=True)
class Failure:
    """An exception of a worker: its traceback, and the pickled error if a user caused it.

    `device` says what is wrong with its GPU, where that failed.
    """

    pickled: bytes | None
    traceback: str
    device: str = ""


@dataclass(frozen=True)
class Outcome:
    """The result of a call, or its failure."""

    value: Any = None
    failure: Failure | None = None


class Worker:
    """Hosts the object that a factory makes. All calls of the object happen in one thread.

    An object that streams gets a separate thread (`build_streaming`), because Ray's thread sends
    its items meanwhile. vLLM uses one CUDA stream per thread, so an engine that loads in one thread
    and samples in another would use two unordered streams. Other objects run in Ray's thread, the
    main one, because glibc keeps freed memory (`keep_freed_memory`) only there.

    Ray starts a call, or a stream, after the previous one has ended.
    """

    def __init__(self) -> None:
        self._object: Any = None  # what `build` has made
        self._thread: ThreadPoolExecutor | None = None
        self._late_s = 0.0

    def arrive(
        self, log: str, devices: tuple[int, ...], threads: int | None, timeout_s: float
    ) -> Outcome:
        """Open the log, make only these GPUs visible, and return the node as in `WorkerHandle`.

        Without `threads` a worker with GPUs takes their share of the node's cores. A call that may
        not end within `timeout_s` logs where it is.
        """

        def settle() -> dict[str, Any]:
            """Prepare the process (log, signals, GPUs, threads); return its node and process id."""
            # Before anything imports torch, which reads these variables once.
            write_into(Path(log))
            self._late_s = LATE_SHARE * timeout_s
            ignore_signals()
            pin_gpu_order(os.environ)
            os.environ[VISIBLE] = visible_gpus(devices, os.environ.get(VISIBLE))
            node_id = ray.get_runtime_context().get_node_id()
            if devices:  # Ray has set it to 1
                count = str(threads or share_cores(len(devices), node_id))
                os.environ |= dict.fromkeys(THREAD_VARIABLES, count)
            return {
                "node": ray.util.get_node_ip_address(), "node_id": node_id, "pid": os.getpid()
            }  # fmt: skip

        return _try(settle)

    def run(self, work: Callable[..., Any], *args: Any) -> Outcome:
        """Call a function that needs no object."""
        with self._log_when_late():
            return _try(lambda: work(*args))

    def build(self, factory: Callable[..., Any] | str, *args: Any) -> Outcome:
        """Make the object that calls go to; `factory` is a function or its `module:name`."""

        def work() -> None:
            """Make the object of this worker. Raises MissingPart if torch does not see its GPUs."""
            from ppo_cli.cluster.serialise import send_tensors_as_arrays  # brings torch
            from ppo_cli.engine.device import require_gpus

            # Fail here, with the host's name, rather than train on the CPU.
            try:
                visible = list(filter(None, os.environ.get(VISIBLE, "").split(",")))
                require_gpus(Machine.here(), len(visible))
            except MissingPart as error:
                raise MissingPart(f"{socket.gethostname()}: {error}") from None
            send_tensors_as_arrays()
            make = resolve_name(factory) if isinstance(factory, str) else factory
            self._object = make(*args)
            # vLLM's libraries have handlers of crashes that name no line of Python.
            faulthandler.disable()
            faulthandler.enable(file=2)

        return self._work(work)

    def build_streaming(self, factory: Callable[..., Any] | str, *args: Any) -> Outcome:
        """Make an object whose generator methods can be streamed; it runs in a separate thread."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ppo-object")
        return self.build(factory, *args)

    def call(self, name: str, *args: Any) -> Outcome:
        """Call a method of the object; results of other workers are passed as plain values."""
        if self._object is None and name == "close":  # it was never built
            return Outcome()

        values = [arg.value if isinstance(arg, Outcome) else arg for arg in args]
        return self._work(lambda: getattr(self._object, name)(*values))

    def stream(self, name: str, *args: Any) -> Iterator[Outcome]:
        """Call a generator method and yield its items in lists, as soon as there are any."""
        assert self._thread is not None, "only an object of build_streaming streams"
        results: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        closed = threading.Event()

        def produce() -> None:
            """Put all items in the queue, then `end` or `failure`; stop when `closed` is set."""
            try:
                with closing(getattr(self._object, name)(*args)) as source:
                    for item in source:
                        results.put(("item", item))
                        if closed.is_set():
                            return
                results.put(("end", None))
            except BaseException as error:
                results.put(("failure", _failure(error)))

        # The object's thread produces while Ray's thread sends.
        making = self._thread.submit(produce)
        try:
            batches = _batch_results(results)
            while True:
                with self._log_when_late():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            closed.set()
            making.result()

    def _work(self, work: Callable[[], Any]) -> Outcome:
        """Run a function in the object's thread."""
        with self._log_when_late():
            return _try(work) if self._thread is None else self._thread.submit(_try, work).result()

    @contextmanager
    def _log_when_late(self) -> Iterator[None]:
        """Log the tracebacks of all threads shortly before the driver gives a call up."""
        if not self._late_s:
            yield
            return
        started = time.monotonic()
        faulthandler.dump_traceback_later(self._late_s, file=2)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            if time.monotonic() - started > self._late_s:
                print(WENT_ON, flush=True)


def _batch_results(results: queue.SimpleQueue[tuple[str, Any]]) -> Iterator[Outcome]:
    """Collect results into lists; no result waits longer than FLUSH_S."""
    # After a pause an item is sent at once, otherwise together with those of the same FLUSH_S.
    items: list[Any] = []
    flushed = 0.0
    while True:
        wait_s = flushed + FLUSH_S - time.monotonic()
        try:
            kind, what = results.get(timeout=max(wait_s, 0.0) if items else None)
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


def import_code(module: str) -> None:
    """Import a module, which may take long, before ranks start to wait for each other."""
    import_module(module)


def rendezvous_url(node: str, one_node: bool) -> str:
    """Return where the ranks meet: on one node a file, else an address with a free port.

    A file where possible, because torch listens on all interfaces, without authentication.
    """
    if one_node:
        return f"file://{create_folder('ranks')}/meet"  # removed when this process is gone
    return f"tcp://{node}:{free_port(node)}"


def share_cores(devices: int, node_id: str) -> int:
    """Return a worker's share of the node's cores: the share of the node's GPUs that it has."""
    (resources,) = (node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    return max(1, count_cores() * devices // max(devices, int(resources.get("GPU", 0))))


def visible_gpus(devices: Sequence[int], inherited: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs, numbered among those that the node shows."""
    if not inherited:
        return ",".join(map(str, devices))
    names = [name.strip() for name in inherited.split(",")]
    if devices and max(devices) >= len(names):
        raise ConfigError(
            f"This node shows GPUs {inherited} ({VISIBLE}), so it has no GPU number "
            f"{max(devices)}; lower --n_gpus or show more."
        )
    return ",".join(names[device] for device in devices)


def _try(work: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(work())
    except (Exception, SystemExit) as error:  # an exit would look like a crash
        return Outcome(failure=_failure(error))


def _failure(error: BaseException) -> Failure:
    """Print an error's traceback, and return it as a Failure.

    User errors and errors of a full disk are pickled; of other errors only the traceback is sent.
    """
    text = redact("".join(traceback.format_exception(error)))
    print(text, flush=True)
    # A missing permission may concern a device or a socket instead of a file, so it stays a bug.
    full = isinstance(error, OSError) and error.errno in FULL_DISK_ERRNOS
    can_travel = (isinstance(error, PpoError) or full) and is_picklable(error)
    pickled = pickle.dumps(error) if can_travel else None
    return Failure(pickled, text, redact(describe_device_fault(error)))


# Lines of a log's end that a message shows, and bytes that are read for them and for a crash.
LINES, BYTES = 6, 64_000
# Bytes that are read for a late call: faulthandler writes up to 100 threads of 100 frames.
STACKS_BYTES = 2_000_000
CRASH = "Fatal Python error"
MARK = "--- process "
KILLED = "was killed (signal 9; out of memory?)"


def write_into(path: Path) -> None:
    """Redirect all output of this process into a file, that of C libraries and crashes too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # File descriptors for C libraries, then Python's streams.
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
    """Ignore Ctrl-C and SIGTERM: the driver ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def last_lines(path: Path, pid: int = 0) -> list[str]:
    """The last few lines of a log, or of what one process wrote; a crash from its first line on."""
    lines = _read_lines(path, pid)
    crash = max((i for i, line in enumerate(lines) if line.startswith(CRASH)), default=None)
    return lines[-LINES:] if crash is None else lines[crash : crash + LINES]


def find_late_frame(path: Path, pid: int) -> str:
    """Return the innermost frame of a late call that has not ended; "" if the log has none."""
    text = "\n".join(_read_lines(path, pid, STACKS_BYTES))
    threads = text.rpartition(f"\n{LATE}")[2] if LATE in text else ""
    if WENT_ON in threads:
        return ""
    # Calls are made in one thread, the items of a stream in another. The end of a deep stack,
    # where these functions are, is cut off.
    made = (f" in {_try.__name__}\n", " in produce\n")
    stacks = [thread.splitlines() for thread in threads.split("\nThread ")[1:]]
    ours = [stack for stack in stacks if any(f"{line}\n".endswith(made) for line in stack)]
    frames = max(ours or stacks, key=len, default=[""])[1:]
    return frames[0].strip().removeprefix("File ") if frames else ""


def _read_lines(path: Path, pid: int, size: int = BYTES) -> list[str]:
    """The end of a log, or of what one process wrote, without empty lines and secrets.

    Empty when the log cannot be read here.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    # Several processes append to one log: use the lines after the last mark of this process.
    lines = [line for line in redact(text).splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith(_mark(pid))]
    lines = lines[starts[-1] + 1 :] if pid and starts else lines
    return [line for line in lines if not line.startswith(MARK)]


def _mark(pid: int) -> str:
    return f"{MARK}{pid},"


def read_tail(path: Path, pid: int = 0) -> str:
    """Return the path of a log and its last lines, or those of one process, for a message."""
    lines = last_lines(path, pid)
    if not lines:
        return f"Its log: {path}."
    return "\n  ".join([f"The last lines of its log, {path}:", *lines])
