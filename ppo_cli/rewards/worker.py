"""One worker of a pool: the process that runs user code, and the parent's handle on it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import io
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from ppo_cli.rewards.returned import CannotScore, Returned, describe_error, read_returned

MOST_OUTPUT = 2000
SECONDS_TO_LEAVE = 1.0


class Task(Protocol):
    """What a worker is to do; pickled once to each worker."""

    @property
    def label(self) -> str:
        """What the task is, for messages."""
        ...

    @property
    def cpu_limit(self) -> float | None:
        """Processor seconds that one call may take."""
        ...

    @property
    def memory_limit(self) -> int | None:
        """Bytes that the process may hold."""
        ...

    def load(self) -> Callable[..., Any]:
        """Return the function to call; raises `Refused` when there is none."""
        ...


class Refused(Exception):
    """The task cannot be done; the message is for the user."""


@dataclass(frozen=True)
class Call:
    """One response to score."""

    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class Ready:
    """The first word of a worker: its function is loaded, or why not."""

    is_async: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Order:
    """A call on its way to a worker."""

    number: int
    call: Call
    timeout: float


class _Output(io.TextIOBase):
    """Stands in for stdout and stderr; what a call prints is kept with that call."""

    current: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("o", default=None)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        pieces = self.current.get()
        if pieces is not None and sum(map(len, pieces)) < MOST_OUTPUT:
            pieces.append(text[:MOST_OUTPUT])
        return len(text)


def main(descriptor: int) -> None:
    """Serve one pool until it hangs up."""
    faulthandler.enable()
    sys.stdout = sys.stderr = _Output()
    connection = Connection(descriptor)
    task: Task = connection.recv()
    try:
        function = task.load()
    except Refused as problem:
        connection.send(Ready(refusal=str(problem)))
        return
    if task.memory_limit is not None:
        _limit_memory(task.memory_limit)
    is_async = _is_async(function)
    connection.send(Ready(is_async))
    (_serve_async if is_async else _serve)(connection, function, task.cpu_limit)


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _limit_memory(most: int) -> None:
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _read_orders(connection: Connection, take: Callable[[Order | None], Any]) -> None:
    """Hand orders on; at the end of the line give the main thread a moment, then end it all."""
    try:
        while True:
            take(connection.recv())
    except (EOFError, OSError):
        pass
    with contextlib.suppress(RuntimeError):
        take(None)
    time.sleep(SECONDS_TO_LEAVE)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _listen(connection: Connection, take: Callable[[Order | None], Any]) -> None:
    threading.Thread(target=_read_orders, args=(connection, take), daemon=True).start()


def _serve(connection: Connection, function: Callable[..., Any], limit: float | None) -> None:
    orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
    _listen(connection, orders.put)
    while (order := orders.get()) is not None:
        # The default action of SIGPROF ends the process even inside a long C call, and counts
        # processor time: a busy machine does not turn slow answers into failed ones.
        signal.setitimer(signal.ITIMER_PROF, limit or 0)
        returned = _call(function, order.call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send((order.number, returned))


def _call(function: Callable[..., Any], call: Call) -> Returned:
    pieces: list[str] = []
    _Output.current.set(pieces)
    started = time.perf_counter()
    try:
        value = function(**vars(call))
        returned = read_returned(asyncio.run(_wait(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:
        returned = Returned(None, _failure(error, function))
    return _with_facts(returned, pieces, started)


async def _wait(value: Any) -> Any:
    return await value


def _serve_async(connection: Connection, function: Callable[..., Any], _: float | None) -> None:
    asyncio.run(_answer_orders(connection, function))


async def _answer_orders(connection: Connection, function: Callable[..., Any]) -> None:
    loop = asyncio.get_running_loop()
    orders: asyncio.Queue[Order | None] = asyncio.Queue()
    _listen(connection, lambda order: loop.call_soon_threadsafe(orders.put_nowait, order))
    under_way: set[asyncio.Task[None]] = set()
    while (order := await orders.get()) is not None:
        answer = asyncio.create_task(_answer(connection, function, order))
        under_way.add(answer)
        answer.add_done_callback(under_way.discard)


async def _answer(connection: Connection, function: Callable[..., Any], order: Order) -> None:
    pieces: list[str] = []
    _Output.current.set(pieces)
    started = time.perf_counter()
    scope = asyncio.timeout(order.timeout)
    try:
        async with scope:
            returned = read_returned(await function(**vars(order.call)))
    except BaseException as error:
        failure = timeout_words(order.timeout) if scope.expired() else _failure(error, function)
        returned = Returned(None, failure)
    connection.send((order.number, _with_facts(returned, pieces, started)))


def timeout_words(seconds: float) -> str:
    """Return the failure of a call that took too long."""
    return f"timeout: took longer than {seconds:g} s"


def _failure(error: BaseException, function: Callable[..., Any]) -> str:
    """Say what was raised, and in which line of the function's own file."""
    if isinstance(error, CannotScore):
        return str(error)
    return f"raised {describe_error(error)}{place_in(error, _file_of(function))}"


def _file_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return code.co_filename if code else ""


def place_in(error: BaseException, file: str) -> str:
    """Return ` (file.py, line 7)`: the innermost line of that file that led to the error."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({os.path.basename(file)}, line {line})" if line else ""


def _with_facts(returned: Returned, pieces: list[str], started: float) -> Returned:
    facts: dict[str, Any] = {"latency_s": round(time.perf_counter() - started, 4)}
    if pieces:
        facts["output"] = "".join(pieces)[:MOST_OUTPUT]
    return replace(returned, info={**facts, **returned.info})


PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# The path entry goes again, so that it shadows nothing of the user's own environment.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ppo_cli; sys.path.remove(sys.argv[2]); "
    "from ppo_cli.rewards.worker import main; main(int(sys.argv[1]))"
)
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STALLED_SECONDS = 5
SECONDS_TO_START = 120.0
SECONDS_TO_EXIT = 1.5
MOST_LOG = 1 << 16


class WorkerProcess:
    """A fresh interpreter with a socket to it; nothing of this process is copied into it."""

    def __init__(self, task: Task) -> None:
        ours, theirs = socket.socketpair()
        # A worker that neither reads nor writes must not hold the pool up for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED_SECONDS, 0))
        self._log = cast("BinaryIO", tempfile.TemporaryFile("ab+"))  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), PACKAGE_PARENT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                # A Ctrl-C at the terminal is for the trainer, which finishes its step first.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.ready = False
        self.start_deadline = time.monotonic() + SECONDS_TO_START
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def send(self, number: int, call: Call, timeout: float) -> None:
        """Hand over one call; raises OSError when the worker is gone or stuck."""
        self.connection.send(Order(number, call, timeout))

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the worker is gone."""
        message = self.connection.recv()
        if os.fstat(self._log.fileno()).st_size > MOST_LOG:
            os.ftruncate(self._log.fileno(), 0)
        return message

    def say_end(self) -> tuple[str, bool]:
        """Wait for a process that has hung up; return how it ended and whether by its limit."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_EXIT)
        code = self.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"the worker process ended by signal {name}{self._last_words()}", (
                -code == signal.SIGPROF
            )
        return f"the worker process ended with exit code {code}{self._last_words()}", False

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def hang_up(self) -> None:
        """Tell the worker to leave by itself."""
        self.connection.close()

    def kill(self, patience: float = 0.0) -> None:
        """End the process and all that it has started; waits until it is gone."""
        self.connection.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


def _environment() -> dict[str, str]:
    fixed = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}
    # Sets of strings in one order in every process: the same response, the same score.
    return {**os.environ, **fixed, "PYTHONHASHSEED": "0"}
