"""SIGINT and SIGTERM ask the loop to stop after the step; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopOnSignal:
    """Context in which signals are noted; `reason` tells which one came.

    `elsewhere` tells of one that reached another node of the run.
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
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._name is not None:
            raise KeyboardInterrupt
        self._name = signal.Signals(number).name
        self._tell(f"{self._name}: finishing this step, then saving. Once more stops at once.")
