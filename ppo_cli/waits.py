"""Waits on something foreign: a store, Ray, a judge, a server, a program, another thread.

Each wait has a bound, a sentence while it lasts, and an end soon after the first Ctrl-C or SIGTERM
(`signals.LEAVE_S`). The call runs in a thread that can be left, as no library ends its calls in
time. The table in docs/scaling.md lists all waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import TypeVar

from ppo_cli import signals
from ppo_cli.errors import Interrupted

T = TypeVar("T")
TICK_S = 0.1
NOTE_AFTER_S = 15.0  # a wait of this length is said
REACH_S = 40.0  # to be let in by a neighbour that accepts connections


class NoAnswer(Interrupted):
    """Something foreign did not answer within the bound of the wait for it."""


class Progress:
    """When something foreign last gave a sign of life: bounds are counted from `time`."""

    def __init__(self) -> None:
        self.time = time.monotonic()

    def note(self, seconds: float = 0.0) -> None:
        """Note a sign of life; the next one may take `seconds` longer than usual."""
        self.time = max(self.time, time.monotonic() + seconds)


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Start a call in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by `await_result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def await_result(
    future: Future[T], name: str, seconds: float = math.inf,
    tell: Callable[[str], None] = lambda text: None, progress: Progress | None = None,
) -> T:  # fmt: skip
    """Return the result of a future that `name` is to complete.

    Raises NoAnswer after `seconds` without progress, and Interrupted soon after a signal; while
    the `progress` of a caller goes on, after the second one.
    """
    begun, noted = Progress(), False
    while True:
        # Not `result(TICK_S)`: its TimeoutError may be that of the work.
        try:
            future.exception(TICK_S)
        except NotYet:
            pass
        else:
            return future.result()
        silent = time.monotonic() - (progress or begun).time
        if silent > seconds:
            raise NoAnswer(f"{name} does not answer (nothing for {silent:.0f} s)")
        if signals.time_left(progress.time if progress else -math.inf) <= 0:
            raise Interrupted(f"Stopped while waiting for {name}.")
        if silent > NOTE_AFTER_S and not noted:
            bound = "" if math.isinf(seconds) else f" for {seconds:g} s at most"
            tell(f"Waiting for {name}{bound}.")
            noted = True
