"""Where a node is: what SLURM says of it, addresses and ports, and messages between nodes.

Only what is not said outright (NNODES, NODE_RANK, MASTER_ADDR, N_GPUS) is read from SLURM, and
only inside a step (`srun`), where each node runs the line once. A message is one JSON object a
line.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import re
import select
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_cli.errors import ConfigError

KEYS = {
    "NNODES": "trainer.nnodes",
    "NODE_RANK": "trainer.node_rank",
    "MASTER_ADDR": "trainer.master_addr",
    "N_GPUS": "trainer.n_gpus_per_node",
}
MOST_HOSTS = 100_000
_SRUN = "srun --ntasks-per-node=1 ./train.sh …"


@dataclass(frozen=True)
class NodeVariables:
    """Variables to add to the environment, and for each the words that say where it is from."""

    values: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def node_variables(environ: Mapping[str, str], given: Collection[str] = ()) -> NodeVariables:
    """Read the node from SLURM; `given` names the keys that flags or files have set already."""
    env = {name: text.strip() for name, text in environ.items() if text.strip()}
    if "NNODES" not in env and "trainer.nnodes" not in given:
        _refuse_ranks(env)
    slurm = _slurm(env)
    kept = {
        name: found for name, found in slurm.items() if name not in env and KEYS[name] not in given
    }
    return NodeVariables(
        {name: value for name, (value, _) in kept.items()},
        {name: f"env {origin}" for name, (_, origin) in kept.items()},
    )


def slurm_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the SLURM step or job in the order of their node ids, if any."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if not listed:
        return []
    with contextlib.suppress(ConfigError):
        return expand_hosts(listed)
    return []


def expand_hosts(listed: str) -> list[str]:
    """Expand SLURM's short form: `a-[1-3,05],b` is a-1 a-2 a-3 a-05 b."""
    hosts: list[str] = []
    for item in _split(listed):
        hosts += _expand(item, listed)
        if len(hosts) > MOST_HOSTS:
            raise ConfigError(f"the node list '{listed[:80]}' names more than {MOST_HOSTS} hosts.")
    return hosts


def outside_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a SLURM job of several nodes in which the line runs on one alone."""
    return _count(_first(environ, _NODES)[0]) > 1 and not environ.get("SLURM_STEP_ID", "")


_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def _slurm(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    nodes, origin = _first(env, _NODES)
    if env.get("SLURM_NODEID") is None or not nodes:
        return {}
    _refuse_tasks(env)
    # Settings of one's own say how many nodes there are: then SLURM's count means nothing.
    if _count(env.get("NNODES", nodes)) <= 1:
        return {}
    found = {"NNODES": (nodes, origin), "NODE_RANK": (env["SLURM_NODEID"], "SLURM_NODEID")}
    hosts = slurm_hosts(env)
    if hosts:
        found["MASTER_ADDR"] = (hosts[0], "SLURM_JOB_NODELIST")
    gpus = env.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdecimal():
        found["N_GPUS"] = (gpus, "SLURM_GPUS_ON_NODE")
    return found


def _refuse_tasks(env: Mapping[str, str]) -> None:
    """Name a step that starts the line several times on a node, before they all start."""
    in_step = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    outside = env.get("SLURM_NTASKS_PER_NODE", "1") if _count(env.get("SLURM_NNODES")) > 1 else "1"
    tasks = max((_count(part) for part in (in_step or outside).split(",")), default=1)
    local = _count(env.get("SLURM_LOCALID"))
    if tasks > 1 or local > 0:
        many = f"{tasks} times" if tasks > 1 else f"several times (SLURM_LOCALID {local})"
        raise ConfigError(
            f"srun starts this line {many} on each node, but ppo is started once a node, and "
            f"starts what it needs on each GPU by itself: {_SRUN}"
        )


def _refuse_ranks(env: Mapping[str, str]) -> None:
    """Name a start by torchrun and the like, which would run the whole run once a rank."""
    world = _count(env.get("WORLD_SIZE"))
    if world < 2 or "RANK" not in env:
        return
    seen = " ".join(
        f"{name}={env[name][:20]}" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in env
    )
    if "LOCAL_RANK" in env:
        mend = "leave the launcher out, and say N_GPUS=8, and NNODES=2 NODE_RANK=0 for more nodes."
    else:
        mend = f"if those count nodes, say NNODES={world} NODE_RANK={env['RANK'][:20]} instead."
    raise ConfigError(
        f"{seen} are set as by torchrun, while NNODES is not: ppo is started once a node, not "
        f"once a GPU; {mend}"
    )


def _first(env: Mapping[str, str], names: Collection[str]) -> tuple[str, str]:
    return next(((env[n], n) for n in names if env.get(n, "").strip()), ("", ""))


def _count(text: str | None) -> int:
    """Return the number at the start of `4(x2)`; 0 where there is none."""
    found = re.match(r"\s*(\d{1,9})", text or "")
    return int(found.group(1)) if found else 0


def _split(listed: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [item for item in re.split(r",(?![^\[]*\])", listed) if item.strip()]


def _expand(item: str, listed: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([\d,-]+)\](.*)", item.strip())
    if found is None:
        if "[" in item or "]" in item:
            raise ConfigError(f"the node list '{listed[:80]}' cannot be read.")
        return [item.strip()]
    before, numbers, after = found.groups()
    rests = _expand(after, listed) if after else [""]
    return [f"{before}{n}{rest}" for n in _numbers(numbers, listed) for rest in rests]


def _numbers(text: str, listed: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal()) or int(high) - int(low) > MOST_HOSTS:
            raise ConfigError(f"the node list '{listed[:80]}' cannot be read.")
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


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
