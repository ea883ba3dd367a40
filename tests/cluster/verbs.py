"""A program: a service that does a few things without an engine, behind file descriptor FD."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from ppo_cli.cluster.driver_process import Service
from ppo_cli.errors import ConfigError


class Verbs(Service):
    """What a service does, without an engine."""

    def add(self, *numbers: int) -> int:
        return sum(numbers)

    def count(self, limit: int) -> Iterator[int]:
        for number in range(limit):
            yield number
            time.sleep(0.01)

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def refuse(self) -> None:
        raise ConfigError(["one thing", "another"])

    def exit(self) -> None:
        os._exit(1)  # as Ray does it

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    Verbs(Connection(int(sys.argv[1]))).run()
