"""An object that lives in a worker, used from here as if it were at hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ppo_cli.engine.cluster.failures import Member
from ppo_cli.engine.cluster.waits import Call, Waits


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
    ) -> None:
        self._member = member
        self._ask = ask
        self._waits = waits
        self._dismiss = dismiss
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ppo-{member.title}")

    def call(self, name: str, *args: Any) -> Any:
        """Call a method and wait for what it gives; raises what it raised."""
        return self._waits.collect([self._ask(self._member, name, "call", *args)])[0]

    def submit(self, name: str, *args: Any) -> Future[Any]:
        """Call a method without waiting."""
        return self._thread.submit(self.call, name, *args)

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._dismiss(self._member)
