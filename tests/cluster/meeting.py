"""Node 0's door with nodes that run in threads: real sockets, and nothing where Ray would be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ppo_cli.cluster.addresses import Line
from ppo_cli.cluster.nodes import Membership, Nodes, find_head
from ppo_cli.cluster.preflight import NodeFacts, fingerprint, run_key
from ppo_cli.cluster.rendezvous import VARIABLE, Rendezvous, Secret
from ppo_cli.config.schema.run import Config
from ppo_cli.errors import ConfigError, WorkerLost

CONFIG = Config.model_validate({"trainer": {"nnodes": 3}})
KEY, SETTINGS = run_key(CONFIG), fingerprint(CONFIG)
HEAD = NodeFacts(0, 3, "host-a", 10, 0, 0, "1.0", "3.11", "2.60.0", "2.13.0", "none")


@dataclass
class FakeRay:
    """Stands where Ray would run; a test may let it die."""

    up: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False

    def wait(self) -> None:
        self.up.set()

    def alive(self) -> bool:
        return self.up.is_set() and not self.stopped

    def ended(self) -> str:
        return "Ray stopped on this node (exit 1)."

    def tail(self) -> str:
        return "its last words"

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Guest:
    """A node that runs in a thread of the test."""

    rays: list[FakeRay] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    result: Any = None
    line: Line | None = None
    token: str = ""
    thread: threading.Thread | None = None

    def end(self) -> Any:
        assert self.thread is not None
        self.thread.join(15)
        assert not self.thread.is_alive()
        return self.result


class Meeting:
    def __init__(self, secret: str = "") -> None:
        self.said: list[str] = []
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.door.getsockname()[1]
        # Stands for Ray's port, which the nodes must reach.
        self.ray = socket.create_server(("127.0.0.1", 0))
        self.ray_port = self.ray.getsockname()[1]
        hosts = ["host-a", "host-b", "host-c"]
        kept = Secret({VARIABLE: secret})
        self.room = Rendezvous(self.door, HEAD, SETTINGS, KEY, hosts, self.said.append, kept)

    def raw(self) -> Line:
        return Line(socket.create_connection(("127.0.0.1", self.port), 5))

    def hello(self, rank: int = 1, **change: Any) -> Line:
        line, facts = self.raw(), asdict(replace(HEAD, rank=rank, host="host-x"))
        fields = {"protocol": 1, "run": KEY, "facts": facts, "settings": SETTINGS, "job": ""}
        line.send("hello", **{**fields, **change})
        return line

    def guest(self, rank: int, restarts: int = 0, secret: str = "", **change: Any) -> Guest:
        guest = Guest()
        facts = replace(HEAD, rank=rank, host=f"host-{'abc'[rank]}", **change)

        def start_ray(address: str, token: str, own: str) -> Any:
            guest.token = token
            assert address == self.room.address
            guest.rays.append(FakeRay())
            return guest.rays[-1]

        def live() -> None:
            guest.line = find_head("127.0.0.1", self.port, None, 5, guest.said.append)
            stay = Membership(
                guest.line,
                facts,
                start_ray,
                restarts,
                guest.said.append,
                Secret({VARIABLE: secret}),
            )
            try:
                guest.result = stay.run(KEY, SETTINGS)
            except (ConfigError, WorkerLost) as error:
                guest.result = error

        guest.thread = threading.Thread(target=live, daemon=True)
        guest.thread.start()
        return guest

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def offer(self) -> None:
        self.room.offer(f"127.0.0.1:{self.ray_port}", "a seed")

    def nodes(self) -> Nodes:
        return Nodes("", {}, meeting=self.room, timeout=5, tell=self.said.append)

    def whole(self, **change: Any) -> tuple[Guest, Guest]:
        guests = self.guest(1, **change), self.guest(2, **change)
        self.offer()
        self.until(lambda: len(self.room.in_phase("checked")) == 2)
        assert self.room.problems() == []
        self.room.start_all()
        self.nodes().wait_until_whole()
        return guests


def why(line: Line) -> str:
    answer = line.read(5)
    line.close()
    assert answer is not None
    assert answer["type"] == "refused"
    return str(answer["why"])
