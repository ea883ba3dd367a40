"""A pool of worker processes whose calls end by a deadline.

A thread cannot be stopped, a process can: a call that hangs is killed with its worker, the
worker is replaced, and only that call fails. Workers start when there is work for them.
All that the pool does happens on one event loop; the user's code runs in the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, cast

from ppo_cli.errors import RewardError
from ppo_cli.records import Score
from ppo_cli.rewards.remote import LoopThread
from ppo_cli.rewards.returned import Call, describe_error
from ppo_cli.rewards.worker import Order, Ready, Task, timeout_words

CALLS_AT_ONCE = 64
# A coroutine is stopped by its own event loop; only a blocked loop is left to the pool.
LOOP_GRACE = 2.0
MOST_ATTEMPTS = 2

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
        self._cpu_limit = task.cpu_limit
        ours, theirs = socket.socketpair()
        # A worker that neither reads nor writes must not hold the pool up for ever.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALLED_SECONDS, 0))
        self._log = cast("BinaryIO", tempfile.TemporaryFile("ab+"))  # noqa: SIM115
        fixed = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), PACKAGE_PARENT],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Sets of strings in one order in every process: the same response, the same score.
                env={**os.environ, **fixed, "PYTHONHASHSEED": "0"},
                # A Ctrl-C at the terminal is for the trainer, which finishes its step first.
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
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
            said = f"the row cannot be handed to a worker process: {describe_error(error)}"
            return Score.failed(said)
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
        self._loop.call(self._start())

    def submit(self, call: Call, finish: Callable[[Score], Score]) -> Future[Score]:
        """Queue one call; `finish` turns what came back into the score."""
        if self._closed:
            raise RuntimeError("this reward is closed")
        return self._loop.submit(self._score(call, finish))

    def close(self) -> None:
        """Stop the workers; calls that are not answered fail."""
        if self._closed:
            return
        self._closed = True
        self._loop.close()
        left = [worker.process for worker in self._workers if worker.process is not None]
        for process in left:
            process.connection.close()
        until = time.monotonic() + SECONDS_TO_EXIT
        for process in left:
            process.kill(patience=max(0.0, until - time.monotonic()))

    async def _start(self) -> None:
        ready = await self._workers[0].ready()
        if ready.refusal:
            raise RewardError(ready.refusal)
        if ready.is_async:
            self._offer(CALLS_AT_ONCE - 1)

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
