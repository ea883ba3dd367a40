"""What a worker of a pool runs: it loads a task, and answers the calls of one socket."""

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
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from ppo_cli.records import Score
from ppo_cli.rewards.returned import Call, CannotScore, describe_error, read_returned

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
    (_serve_async if is_async else _serve)(connection, function, task.cpu_limit)


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
        returned = Score.failed(failure)
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


def _with_facts(returned: Score, pieces: list[str], started: float) -> Score:
    facts: dict[str, Any] = {"latency_s": round(time.perf_counter() - started, 4)}
    if pieces:
        facts["output"] = "".join(pieces)[:MOST_OUTPUT]
    return replace(returned, info={**facts, **returned.info})
