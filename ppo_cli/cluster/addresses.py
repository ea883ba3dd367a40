"""Addresses and ports of nodes, and messages between them: one JSON object a line."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import select
import socket
import threading
from typing import Any

from ppo_cli.errors import ConfigError

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
            poll = select.poll()
            try:
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(timeout * 1000):
                    return None
                data = self._socket.recv(_CHUNK)
            except ValueError as error:  # it was closed here
                raise Broken("closed the connection") from error
            except OSError as error:
                raise Broken(f"cannot be read from ({error})") from error
            if not data:
                raise Broken("closed the connection")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return _parse(line)

    def close(self) -> None:
        """Hang up; a reader in another thread sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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


RAY_PORT = 6379
PROBE_S = 3.0


def resolve_host(host: str) -> str:
    """Return the address behind a name, IPv4 before IPv6; a ConfigError where there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR '{host}' is not a name or address that this machine knows; give the "
            "address of node 0, as `hostname -I` shows it there."
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_literal(host: str) -> bool:
    """Whether this is an address itself, not a name for one."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only this machine itself is reached by this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_mine(address: str) -> bool:
    """Whether this machine has this address."""
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def listen(master: str | None, port: int) -> socket.socket:
    """Open node 0's door: at the given address, or at all when that is nothing, or localhost."""
    address = resolve_host(master) if master else ""
    if master and not is_mine(address):
        raise ConfigError(
            f"MASTER_ADDR {master} is not an address of this machine ({socket.gethostname()}), "
            "which is node 0: give every node an address of node 0, or make that machine node 0."
        )
    # A name may stand for 127.0.1.1 here and for the right address elsewhere.
    door = address if master and (is_literal(master) or not is_loopback(address)) else ""
    try:
        return socket.create_server((door, port), family=_family(address), backlog=64)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            ray = " (Ray's own port: is an old `ray start --head` running?)"
            raise ConfigError(
                f"port {port} is in use, by another run or program"
                f"{ray if port == RAY_PORT else ''}. Each node is started once; for a second run "
                f"beside it say MASTER_PORT={port + 1000 if port < 64000 else port - 1000} on "
                "every node."
            ) from error
        why = os.strerror(error.errno or 0)
        raise ConfigError(f"port {port} cannot be opened: {why}; MASTER_PORT=…") from error


def free_port(address: str, preferred: int = 0) -> int:
    """Return the preferred port when it is free at this address, or any that is."""
    for port in (preferred, 0):
        try:
            at = (address, port if port <= 65535 else 0)
            with socket.create_server(at, family=_family(address)) as probe:
                return int(probe.getsockname()[1])
        except OSError as error:
            failure = error
    raise ConfigError(f"no port can be opened at {address}: {os.strerror(failure.errno or 0)}.")


def reaches(address: str, port: int, own: str | None = None) -> bool:
    """Whether a connection can be made."""
    try:
        source = (own, 0) if own else None
        with socket.create_connection((address, port), PROBE_S, source_address=source):
            return True
    except OSError:
        return False


def own_address(environ_address: str | None) -> str | None:
    """Check NODE_ADDR, which says by which of its addresses a node is to be reached."""
    if environ_address is None:
        return None
    address = resolve_host(environ_address)
    if not is_mine(address):
        raise ConfigError(f"NODE_ADDR {environ_address} is not an address of this machine.")
    return address


def strerror(error: OSError) -> str:
    """Return the reason of a failed connection in a word or two."""
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno).lower() if error.errno else str(error)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
