"""One background event loop for a whole run: the connections of an SDK die with their loop."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CANCEL_S = 5.0


class LoopThread:
    """Runs coroutines on a daemon thread, which never keeps the process alive."""

    def __init__(self, name: str = "judge") -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future that comes back cancels it."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError(f"the event loop of {self._thread.name} is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine to its end from another thread; cancelled when the wait is given up."""
        # The loop cannot run the coroutine while its thread waits for it.
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("call() would wait for its own thread")
        future = self.submit(work)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what still runs and end the thread. Safe to call twice."""
        with self._lock:
            # Under the lock: no coroutine is submitted after the last look for tasks.
            first, self._closed = not self._closed, True
        if not first:
            self._thread.join(2 * _CANCEL_S)
            return
        atexit.unregister(self.close)
        # A task that does not end in time is abandoned: the thread is a daemon.
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(_CANCEL_S)
        except TimeoutError:
            ending.cancel()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CANCEL_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        """Everything submitted before the close has become a task by now: calls are in order."""
        # A cancelled task may leave others behind, so look again until nothing is left.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
