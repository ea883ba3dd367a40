"""Addresses and ports of the nodes of a run: names resolved, ports tried, mistakes explained."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from ppo_cli.errors import ConfigError

# Ray's default port, which an old cluster may still have.
RAY_PORT = 6379
CONNECT_TIMEOUT_S = 3.0
# The preface of a client, and its settings, which are the defaults.
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


def resolve_host(host: str) -> str:
    """Return the address of a host name, IPv4 before IPv6. Raises ConfigError if unknown."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR '{host}' is not a name or address that this machine knows; give the "
            "address of node 0, as `hostname -I` shows it there."
        ) from error
    entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(entries[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_on_loopback(place: str | None) -> bool:
    """Whether an address, or an address with a port, is on the loopback of this machine."""
    host = place or ""
    if host.count(":") == 1 or host.startswith("["):
        host, _ = split_address(host)
    try:
        return is_loopback(host)
    except ValueError:  # a name, "auto" or nothing
        return False


def is_local(address: str) -> bool:
    """Whether this machine has this address."""
    # Only the addresses of this machine can be bound to.
    try:
        with socket.socket(_family(address)) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def head_address(master: str | None) -> str | None:
    """Return the address of node 0, which this machine is, or None where Ray should choose it.

    MASTER_ADDR may be a name that means 127.0.1.1 on this machine alone. Raises ConfigError when
    it is an address of another machine.
    """
    if not master:
        return None
    address = resolve_host(master)
    if not is_local(address):
        raise ConfigError(
            f"MASTER_ADDR {master} is not an address of this machine ({socket.gethostname()}), "
            "which is node 0: give every node an address of node 0, or make that machine node 0."
        )
    return address if master == address or not is_loopback(address) else None


def check_port(port: int) -> None:
    """Raise ConfigError where node 0 cannot listen at this port. Ray itself names no reason."""
    # On all interfaces, as Ray's head listens.
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = " (Ray's own port: is an old `ray start --head` running?)"
            other = port + 1000 if port < 64000 else port - 1000
            raise ConfigError(
                f"port {port} is in use, by another run or program"
                f"{hint if port == RAY_PORT else ''}. Each node is started once; for a second run "
                f"on the same machine set MASTER_PORT={other} "
                "on every node."
            ) from error
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"port {port} cannot be opened: {reason}; set MASTER_PORT.") from error


def node_address(variable: str | None) -> str | None:
    """Return the address in NODE_ADDR, by which others reach this node. Raises ConfigError."""
    if variable is None:
        return None
    address = resolve_host(variable)
    if not is_local(address):
        raise ConfigError(f"NODE_ADDR {variable} is not an address of this machine.")
    return address


def free_port(address: str) -> int:
    """Return a port of this address where nothing listens yet."""
    with socket.socket(_family(address)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def split_address(text: str) -> tuple[str, int]:
    """Split host:port, where an IPv6 host is in brackets."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return host:port as Ray reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accepts_connections(address: str) -> bool:
    """Whether something accepts connections at host:port."""
    try:
        socket.create_connection(split_address(address), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def answers(address: str) -> bool:
    """Whether what accepts connections at host:port reacts to what is sent, as HTTP/2 or not."""
    try:
        with socket.create_connection(split_address(address), timeout=CONNECT_TIMEOUT_S) as line:
            line.sendall(HTTP2_START)
            line.recv(1)
    except TimeoutError:
        return False
    except OSError:  # it hung up
        return True
    return True


def connection_error(error: OSError) -> str:
    """Return the reason of a failed connection in one or two words."""
    # Its own text would be "timed out" without a cause.
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno).lower() if error.errno else str(error)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
