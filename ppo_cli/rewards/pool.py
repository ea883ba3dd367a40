"""A pool of worker processes whose calls end by a deadline.

A thread cannot be stopped, a process can: a call that hangs is killed with its worker, the
worker is replaced, and only that call fails. Workers start when there is work for them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait

from ppo_cli.errors import RewardError
from ppo_cli.records import Score
from ppo_cli.rewards.returned import Returned, describe_error
from ppo_cli.rewards.worker import (
    SECONDS_TO_EXIT,
    SECONDS_TO_START,
    Call,
    Ready,
    Task,
    WorkerProcess,
    timeout_words,
)

CALLS_AT_ONCE = 64
# A coroutine is stopped by its own event loop; only a blocked loop is left to the pool.
LOOP_GRACE = 2.0
MOST_ATTEMPTS = 2


@dataclass
class _Job:
    number: int
    call: Call
    finish: Callable[[Returned], Score]
    future: Future[Score] = field(default_factory=Future)
    deadline: float = math.inf
    attempts: int = 0

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()

    def end(self, returned: Returned) -> None:
        self.future.set_result(self.finish(returned))

    def fail(self, failure: str) -> None:
        self.end(Returned(None, failure))


@dataclass(eq=False)
class _Worker:
    process: WorkerProcess
    jobs: dict[int, _Job] = field(default_factory=dict)


class WorkerPool:
    """Runs one task on up to `size` processes; every future resolves to a Score."""

    def __init__(self, task: Task, *, size: int, timeout: float) -> None:
        self._task = task
        self._size = size
        self._timeout = timeout
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._inbox: deque[_Job] = deque()
        self._closing = False
        self._woken = False
        self._bug: Exception | None = None
        self._thread: threading.Thread | None = None
        self._first: Future[Ready] = Future()
        # Below this line everything belongs to the pool's own thread.
        self._queue: deque[_Job] = deque()
        self._workers: list[_Worker] = []
        self._capacity = 1
        self._is_async = False

    def start(self) -> None:
        """Start the first worker and wait until it has loaded its task; RewardError if not."""
        self._wake()
        ready = self._first.result()
        if ready.refusal:
            raise RewardError(ready.refusal)

    def submit(self, call: Call, finish: Callable[[Returned], Score]) -> Future[Score]:
        """Queue one call; `finish` turns what came back into the score."""
        job = _Job(next(self._numbers), call, finish)
        with self._lock:
            if self._closing:
                raise RuntimeError("this reward is closed") from self._bug
            self._inbox.append(job)
        self._wake()
        return job.future

    def close(self) -> None:
        """Stop the workers; calls that are not answered fail."""
        with self._lock:
            self._closing = True
            thread = self._thread
        if thread is not None:
            self._wake()
            thread.join()

    def _wake(self) -> None:
        with self._lock:
            if self._thread is None:
                self._hear, self._call = Pipe(duplex=False)
                self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
                self._thread.start()
            if not self._woken and self._thread.is_alive():
                self._woken = True
                with contextlib.suppress(OSError):
                    self._call.send_bytes(b"!")

    def _run(self) -> None:
        try:
            self._start_worker()
            while self._take_new():
                self._place()
                for connection in wait(self._watched(), self._patience()):
                    self._listen(connection)
                self._expire()
        except Exception as bug:
            self._bug = bug
        finally:
            self._leave()

    def _take_new(self) -> bool:
        with self._lock:
            self._queue.extend(self._inbox)
            self._inbox.clear()
            return not self._closing

    def _watched(self) -> list[Connection]:
        return [self._hear, *(worker.process.connection for worker in self._workers)]

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None when there is none."""
        ends = [job.deadline for worker in self._workers for job in worker.jobs.values()]
        ends += [w.process.start_deadline for w in self._workers if not w.process.ready]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _place(self) -> None:
        """Hand waiting jobs to free workers, and start workers for those that still wait."""
        for worker in list(self._workers):
            while self._queue and worker.process.ready and len(worker.jobs) < self._capacity:
                if not self._send(worker, self._queue.popleft()):
                    break
        starting = sum(not worker.process.ready for worker in self._workers)
        wanted = min(self._size - len(self._workers), len(self._queue) - starting)
        for _ in range(wanted):
            self._start_worker()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(WorkerProcess(self._task)))

    def _send(self, worker: _Worker, job: _Job) -> bool:
        job.attempts += 1
        job.deadline = time.monotonic() + self._timeout + (LOOP_GRACE if self._is_async else 0)
        worker.jobs[job.number] = job
        try:
            worker.process.send(job.number, job.call, self._timeout)
        except OSError:
            self._bury(worker)
            return False
        except Exception as error:
            del worker.jobs[job.number]
            job.fail(f"the row cannot be handed to a worker process: {describe_error(error)}")
        return True

    def _listen(self, connection: object) -> None:
        if connection is self._hear:
            with self._lock:
                self._hear.recv_bytes()
                self._woken = False
            return
        worker = next((w for w in self._workers if w.process.connection is connection), None)
        if worker is None:
            return
        try:
            message = worker.process.receive()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if isinstance(message, Ready):
            self._welcome(worker, message)
        else:
            number, returned = message
            worker.jobs.pop(number).end(returned)

    def _welcome(self, worker: _Worker, ready: Ready) -> None:
        if ready.refusal:
            self._give_up(worker, ready.refusal)
            return
        worker.process.ready = True
        self._is_async = ready.is_async
        self._capacity = CALLS_AT_ONCE if ready.is_async else 1
        if not self._first.done():
            self._first.set_result(ready)

    def _bury(self, worker: _Worker) -> None:
        """A worker has gone by itself: its only call is to blame; several get a second try."""
        failure, by_limit = worker.process.say_end()
        if by_limit and self._task.cpu_limit:
            failure = f"timeout: took more than {self._task.cpu_limit:g} s of computing"
        if not worker.process.ready:
            self._give_up(worker, f"The worker for {self._task.label} did not start: {failure}.")
            return
        self._remove(worker)
        for job in reversed(worker.jobs.values()):
            if len(worker.jobs) == 1 or job.attempts >= MOST_ATTEMPTS:
                job.fail(failure)
            else:
                self._queue.appendleft(job)

    def _give_up(self, worker: _Worker, refusal: str) -> None:
        """A worker cannot start: say so to whoever waits, rather than start it for ever."""
        self._remove(worker)
        if not self._first.done():
            self._first.set_result(Ready(refusal=refusal))
        elif self._queue:
            self._queue.popleft().fail(refusal)

    def _expire(self) -> None:
        """Kill workers whose time is up; calls beside the late ones get a second try."""
        now = time.monotonic()
        for worker in list(self._workers):
            process = worker.process
            if not process.ready and process.start_deadline <= now:
                slow = f"took longer than {SECONDS_TO_START:g} s to start"
                self._give_up(worker, f"The worker for {self._task.label} {slow}.")
            late = [job for job in worker.jobs.values() if job.deadline <= now]
            if not late:
                continue
            self._remove(worker)
            for job in late:
                blocked = "; it blocked the event loop" if self._is_async else ""
                job.fail(timeout_words(self._timeout) + blocked)
            self._queue.extendleft(j for j in worker.jobs.values() if j not in late)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.process.kill()

    def _leave(self) -> None:
        for worker in self._workers:
            worker.process.hang_up()
        for worker in self._workers:
            worker.process.kill(patience=SECONDS_TO_EXIT)
        with self._lock:
            self._closing = True
            self._queue.extend(self._inbox)
        unfinished = [job for worker in self._workers for job in worker.jobs.values()]
        for job in [*unfinished, *self._queue]:
            if self._bug is None:
                job.fail("the run ended before this response was scored")
            elif not job.future.done():
                job.future.set_exception(self._bug)
        if not self._first.done():
            self._first.set_result(Ready(refusal="The reward was closed before it started."))
        self._hear.close()
        self._call.close()
