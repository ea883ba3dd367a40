"""A pool of worker processes whose calls end by a deadline, and what a worker runs.

A thread cannot be stopped, a process can: a call that hangs is killed with its worker, the
worker is replaced, and only that call fails. Workers start when there is work for them.
All that the pool does happens on one event loop; the user's code runs in the workers, each of
which loads a task and answers the calls of one socket.
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

MOST_OUTPUT = 2000
SECONDS_TO_LEAVE = 1.0


@dataclass(frozen=True)
class Task:
    """What a worker is to do; pickled once to each worker.

    `label` names it in messages, `load` returns the function to call or raises `Refused`;
    `cpu_limit` is in processor seconds of one call, `memory_limit` in bytes of the process.
    """

    label: str
    load: Callable[[], Callable[..., Any]]
    cpu_limit: float | None = None
    memory_limit: int | None = None


class Refused(Exception):
    """The task cannot be done; the message is for the user."""


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
        import resource

        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (task.memory_limit, resource.RLIM_INFINITY))
    call = getattr(function, "__call__", None)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    connection.send(Ready(is_async))
    if is_async:
        asyncio.run(_answer_orders(connection, function))
    else:
        _serve(connection, function, task.cpu_limit)


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


def _call(function: Callable[..., Any], call: Call) -> Score:
    pieces: list[str] = []
    _Output.current.set(pieces)
    started = time.perf_counter()
    try:
        value = function(**vars(call))
        returned = read_returned(asyncio.run(_wait(value)) if inspect.isawaitable(value) else value)
    except BaseException as error:
        returned = Score.failed(_failure(error, function))
    return _with_facts(returned, pieces, started)


async def _wait(value: Any) -> Any:
    return await value


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
        returned = Score.failed(failure)
    connection.send((order.number, _with_facts(returned, pieces, started)))


def timeout_words(seconds: float) -> str:
    """Return the failure of a call that took too long."""
    return f"timeout: took longer than {seconds:g} s"


def _failure(error: BaseException, function: Callable[..., Any]) -> str:
    """Say what was raised, and in which line of the function's own file."""
    if isinstance(error, CannotScore):
        return str(error)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f"raised {describe_error(error)}{place_in(error, code.co_filename if code else '')}"


def place_in(error: BaseException, file: str) -> str:
    """Return ` (file.py, line 7)`: the innermost line of that file that led to the error."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({os.path.basename(file)}, line {line})" if line else ""


def _with_facts(returned: Score, pieces: list[str], started: float) -> Score:
    facts: dict[str, Any] = {"latency_s": round(time.perf_counter() - started, 4)}
    if pieces:
        facts["output"] = "".join(pieces)[:MOST_OUTPUT]
    return replace(returned, info={**facts, **returned.info})


CALLS_AT_ONCE = 64
# A coroutine is stopped by its own event loop; only a blocked loop is left to the pool.
LOOP_GRACE = 2.0
MOST_ATTEMPTS = 2

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# The path entry goes again, so that it shadows nothing of the user's own environment.
START = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ppo_cli; sys.path.remove(sys.argv[2]); "
    "from ppo_cli.rewards.pool import main; main(int(sys.argv[1]))"
)
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STALLED_SECONDS = 5
SECONDS_TO_START = 120.0
SECONDS_TO_EXIT = 1.5
MOST_LOG = 1 << 16


class WorkerProcess:
    """A fresh interpreter with a socket to it; nothing of this process is copied into it."""

    def __init__(self, task: Task) -> None:
        self._cpu_limit = task.cpu_limit
        our_end, worker_end = socket.socketpair()
        # A worker that neither reads nor writes must not hold the pool up for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            our_end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED_SECONDS, 0))
        self._log = cast("BinaryIO", tempfile.TemporaryFile("ab+"))  # noqa: SIM115
        fixed = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}
        with worker_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(worker_end.fileno()), PACKAGE_PARENT],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Sets of strings in one order in every process: the same response, the same score.
                env={**os.environ, **fixed, "PYTHONHASHSEED": "0"},
                # A Ctrl-C at the terminal is for the trainer, which finishes its step first.
                start_new_session=True,
            )
        self.connection = Connection(our_end.detach())
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError when the worker is gone."""
        message = self.connection.recv()
        if os.fstat(self._log.fileno()).st_size > MOST_LOG:
            os.ftruncate(self._log.fileno(), 0)
        return message

    def say_end(self) -> str:
        """Wait for a process that has hung up; return how it ended, with its last line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_EXIT)
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
        """Hang up, and end the process and all that it has started; waits until it is gone."""
        self.connection.close()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class _Lost(Exception):
    """The worker has gone with a call, for this reason; `blamed` says that the call did it."""

    def __init__(self, reason: str, *, died: bool = False, blamed: bool = False) -> None:
        super().__init__(reason)
        self.died = died
        self.blamed = blamed


@dataclass(frozen=True)
class _UnderWay:
    answer: asyncio.Future[Score]
    deadline: float


class _Worker:
    """A place for one process, which is started when there is a call, and again when it ended."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._numbers = itertools.count()
        self._calls: dict[int, _UnderWay] = {}
        self.process: WorkerProcess | None = None

    async def ready(self) -> Ready:
        """Wait until the process has loaded its task; a refusal says why it cannot."""
        loop = asyncio.get_running_loop()
        if self.process is None:
            self.process = WorkerProcess(self._task)
            self._ready: asyncio.Future[Ready] = loop.create_future()
            loop.add_reader(self.process.connection, self._listen, self.process)
        ready = self._ready
        try:
            async with asyncio.timeout(SECONDS_TO_START):
                return await asyncio.shield(ready)
        except TimeoutError:
            if not ready.done():
                slow = f"took longer than {SECONDS_TO_START:g} s to start"
                ready.set_result(Ready(refusal=f"The worker for {self._task.label} {slow}."))
                self._end(_Lost("it did not start"))
            return ready.result()

    async def ask(self, call: Call, timeout: float) -> Score:
        """Have one call done; raises _Lost when the process goes meanwhile."""
        ready = await self.ready()
        if ready.refusal:
            return Score.failed(ready.refusal)
        if self.process is None:
            raise _Lost("another call ended the worker")
        number, loop = next(self._numbers), asyncio.get_running_loop()
        patience = timeout + (LOOP_GRACE if ready.is_async else 0)
        mine = self._calls[number] = _UnderWay(loop.create_future(), loop.time() + patience)
        try:
            self.process.connection.send(Order(number, call, timeout))
        except OSError:
            self._bury()
        except Exception as error:
            del self._calls[number]
            message = f"the row cannot be handed to a worker process: {describe_error(error)}"
            return Score.failed(message)
        try:
            async with asyncio.timeout_at(mine.deadline):
                return await asyncio.shield(mine.answer)
        except TimeoutError:
            blocked = "; it blocked the event loop" if ready.is_async else ""
            self._end(_Lost(timeout_words(timeout) + blocked))
            return Score.failed(timeout_words(timeout) + blocked)
        except asyncio.CancelledError:  # it computes on
            self._end(_Lost("another call was given up"))
            raise
        finally:
            self._calls.pop(number, None)

    def _listen(self, process: WorkerProcess) -> None:
        try:
            message = process.receive()
        except (EOFError, OSError):
            self._bury()
            return
        if isinstance(message, Ready):
            self._ready.set_result(message)
            if message.refusal:
                self._end(_Lost(message.refusal))
        else:
            number, returned = message
            self._calls.pop(number).answer.set_result(returned)

    def _bury(self) -> None:
        """The process has gone by itself: its only call is to blame; several get a second try."""
        if self.process is None:
            return
        failure = self.process.say_end()
        if not self._ready.done():
            refusal = f"The worker for {self._task.label} did not start: {failure}."
            self._ready.set_result(Ready(refusal=refusal))
        self._end(_Lost(failure, died=True, blamed=len(self._calls) == 1))

    def _end(self, reason: _Lost) -> None:
        """Kill the process; calls that are late by now fail, others may try again."""
        process, self.process = self.process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.connection)
        process.kill()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            late = call.deadline <= loop.time()
            error = _Lost(str(reason), blamed=True) if late else reason
            call.answer.set_exception(error)
            call.answer.exception()  # nobody may be left to ask for it


class WorkerPool:
    """Runs one task on up to `size` processes; every future resolves to a Score."""

    def __init__(self, task: Task, *, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._closed = False
        self._workers = [_Worker(task) for _ in range(size)]
        # Last in, first out: a worker that runs is asked before another is started.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._offer(1)
        self._loop = LoopThread("rewards")

    def start(self) -> None:
        """Start the first worker and wait until it has loaded its task; RewardError if not.

        Coroutines share a worker from then on.
        """
        ready = self._loop.call(self._workers[0].ready())
        if ready.refusal:
            raise RewardError(ready.refusal)
        if ready.is_async:
            self._offer(CALLS_AT_ONCE - 1)

    def submit(self, call: Call, finish: Callable[[Score], Score]) -> Future[Score]:
        """Queue one call; `finish` turns what came back into the score."""
        return self._loop.submit(self._score(call, finish))

    def close(self) -> None:
        """Stop the workers; calls that are not answered fail."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            process.connection.close()
        until = time.monotonic() + SECONDS_TO_EXIT
        for process in processes:
            process.kill(patience=max(0.0, until - time.monotonic()))

    def _offer(self, calls: int) -> None:
        for worker in reversed(self._workers):
            for _ in range(calls):
                self._free.put_nowait(worker)

    async def _score(self, call: Call, finish: Callable[[Score], Score]) -> Score:
        try:
            returned = await self._ask(call)
        except asyncio.CancelledError:
            returned = Score.failed("the run ended before this response was scored")
        return finish(returned)

    async def _ask(self, call: Call) -> Score:
        deaths = 0
        while True:
            worker = await self._free.get()
            try:
                return await worker.ask(call, self._timeout)
            except _Lost as lost:
                deaths += lost.died
                if lost.blamed or deaths == MOST_ATTEMPTS:
                    return Score.failed(str(lost))
            finally:
                self._free.put_nowait(worker)
