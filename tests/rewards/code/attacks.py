"""Responses that attack, in text files, and listeners that nobody may reach."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from string import Template
from typing import Any

from tests.rewards.tables import read_blocks

WORDS = {name: text.removesuffix("\n") for name, text in read_blocks("code/fragments").items()}
WORDS |= {"NUL": "\0", "MANY_OPEN": "(" * 5000, "MANY_CLOSED": ")" * 5000}


def read_attacks(name: str) -> dict[str, tuple[str, str]]:
    """Return the attacks of a file: name -> (code, the reason that is due)."""
    attacks = {}
    for heading, code in read_blocks(f"code/{name}").items():
        name, _, reason = heading.partition(" | ")
        attacks[name.strip()] = (Template(code).safe_substitute(WORDS), reason)
    return attacks


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
