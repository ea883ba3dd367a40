"""A host that is a separate process: what a cluster's worker is to a reward."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from ppo_cli.errors import WorkerLost

SECONDS = 120.0
_objects: list[Any] = []  # what the factory has made, in the process of the host


def _build(factory: bytes) -> None:
    _objects.append(pickle.loads(factory)())


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_objects[0], method)(*args)


class Spawned:
    """A host in a fresh process; as with a cluster, a call has to fail until it counts as lost."""

    def __init__(self, factory: Callable[[], Any], name: str = "") -> None:
        self.alive, self._name = True, name
        spawn = get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, _build, (pickle.dumps(factory),))
        self._pid = self._pool.submit(os.getpid).result(SECONDS)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def call(self, method: str, *args: Any) -> Any:
        try:
            return self._pool.submit(_call, method, args).result(SECONDS)
        except BrokenExecutor as error:
            self.alive = False
            raise WorkerLost(f"{self._name} died in {method}") from error

    def close(self) -> None:
        self.alive = False
        self._pool.shutdown()
