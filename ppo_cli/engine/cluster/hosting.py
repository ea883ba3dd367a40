"""An object that lives in a worker, used from here as if it were at hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ppo_cli.engine.cluster.futures import Call, Member, Waits
from ppo_cli.errors import WorkerLost


class Proxy:
    """Calls methods of a hosted object; errors and deadlines are those of any worker.

    Usable from any thread; calls are answered one after the other.
    """

    def __init__(
        self,
        member: Member,
        ask: Callable[..., Call],
        waits: Waits,
        dismiss: Callable[[Member], None],
        lives: Callable[[Member], bool],
    ) -> None:
        self._member = member
        self._ask = ask
        self._waits = waits
        self._dismiss = dismiss
        self._lives = lives
        self._lost = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ppo-{member.title}")

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        return not self._lost and self._lives(self._member)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method and wait for what it gives; raises what it raised.

        Raises WorkerLost when the worker died, hangs, or was closed, at any moment of the call.
        """
        if not self.alive:
            raise WorkerLost(f"The {self._member.title} has ended.")
        try:
            return self._waits.collect([self._ask(self._member, name, "call", *args)])[0]
        except WorkerLost:
            self._lost = True
            raise
        except Exception as error:
            if self.alive:
                raise
            raise WorkerLost(f"The {self._member.title} was closed meanwhile.") from error

    def submit(self, name: str, *args: Any) -> Future[Any]:
        """Call a method without waiting."""
        return self._thread.submit(self.call, name, *args)

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._dismiss(self._member)
