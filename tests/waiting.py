"""Waiting for what another process or thread does, and ports that nothing uses yet."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def wait_until(ready: Callable[[], object], seconds: float = 120.0) -> None:
    """Look again and again; fail when it has not come true in time."""
    ends = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < ends, f"not in {seconds:g} s"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])
