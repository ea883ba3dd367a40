"""Messages between the nodes of a run: one JSON object a line, each bounded in size and time."""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any

LONGEST = 1 << 16
SEND_S = 5.0
_CHUNK = 1 << 14

Message = dict[str, Any]


class Broken(ConnectionError):
    """The other side is gone, or speaks something else; says which."""


class Line:
    """One connection, read by one thread and written by any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(SEND_S)
        self._socket = sock
        self._rest = b""
        self._lock = threading.Lock()
        self.here = str(sock.getsockname()[0])
        self.there = str(sock.getpeername()[0])

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message; raises Broken when it cannot leave."""
        data = json.dumps({"type": kind, **fields}).encode() + b"\n"
        if len(data) > LONGEST:
            raise ValueError(f"a message of {len(data)} bytes is above {LONGEST}")
        try:
            with self._lock:
                self._socket.sendall(data)
        except (OSError, ValueError) as error:
            raise Broken(f"cannot be written to ({error})") from error

    def read(self, timeout: float) -> Message | None:
        """Return the next message, or None when none is whole within `timeout` seconds."""
        while b"\n" not in self._rest:
            if len(self._rest) >= LONGEST:
                raise Broken("sent a line without end")
            if not self._ready(timeout):
                return None
            self._take()
        line, _, self._rest = self._rest.partition(b"\n")
        return _parse(line)

    def close(self) -> None:
        """Hang up; a reader in another thread sees the end."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            self._socket.close()

    def _ready(self, timeout: float) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError as error:
            raise Broken("closed the connection") from error
        return bool(poll.poll(timeout * 1000))

    def _take(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError as error:
            raise Broken(f"cannot be read from ({error})") from error
        if not data:
            raise Broken("closed the connection")
        self._rest += data


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Broken("sent something that is no message") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise Broken("sent something that is no message")
    return message


def words(value: object, longest: int = 200) -> str:
    """Return text that came over the wire as something safe to print: one line, no escapes."""
    return "".join(c if c.isprintable() else " " for c in str(value))[:longest].strip()
