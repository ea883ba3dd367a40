"""A program: a service that does a few things without an engine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

from ppo_cli.cluster.driver_process import Service
from ppo_cli.errors import ConfigError
from ppo_cli.processes.channel import Channel


class Verbs(Service):
    """What a service does, without an engine."""

    def add(self, *numbers: int) -> int:
        return sum(numbers)

    counted = 0

    def count(self, limit: int) -> Iterator[int]:
        for number in range(limit):
            self.counted += 1
            yield number
            time.sleep(0.01)

    def count_so_far(self) -> int:
        return self.counted

    def imported(self, module: str) -> bool:
        return module in sys.modules

    def refuse(self) -> None:
        raise ConfigError(["one thing", "another"])

    def exit(self) -> None:
        os._exit(1)  # as Ray does it

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    Verbs(Channel()).run()
