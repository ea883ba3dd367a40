"""A node's side of the meeting: find node 0, do what it says, end as it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from ppo_cli.errors import EXIT_BUG, EXIT_RESUMABLE, ConfigError, Interrupted, PpoError, WorkerLost
from ppo_cli.launch.addresses import (
    PROBE_S,
    Broken,
    Line,
    Message,
    reaches,
    resolve_host,
    strerror,
    words,
)
from ppo_cli.launch.preflight import NodeFacts
from ppo_cli.launch.ray_process import RayProcess
from ppo_cli.launch.rendezvous import BEAT_S, PROTOCOL, Secret, examine_head, fresh
from ppo_cli.signals import StopOnSignal

RETRY_S = 0.5
TICK_S = 0.2
HEAD_SILENCE_S = 30.0
SAY_S = 15.0

Tell = Callable[[str], None]


def find_head(master: str, port: int, own: str | None, timeout: float, tell: Tell) -> Line:
    """Connect to node 0, waiting for it to start; a ConfigError when it does not come."""
    address, deadline, said = resolve_host(master), time.monotonic() + timeout, 0.0
    while True:
        try:
            source = (own, 0) if own else None
            return Line(socket.create_connection((address, port), PROBE_S, source_address=source))
        except OSError as error:
            reason = strerror(error)
        now = time.monotonic()
        if now > deadline:
            raise ConfigError(
                f"node 0 is not there: {address}:{port} says '{reason}' for {timeout:g} s. Is the "
                "same line started on node 0, is MASTER_ADDR its address, is the port open?"
            )
        if now - said > SAY_S:
            tell(f"waiting for node 0 at {address}:{port} ({reason})")
            said = now
        time.sleep(RETRY_S)


class Membership:
    """One node's stay in the run, from its hello to node 0's exit code."""

    def __init__(
        self,
        line: Line,
        facts: NodeFacts,
        ray: Callable[[str, str, str], RayProcess],
        restarts: int,
        tell: Tell,
        secret: Secret | None = None,
    ) -> None:
        self._line, self._facts, self._tell = line, facts, tell
        self._secret = secret or Secret({})
        self._start_ray, self._restarts = ray, restarts
        self._ray: RayProcess | None = None
        self._where: tuple[str, str] | None = None
        self._listener = socket.create_server(
            (line.here, 0), family=socket.AF_INET6 if ":" in line.here else socket.AF_INET
        )
        self._heard = time.monotonic()
        self._welcome = False
        self._over = threading.Event()

    def run(self, key: str, settings: Mapping[str, str]) -> int:
        """Stay until the end; returns node 0's exit code."""
        job, nonce = os.environ.get("SLURM_JOB_ID", ""), fresh() if self._secret else ""
        try:
            self._line.send(
                "hello", protocol=PROTOCOL, run=key, facts=asdict(self._facts),
                settings=dict(settings), job=job, nonce=nonce,
            )  # fmt: skip
            examine_head(self._line, self._secret, key, self._facts.rank, nonce)
            threading.Thread(target=self._beat, daemon=True).start()
            with StopOnSignal(lambda name: None) as stop:
                return self._stay(stop)
        except Broken as error:
            raise self._lost_head(error) from error
        finally:
            self._over.set()
            self._listener.close()
            if self._ray is not None:
                self._ray.stop()
            self._line.close()

    def _lost_head(self, error: Broken) -> PpoError:
        if self._welcome:
            return WorkerLost(
                f"node 0 ({self._line.there}) is gone: it {error}. No run goes on without it: "
                "start the same line again on all nodes."
            )
        return ConfigError(
            f"what answers at {self._line.there} is not node 0 of this run: it {error}. Is "
            "MASTER_PORT the port of another program there?"
        )

    def _stay(self, stop: StopOnSignal) -> int:
        asked = False
        try:
            while True:
                message = self._line.read(TICK_S)
                if message is not None:
                    self._heard = time.monotonic()
                    code = self._obey(message)
                    if code is not None:
                        return code
                elif time.monotonic() - self._heard > HEAD_SILENCE_S:
                    raise Broken(f"has been silent for {HEAD_SILENCE_S:g} s")
                self._watch_ray()
                name = stop.reason()
                if name and not asked:
                    asked = True
                    self._line.send("stop_asked")  # node 0 is to save first
                    with suppress(Interrupted):  # if nobody reads it
                        self._tell(f"{name}: node 0 is asked to stop. Once more leaves at once.")
        except KeyboardInterrupt:
            self._line.send("left", why="left on a signal")
            return EXIT_RESUMABLE

    def _obey(self, message: Message) -> int | None:
        kind = message["type"]
        if kind == "refused":
            raise ConfigError(words(message.get("why"), 500))
        if kind == "stop":
            raw = message.get("problems")
            raise ConfigError([words(p, 500) for p in raw] if isinstance(raw, list) else words(raw))
        if kind == "welcome":
            self._welcome = True
            self._tell(f"node {self._facts.rank} is with node 0 ({self._line.there})")
        elif kind == "check":
            host, _, port = words(message.get("address")).rpartition(":")
            found = port.isdecimal() and reaches(host.strip("[]"), int(port), self._line.here)
            self._line.send("checked", reaches=found, listens=self._listener.getsockname()[1])
        elif kind == "start":
            address, seed = words(message.get("address")), words(message.get("seed"))
            self._where = address, self._secret.token(seed, address)
            self._begin_ray()
        elif kind == "end":
            return self._end(message.get("code"))
        return None

    def _begin_ray(self) -> None:
        if self._where is None:
            raise Broken("sent no address")
        self._ray = self._start_ray(*self._where, self._line.here)
        try:
            self._ray.wait()
        except WorkerLost as error:
            self._line.send("failed", why=str(error))
            raise
        self._line.send("ready")
        self._tell(f"node {self._facts.rank} works for node 0 ({self._line.there})")

    def _watch_ray(self) -> None:
        """Start Ray anew when it died here; node 0 hears of both."""
        if self._ray is None or self._ray.alive():
            return
        why = self._ray.ended()
        self._line.send("failed", why=why)
        self._tell(f"{why}\n{self._ray.tail()}")
        self._ray.stop()
        self._ray = None
        if self._restarts <= 0:
            raise WorkerLost(f"{why} It died too often (trainer.max_restarts).")
        self._restarts -= 1
        self._begin_ray()

    def _end(self, raw: object) -> int:
        code = raw if isinstance(raw, int) and 0 <= raw <= 255 else EXIT_BUG
        if self._ray is not None:
            self._ray.stop()
            self._ray = None
        self._line.send("bye", why="ended")
        if code:
            self._tell(f"node 0 ({self._line.there}) ended with exit code {code}; so does this one")
        return code

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._line.send("beat")
            except Broken:
                return
