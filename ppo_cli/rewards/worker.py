"""The program of a reward's worker process: loads a function, then scores one call after another.

`pool.py` starts it. It answers its first request, a `Task`, with `Ready`, and then each `Request`
with a `Score`. All are pickled: the user's code runs here, and the rows may hold any object.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import io
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ppo_cli.processes.channel import Channel
from ppo_cli.processes.user_code import describe_error
from ppo_cli.records import Score
from ppo_cli.rewards.base import CannotScore, read_returned

MAX_OUTPUT_CHARS = 2000  # what is kept of a call's prints


@dataclass(frozen=True)
class Task:
    """The work of a worker; sent once to each worker.

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
    """The answer to a task: its function is loaded, or why not."""

    is_async: bool = False
    refusal: str = ""
    form: str = ""  # of a function that was written for another trainer (forms.py)
    required: tuple[str, ...] = ()  # its parameters without a default


@dataclass(frozen=True)
class Request:
    """A call that is sent to a worker; the fields of `call` are the function's arguments."""

    call: Any
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


def main() -> None:
    """Load the task, then answer calls until the pool closes the channel."""
    faulthandler.enable()
    sys.stdout = sys.stderr = _CapturedOutput()
    channel = Channel()
    requests = iter(channel)
    number, data = next(requests)
    task: Task = pickle.loads(data)
    # Load first, without limits: importing a library may take more than a call may.
    try:
        function = task.load()
    except Refused as problem:
        channel.send(number, pickle.dumps(Ready(refusal=str(problem))))
        return
    if task.memory_limit is not None:
        import resource

        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (task.memory_limit, resource.RLIM_INFINITY))
    is_async = is_coroutine_function(function)
    form, required = getattr(function, "form", ""), getattr(function, "required", ())
    channel.send(number, pickle.dumps(Ready(is_async, form=form, required=required)))
    if is_async:
        # All requests at once on one event loop; the pool limits their number.
        asyncio.run(channel.serve(partial(_await_call, function)))
        return
    for number, data in requests:
        # SIGPROF without a handler ends the process even inside a long C call. It counts
        # processor time, so that a busy machine does not make slow calls fail.
        signal.setitimer(signal.ITIMER_PROF, task.cpu_limit or 0)
        score = _run_call(function, pickle.loads(data).call)
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.send(number, pickle.dumps(score))


def _run_call(function: Callable[..., Any], call: Any) -> Score:
    """Run one call, and turn what it returns or raises into a score."""
    pieces: list[str] = []
    _CapturedOutput.current.set(pieces)
    started = time.perf_counter()
    try:
        score = read_returned(wait_for(function(**vars(call))))
    except BaseException as error:
        score = Score.failed(_error_message(error, function))
    return _add_call_info(score, pieces, started)


def is_coroutine_function(function: Callable[..., Any]) -> bool:
    """Return whether a function or the `__call__` of an object is async."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def wait_for(value: Any) -> Any:
    """Return a value; the result of a coroutine, which a plain function may return."""

    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value


async def _await_call(function: Callable[..., Any], data: bytes) -> bytes:
    """Await an async function within the request's time-out, and return the pickled score.

    An error or a time-out is a failed score.
    """
    request: Request = pickle.loads(data)
    pieces: list[str] = []
    _CapturedOutput.current.set(pieces)
    started = time.perf_counter()
    scope = asyncio.timeout(request.timeout)
    try:
        async with scope:
            score = read_returned(await function(**vars(request.call)))
    except BaseException as error:
        late = timeout_message(request.timeout) if scope.expired() else ""
        score = Score.failed(late or _error_message(error, function))
    return pickle.dumps(_add_call_info(score, pieces, started))


def timeout_message(seconds: float) -> str:
    """Return the failure message of a call that took too long."""
    return f"timeout: took longer than {seconds:g} s"


def _error_message(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the failure message of an exception, with the line in the function's file."""
    if isinstance(error, CannotScore):
        return str(error)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return f"raised {describe_error(error, code.co_filename if code else '')}"


def _add_call_info(score: Score, pieces: list[str], started: float) -> Score:
    facts: dict[str, Any] = {"latency_s": round(time.perf_counter() - started, 4)}
    if pieces:
        facts["output"] = "".join(pieces)[:MAX_OUTPUT_CHARS]
    return replace(score, info={**facts, **score.info})
