"""An event loop whose waits take no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(selectors.SelectSelector())
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def select(timeout: float | None = None) -> Any:
            events = look(0)
            # A little more, as rounding must not leave a moment that never passes.
            self.now += 0.0 if events else (timeout or 0.0) + 1e-9
            return events

        selector.select = select

    def time(self) -> float:
        return self.now
