"""A pool of worker processes with a time limit for each call.

A thread cannot be stopped, but a process can: a call that hangs is killed together with its
worker and the worker's children, and only that call fails. Workers are started on demand. The
pool runs on one event loop; the user's code runs in the workers (`worker.py`). Why not a library:
docs/design/006-code-rewards.md.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ppo_cli.errors import RewardError
from ppo_cli.processes.child import Child, ChildEnded
from ppo_cli.processes.event_loop import LoopThread
from ppo_cli.processes.user_code import describe_error
from ppo_cli.records import Score
from ppo_cli.rewards.worker import Ready, Request, Task, timeout_message

CONCURRENT_COROUTINES = 64  # per worker
# A worker's event loop ends a coroutine at its time limit. The pool waits this much longer, and
# then kills a worker whose loop is blocked.
LOOP_GRACE_S = 2.0
MAX_ATTEMPTS = 2  # of a call whose worker died while it ran several calls
START_TIMEOUT_S = 120.0  # a user's file may import torch
EXIT_TIMEOUT_S = 1.5  # for a worker's own cleanup when the pool has closed
RUN_ENDED = "the run ended before this response was scored"

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
# The path entry is removed again, so that it does not shadow modules of the user.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); import ppo_cli; sys.path.remove(sys.argv[1]); "
    "from ppo_cli.rewards.worker import main; main()"
)
COMMAND = (sys.executable, "-P", "-c", START, PACKAGE_PARENT)
# As many workers as processors: threads of numerical libraries would only compete.
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ENVIRON = dict.fromkeys(ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"}


class _Worker:
    """A worker process, which starts with the first call, and again after its end."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._start: asyncio.Task[Ready] | None = None
        self.child: Child | None = None

    async def start(self) -> Ready:
        """Start the process if necessary, and wait until it has loaded its task."""
        ended = self.child is not None and self.child.ended
        if self._start is None or (self._start.done() and ended):
            self._start = asyncio.create_task(self._load())
        return await asyncio.shield(self._start)

    async def _load(self) -> Ready:
        if self.child is not None:
            await self.child.close(RUN_ENDED)  # nothing is left of the last one
        self.child = await Child.start(COMMAND, kind="worker", environ=ENVIRON)
        try:
            answer = await self.child.request(pickle.dumps(self._task), START_TIMEOUT_S)
            ready: Ready = pickle.loads(answer)
        except TimeoutError:
            slow = f"took longer than {START_TIMEOUT_S:g} s to start"
            return Ready(refusal=f"The worker for {self._task.label} {slow}.")
        except ChildEnded as end:
            return Ready(refusal=f"The worker for {self._task.label} did not start: {end}.")
        if ready.refusal:
            self.child.kill(ready.refusal)
        return ready

    async def run(self, call: Any, timeout: float) -> Score:
        """Run one call; raises ChildEnded when the process ends meanwhile."""
        ready = await self.start()
        if ready.refusal:
            return Score.failed(ready.refusal)
        child = self.child
        assert child is not None
        try:
            request = pickle.dumps(Request(call, timeout))
        except Exception as error:
            message = f"the row cannot be sent to a worker process: {describe_error(error)}"
            return Score.failed(message)
        try:
            patience_s = timeout + (LOOP_GRACE_S if ready.is_async else 0)
            answer = await child.request(request, patience_s)
        except TimeoutError:
            blocked = "; it blocked the event loop" if ready.is_async else ""
            return Score.failed(timeout_message(timeout) + blocked)
        except asyncio.CancelledError:  # the worker would go on computing
            child.kill("another call was given up")
            raise
        except ChildEnded:
            if child.exit_code == -signal.SIGPROF and self._task.cpu_limit:
                limit = f"{self._task.cpu_limit:g} s of computing"
                return Score.failed(f"timeout: took more than {limit}")
            raise
        try:
            score: Score = pickle.loads(answer)
        except Exception:
            return Score.failed(str(child.refuse_answer()))
        return score


class WorkerPool:
    """Runs the calls of one task on up to `size` processes; every future resolves to a Score."""

    def __init__(self, task: Task, *, size: int, timeout: float) -> None:
        self._timeout = timeout
        self._closed = False
        self._workers = [_Worker(task) for _ in range(size)]
        # Last in, first out: a running worker is used before another one is started.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        self._add_capacity(1)
        self._loop = LoopThread("rewards")

    def start(self) -> Ready:
        """Start the first worker; RewardError when it cannot load its task.

        If the function is a coroutine function, each worker then runs several calls at once.
        """
        ready = self._loop.call(self._workers[0].start())
        if ready.refusal:
            raise RewardError(ready.refusal)
        if ready.is_async:
            self._add_capacity(CONCURRENT_COROUTINES - 1)
        return ready

    def submit(
        self, call: Any, finish: Callable[[Score], Score], responses: int = 1
    ) -> Future[Score]:
        """Queue one call; `finish` is applied to its score. It has the time of its responses."""
        return self._loop.submit(self._score(call, finish, responses * self._timeout))

    def close(self) -> None:
        """Stop the workers; unanswered calls fail."""
        if self._closed:
            return
        self._closed = True
        self._loop.call(self._close())
        self._loop.close()

    async def _close(self) -> None:
        children = [worker.child for worker in self._workers if worker.child is not None]
        await asyncio.gather(*(child.close(RUN_ENDED, EXIT_TIMEOUT_S) for child in children))

    def _add_capacity(self, calls: int) -> None:
        for worker in reversed(self._workers):
            for _ in range(calls):
                self._free.put_nowait(worker)

    async def _score(self, call: Any, finish: Callable[[Score], Score], timeout: float) -> Score:
        try:
            score = await self._run_with_retry(call, timeout)
        except asyncio.CancelledError:
            score = Score.failed(RUN_ENDED)
        return finish(score)

    async def _run_with_retry(self, call: Any, timeout: float) -> Score:
        """Return the score of a call, tried in another worker if its worker was lost.

        It fails when the call is at fault, or when MAX_ATTEMPTS workers have died.
        """
        crashes = 0
        while True:
            worker = await self._free.get()
            try:
                if self._closed:
                    return Score.failed(RUN_ENDED)
                return await worker.run(call, timeout)
            except ChildEnded as end:
                crashes += end.crashed
                if (end.crashed and end.alone) or crashes == MAX_ATTEMPTS:
                    return Score.failed(str(end))
            finally:
                self._free.put_nowait(worker)
