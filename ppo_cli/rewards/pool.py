"""A pool of worker processes with a time limit for each call, and the worker's program.

A thread cannot be stopped, but a process can: a call that hangs is killed together with its
worker and the worker's children, and only that call fails. Workers are started on demand. The
pool runs on one event loop; the user's code runs in the workers, each of which loads a task and
answers calls from one socket. Why not a library: docs/design/006-code-rewards.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import io
import itertools
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
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, cast

from ppo_cli.errors import RewardError
from ppo_cli.records import Score
from ppo_cli.rewards.base import Call, CannotScore, describe_error, read_returned
from ppo_cli.rewards.remote.event_loop import LoopThread

MAX_OUTPUT_CHARS = 2000  # what is kept of a call's prints
WORKER_EXIT_TIMEOUT_S = 1.0  # for a worker's own cleanup when the pool has closed


@dataclass(frozen=True)
class Task:
    """The work of a worker; pickled and sent once to each worker.

    `label` names it in messages. `load` returns the function to call, or raises `Refused`.
    `cpu_limit` is in seconds of processor time per call, `memory_limit` in bytes per process.
    """

    label: str
    load: Callable[[], Callable[..., Any]]
    cpu_limit: float | None = None
    memory_limit: int | None = None


class Refused(Exception):
    """The task cannot be loaded; the message is for the user."""


@dataclass(frozen=True)
class Ready:
    """A worker's first message: its function is loaded, or why not."""

    is_async: bool = False
    refusal: str = ""


@dataclass(frozen=True)
class Request:
    """A call that is sent to a worker."""

    number: int
    call: Call
    timeout: float


class _CapturedOutput(io.TextIOBase):
    """Replaces stdout and stderr; what a call prints is collected for that call."""

    current: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("o", default=None)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        pieces = self.current.get()
        if pieces is not None and sum(map(len, pieces)) < MAX_OUTPUT_CHARS:
            pieces.append(text[:MAX_OUTPUT_CHARS])
        return len(text)


def main(descriptor: int) -> None:
    """Run a worker: load the task, then answer calls until the pool closes the socket."""
    faulthandler.enable()
    sys.stdout = sys.stderr = _CapturedOutput()
    connection = Connection(descriptor)
    task: Task = connection.recv()
    # Load first, without limits: importing a library may take more than a call may.
    try:
        function = task.load()
    except Refused as problem:
        connection.send(Ready(refusal=str(problem)))
        return
    if task.memory_limit is not None:
        import resource

        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (task.memory_limit, resource.RLIM_INFINITY))
    call = getattr(function, "__call__", None)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    connection.send(Ready(is_async))
    if is_async:
        asyncio.run(_serve_coroutines(connection, function))
    else:
        _serve_calls(connection, function, task.cpu_limit)


def _read_requests(connection: Connection, take: Callable[[Request | None], Any]) -> None:
    """Pass requests on; when the socket is closed, wait briefly, then kill the process group."""
    try:
        while True:
            take(connection.recv())
    except (EOFError, OSError):
        pass
    with contextlib.suppress(RuntimeError):
        take(None)
    time.sleep(WORKER_EXIT_TIMEOUT_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _start_reader(connection: Connection, take: Callable[[Request | None], Any]) -> None:
    threading.Thread(target=_read_requests, args=(connection, take), daemon=True).start()


def _serve_calls(connection: Connection, function: Callable[..., Any], limit: float | None) -> None:
    """Call the function for each request and send what it returns, until the requests end.

    A call that needs more than `limit` seconds of processor time ends the process.
    """
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    _start_reader(connection, requests.put)
    while (request := requests.get()) is not None:
        # SIGPROF without a handler ends the process even inside a long C call. It counts
        # processor time, so that a busy machine does not make slow calls fail.
        signal.setitimer(signal.ITIMER_PROF, limit or 0)
        returned = _run_call(function, request.call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send((request.number, returned))


def _run_call(function: Callable[..., Any], call: Call) -> Score:
    """Run one call, and turn what it returns or raises into a score."""
    pieces: list[str] = []
    _CapturedOutput.current.set(pieces)
    started = time.perf_counter()
    try:
        value = function(**vars(call))
        if inspect.isawaitable(value):  # a plain function that returns a coroutine
            value = asyncio.run(_await(value))
        returned = read_returned(value)
    except BaseException as error:
        returned = Score.failed(_error_message(error, function))
    return _add_call_info(returned, pieces, started)


async def _await(value: Any) -> Any:
    return await value


async def _serve_coroutines(connection: Connection, function: Callable[..., Any]) -> None:
    """Run all requests at once on the worker's event loop; the pool limits their number."""
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[Request | None] = asyncio.Queue()
    _start_reader(
        connection, lambda request: loop.call_soon_threadsafe(requests.put_nowait, request)
    )
    under_way: set[asyncio.Task[None]] = set()
    while (request := await requests.get()) is not None:
        answer = asyncio.create_task(_run_coroutine(connection, function, request))
        under_way.add(answer)
        answer.add_done_callback(under_way.discard)


async def _run_coroutine(
    connection: Connection, function: Callable[..., Any], request: Request
) -> None:
    """Await an async function within the request's time-out, and send what it returns.

    An error or a time-out is sent as a failed score.
    """
    pieces: list[str] = []
    _CapturedOutput.current.set(pieces)
    started = time.perf_counter()
    scope = asyncio.timeout(request.timeout)
    try:
        async with scope:
            returned = read_returned(await function(**vars(request.call)))
    except BaseException as error:
        late = timeout_message(request.timeout) if scope.expired() else ""
        returned = Score.failed(late or _error_message(error, function))
    connection.send((request.number, _add_call_info(returned, pieces, started)))


def timeout_message(seconds: float) -> str:
    """Return the failure message of a call that took too long."""
    return f"timeout: took longer than {seconds:g} s"


def _error_message(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the failure message of an exception, with the line in the function's file."""
    if isinstance(error, CannotScore):
        return str(error)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    line = error_line(error, code.co_filename) if code else None
    location = f" ({os.path.basename(code.co_filename)}, line {line})" if code and line else ""
    return f"raised {describe_error(error)}{location}"


def error_line(error: BaseException, file: str) -> int | None:
    """Return the innermost line of `file` in the traceback of an error, None without one."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _add_call_info(returned: Score, pieces: list[str], started: float) -> Score:
    facts: dict[str, Any] = {"latency_s": round(time.perf_counter() - started, 4)}
    if pieces:
        facts["output"] = "".join(pieces)[:MAX_OUTPUT_CHARS]
    return replace(returned, info={**facts, **returned.info})


CONCURRENT_COROUTINES = 64  # per worker
# The worker's event loop ends a coroutine at its time limit. The pool waits this much longer, and
# then kills a worker whose loop is blocked.
LOOP_GRACE_S = 2.0
MAX_ATTEMPTS = 2  # of a call whose worker died while it ran several calls

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# The path entry is removed again, so that it does not shadow modules of the user.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ppo_cli; sys.path.remove(sys.argv[2]); "
    "from ppo_cli.rewards.pool import main; main(int(sys.argv[1]))"
)
# As many workers as processors: threads of numerical libraries would only compete.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
SOCKET_TIMEOUT_S = 5
START_TIMEOUT_S = 120.0  # a user's file may import torch
EXIT_TIMEOUT_S = 1.5
MAX_LOG_BYTES = 1 << 16


class WorkerProcess:
    """A worker in a fresh interpreter (not a fork), and our end of the socket to it."""

    def __init__(self, task: Task) -> None:
        self._cpu_limit = task.cpu_limit
        our_end, worker_end = socket.socketpair()
        # A worker that neither reads nor writes must not block the pool for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            our_end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", SOCKET_TIMEOUT_S, 0))
        self._log = cast("BinaryIO", tempfile.TemporaryFile("ab+"))  # noqa: SIM115
        fixed = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(worker_end.fileno()), PACKAGE_PARENT],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # A fixed request of sets in every process: the same response gets the same score.
                env={**os.environ, **fixed, "PYTHONHASHSEED": "0"},
                # A separate session: Ctrl-C at the terminal only reaches the trainer, and the
                # worker and its children can be killed as one group.
                start_new_session=True,
            )
        self.connection = Connection(our_end.detach())
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the worker has exited."""
        message = self.connection.recv()
        if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)
        return message

    def describe_exit(self) -> str:
        """Wait for a worker that has closed its socket; returns how it ended, and its last line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        code = self._process.poll()
        if code == -signal.SIGPROF and self._cpu_limit:
            return f"timeout: took more than {self._cpu_limit:g} s of computing"
        self._log.seek(0)
        lines = self._log.read()[-2000:].decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        if code is not None and code < 0:
            return f"the worker process ended by signal {signal.Signals(-code).name}{last}"
        return f"the worker process ended with exit code {code}{last}"

    def kill(self, patience: float = 0.0) -> None:
        """Close the socket, kill the process and its children, and wait for its end."""
        self.connection.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class _WorkerLost(Exception):
    """The worker ended during a call. `died`: by itself; `at_fault`: because of this call."""

    def __init__(self, reason: str, *, died: bool = False, at_fault: bool = False) -> None:
        super().__init__(reason)
        self.died = died
        self.at_fault = at_fault


@dataclass(frozen=True)
class _PendingCall:
    answer: asyncio.Future[Score]
    deadline: float


class _WorkerSlot:
    """A slot for one process, which starts with the first call, and again after its end."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._numbers = itertools.count()
        self._calls: dict[int, _PendingCall] = {}
        self.process: WorkerProcess | None = None

    async def start(self) -> Ready:
        """Start the process if necessary, and wait until it has loaded its task."""
        loop = asyncio.get_running_loop()
        if self.process is None:
            self.process = WorkerProcess(self._task)
            self._ready: asyncio.Future[Ready] = loop.create_future()
            loop.add_reader(self.process.connection, self._handle_message, self.process)
        ready = self._ready
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(ready)
        except TimeoutError:
            if not ready.done():
                slow = f"took longer than {START_TIMEOUT_S:g} s to start"
                ready.set_result(Ready(refusal=f"The worker for {self._task.label} {slow}."))
                self._kill_worker(_WorkerLost("it did not start"))
            return ready.result()

    async def run(self, call: Call, timeout: float) -> Score:
        """Run one call; raises _WorkerLost when the process ends meanwhile."""
        ready = await self.start()
        if ready.refusal:
            return Score.failed(ready.refusal)
        if self.process is None:
            raise _WorkerLost("another call ended the worker")
        # Register the call before sending it: the answer may be quick.
        number, loop = next(self._numbers), asyncio.get_running_loop()
        patience = timeout + (LOOP_GRACE_S if ready.is_async else 0)
        mine = self._calls[number] = _PendingCall(loop.create_future(), loop.time() + patience)
        try:
            self.process.connection.send(Request(number, call, timeout))
        except OSError:
            self._handle_exit()
        except Exception as error:
            del self._calls[number]
            message = f"the row cannot be sent to a worker process: {describe_error(error)}"
            return Score.failed(message)
        try:
            async with asyncio.timeout_at(mine.deadline):
                return await asyncio.shield(mine.answer)
        except TimeoutError:
            blocked = "; it blocked the event loop" if ready.is_async else ""
            self._kill_worker(_WorkerLost(timeout_message(timeout) + blocked))
            return Score.failed(timeout_message(timeout) + blocked)
        except asyncio.CancelledError:  # the worker would go on computing
            self._kill_worker(_WorkerLost("another call was given up"))
            raise
        finally:
            self._calls.pop(number, None)

    def _handle_message(self, process: WorkerProcess) -> None:
        """Handle one message of the worker: its start, or the result of a call."""
        try:
            message = process.receive()
        except (EOFError, OSError):
            self._handle_exit()
            return
        if isinstance(message, Ready):
            self._ready.set_result(message)
            if message.refusal:
                self._kill_worker(_WorkerLost(message.refusal))
        else:
            number, returned = message
            self._calls.pop(number).answer.set_result(returned)

    def _handle_exit(self) -> None:
        """Handle a worker that ended by itself: a single call is at fault, several are retried."""
        if self.process is None:
            return
        failure = self.process.describe_exit()
        if not self._ready.done():
            refusal = f"The worker for {self._task.label} did not start: {failure}."
            self._ready.set_result(Ready(refusal=refusal))
        self._kill_worker(_WorkerLost(failure, died=True, at_fault=len(self._calls) == 1))

    def _kill_worker(self, reason: _WorkerLost) -> None:
        """Kill the process; calls past their deadline fail, others may be retried."""
        process, self.process = self.process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.connection)
        process.kill()
        # Tell every call of this process why it has ended.
        calls, self._calls = self._calls, {}
        for call in calls.values():
            late = call.deadline <= loop.time()
            error = _WorkerLost(str(reason), at_fault=True) if late else reason
            call.answer.set_exception(error)
            call.answer.exception()  # marks it as retrieved: its caller may be cancelled


class WorkerPool:
    """Runs the calls of one task on up to `size` processes; every future resolves to a Score."""

    def __init__(self, task: Task, *, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._closed = False
        self._workers = [_WorkerSlot(task) for _ in range(size)]
        # Last in, first out: a running worker is used before another one is started.
        self._free: asyncio.LifoQueue[_WorkerSlot] = asyncio.LifoQueue()
        self._add_capacity(1)
        self._loop = LoopThread("rewards")

    def start(self) -> None:
        """Start the first worker; RewardError when it cannot load its task.

        If the function is a coroutine function, each worker then runs several calls at once.
        """
        ready = self._loop.call(self._workers[0].start())
        if ready.refusal:
            raise RewardError(ready.refusal)
        if ready.is_async:
            self._add_capacity(CONCURRENT_COROUTINES - 1)

    def submit(self, call: Call, finish: Callable[[Score], Score]) -> Future[Score]:
        """Queue one call; `finish` is applied to its score."""
        return self._loop.submit(self._score(call, finish))

    def close(self) -> None:
        """Stop the workers; unanswered calls fail."""
        if self._closed:
            return
        self._closed = True
        # Calls in the queue fail now; then the workers may clean up for a moment.
        self._loop.close()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.connection.close()
        until = time.monotonic() + EXIT_TIMEOUT_S
        for process in processes:
            process.kill(patience=max(0.0, until - time.monotonic()))

    def _add_capacity(self, calls: int) -> None:
        for worker in reversed(self._workers):
            for _ in range(calls):
                self._free.put_nowait(worker)

    async def _score(self, call: Call, finish: Callable[[Score], Score]) -> Score:
        try:
            returned = await self._run_with_retry(call)
        except asyncio.CancelledError:
            returned = Score.failed("the run ended before this response was scored")
        return finish(returned)

    async def _run_with_retry(self, call: Call) -> Score:
        """Return the score of a call, tried in another worker if its worker was lost.

        It fails when the call is at fault, or when MAX_ATTEMPTS workers have died.
        """
        deaths = 0
        while True:
            worker = await self._free.get()
            try:
                return await worker.run(call, self._timeout)
            except _WorkerLost as lost:
                deaths += lost.died
                if lost.at_fault or deaths == MAX_ATTEMPTS:
                    return Score.failed(str(lost))
            finally:
                self._free.put_nowait(worker)
