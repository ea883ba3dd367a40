"""SIGINT, SIGTERM and a closed terminal ask to stop after the step; a second one stops at once."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from ppo_cli.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopOnSignal:
    """Context in which signals are noted; `reason` names the one that came.

    `tell` gets the name of the first one when it comes, within the handler. `elsewhere` reports
    one that reached another node of the run.
    """

    def __init__(
        self, tell: Callable[[str], None], elsewhere: Callable[[], str | None] = lambda: None
    ) -> None:
        self._tell = tell
        self._elsewhere = elsewhere
        self._name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def reason(self) -> str | None:
        """Name of the signal that asked to stop, or None."""
        return self._name or self._elsewhere()

    def __enter__(self) -> StopOnSignal:
        # Python delivers signals to the main thread only, and only it may set handlers.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # `nohup`: the run is to outlive its terminal
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
            if self._name is not None:
                return  # a shell and the system may both send it; this is no second Ctrl-C
        elif self._name is not None:
            raise KeyboardInterrupt
        self._name = signal.Signals(number).name
        # To raise here would end the step that is to be saved: whoever read the words may be gone
        # (`| tee` ends on the same Ctrl-C), and another print may be under way in this thread.
        with suppress(Interrupted, RuntimeError):
            self._tell(self._name)


def _leave_terminal() -> None:
    for number in (0, 1, 2):
        with suppress(OSError):
            # A closed terminal no longer says that it is one.
            if stat.S_ISCHR(os.fstat(number).st_mode):
                lead_nowhere(number)


def lead_nowhere(number: int) -> None:
    """Let a stream whose other end is closed lead nowhere: to write to it is an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    os.close(nowhere)
