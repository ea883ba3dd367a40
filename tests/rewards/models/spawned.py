"""A host that is a process of its own: what a cluster's worker is to a reward."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ppo_cli.errors import PpoError, WorkerLost

SECONDS = 120.0


def serve(link: Connection, factory: bytes) -> None:
    """Make the object and answer calls until there are no more."""
    target = pickle.loads(factory)()
    while (request := link.recv()) is not None:
        method, args = request
        try:
            link.send((getattr(target, method)(*args), None))
        except PpoError as error:
            link.send((None, error))
    target.close()


class Spawned:
    """A host in a fresh process; one that is lost says so."""

    def __init__(self, factory: Callable[[], Any], name: str = "") -> None:
        spawn = multiprocessing.get_context("spawn")
        self._link, worker_end = spawn.Pipe()
        self.process = spawn.Process(
            target=serve, args=(worker_end, pickle.dumps(factory)), name=name, daemon=True
        )
        self.process.start()
        worker_end.close()
        self.seems_alive = False  # until its next call: a cluster does not notice at once
        self._closed = False

    @property
    def alive(self) -> bool:
        return not self._closed and (self.seems_alive or self.process.is_alive())

    def call(self, method: str, *args: Any) -> Any:
        try:
            self._link.send((method, args))
            if not self._link.poll(SECONDS):
                raise WorkerLost(f"{self.process.name} does not answer {method}")
            result, error = self._link.recv()
        except (EOFError, OSError) as gone:
            raise WorkerLost(f"{self.process.name} died in {method}") from gone
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self._link.send(None)
            self.process.join(10)
        self.process.kill()
        self.process.join(10)
        self._link.close()
        self.process.close()
