"""Responses that attack, in text files, and listeners that nobody may reach."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent
WORDS = {
    # What a value says that claims to be equal to everything.
    "LIES": """\
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __len__(self): return 9
    def __bool__(self): return True
    def __contains__(self, item): return True
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __lt__""",
    # Writes to whatever channel may be open.
    "WRITE_ALL": """\
import os
def write_all(data):
    for fd in range(3, 64):
        try: os.write(fd, data)
        except OSError: pass""",
    # Calls the kernel by number; those of x86_64, which mean other things elsewhere.
    "SYSCALL": """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
call = libc.syscall""",
    # Part of the tests; put together when it runs, so that an attack does not find itself.
    "MARK": "mark = ''.join(['candi', 'date', '(3)'])",
    "NUL": "\0",
    "MANY_OPEN": "(" * 5000,
    "MANY_CLOSED": ")" * 5000,
}


def read_attacks(name: str) -> dict[str, tuple[str, str]]:
    """Return the attacks of a file: name -> (code, what stands behind the name)."""
    _, *blocks = (HERE / f"{name}.txt").read_text(encoding="utf-8").split("=== ")
    found = {}
    for block in blocks:
        heading, _, code = block.partition("\n")
        name, _, note = heading.partition(" | ")
        found[name.strip()] = (Template(code).safe_substitute(WORDS), note)
    return found


def listen(stack: ExitStack, path: str) -> tuple[int, str, list[socket.socket]]:
    """Listen on TCP, UDP and unix sockets; returns the port, an abstract name, the listeners.

    The datagrams of that name have one of their own, with a `d` at its end.
    """
    tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = tcp.getsockname()[1]
    name, listeners = f"zz{os.getpid()}-{port}", [tcp]
    addresses: tuple[tuple[int, int, Any], ...] = (
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
        (socket.AF_UNIX, socket.SOCK_STREAM, path),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{name}"),
        (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{name}d"),
    )
    for family, kind, address in addresses:
        listener = stack.enter_context(socket.socket(family, kind))
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listeners.append(listener)
    return port, name, listeners


def was_called(listener: socket.socket) -> bool:
    listener.setblocking(False)
    with suppress(BlockingIOError):
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(1)
        else:
            listener.accept()[0].close()
        return True
    return False
