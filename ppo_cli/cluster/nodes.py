"""The nodes of a run: open them on node 0, join them on the others.

`open_cluster` gives the Ray to connect to and watches the nodes; `join_cluster` gives a machine
to node 0 until that ends: a `Membership` finds node 0, does what it says, and ends as it ends.
With RAY_ADDRESS nothing is started. NODE_ADDR, where it is set, is the address by which the others
reach this node.

The nodes must be in a network where all are trusted: what they and Ray say is not encrypted.
PPO_CLUSTER_SECRET, the same on all nodes, keeps those out who do not have it (rendezvous.py).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType

from ppo_cli.cluster.addresses import (
    PROBE_S,
    Broken,
    Line,
    Message,
    free_port,
    listen,
    own_address,
    reaches,
    resolve_host,
    strerror,
    words,
)
from ppo_cli.cluster.preflight import (
    NodeFacts,
    describe,
    facts_here,
    fingerprint,
    run_key,
)
from ppo_cli.cluster.ray_process import STOP_S, RayProcess, keeps_silent, ray_variables
from ppo_cli.cluster.rendezvous import BEAT_S, PROTOCOL, Rendezvous, Secret, examine_head, fresh
from ppo_cli.config.placement import gpu_count, gpus_per_node
from ppo_cli.config.schema.run import Config
from ppo_cli.config.slurm import outside_step, slurm_hosts
from ppo_cli.errors import (
    EXIT_BUG,
    EXIT_RESUMABLE,
    ConfigError,
    Interrupted,
    PpoError,
    WorkerLost,
    exit_code_of,
)
from ppo_cli.signals import StopOnSignal

SAY_S = 15.0
# Problems of those who are here are told after this long, though others still lack.
GRACE_S = 30.0

Tell = Callable[[str], None]


@dataclass(eq=False)
class Nodes:
    """What a driver needs of its nodes; close it, or use it as a context."""

    address: str
    names: dict[int, str]
    ips: Mapping[int, str] = field(default_factory=dict)  # where Ray knows each node
    variables: Mapping[str, str] = field(default_factory=dict)  # for a driver that imports ray
    ray: RayProcess | None = None
    meeting: Rendezvous | None = None
    timeout: float = 300.0
    tell: Tell = print

    def lost(self) -> str | None:
        """Say which node is gone, and how; None while all are here."""
        if self.ray is not None and not self.ray.alive():
            return self.ray.ended()
        meeting = self.meeting
        if meeting is None:
            return None
        with meeting.changed:
            for rank in meeting.others():
                member = meeting.members[rank]
                if member.phase == "gone":
                    return f"{meeting.label(rank)} is gone: it {member.why}."
                if member.phase != "ready":
                    return (
                        f"{meeting.label(rank)} does not work: {member.why or 'Ray starts there.'}"
                    )
        return None

    def stop_asked(self) -> str | None:
        """Say that a node was asked to stop by a signal, when one was."""
        return self.meeting.stop_asked if self.meeting is not None else None

    def wait_until_whole(
        self,
        timeout: float | None = None,
        *,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Wait until every node is here and works.

        Raises WorkerLost when that takes too long, Interrupted when a stop is asked for.
        """
        limit = self.timeout if timeout is None else timeout
        deadline, said = time.monotonic() + limit, -SAY_S
        while (lost := self.lost()) is not None:
            if reason := stop_requested():
                raise Interrupted(f"Stopped while waiting for a node ({reason}).")
            if self.ray is not None and not self.ray.alive():
                raise WorkerLost(
                    f"{lost} The other nodes depend on it: start the same line again on all nodes."
                )
            now = time.monotonic()
            if now > deadline:
                raise WorkerLost(
                    f"{lost} It did not come back within {limit:g} s (trainer.node_timeout)."
                )
            if now - said > SAY_S:
                self.tell(f"{lost} Waiting for it: start the same line there again.")
                said = now
            self._pause(min(0.5, max(0.0, deadline - now)))

    def close(self, exit_code: int) -> None:
        """Send every node home with this exit code, and stop what was started here."""
        meeting, self.meeting = self.meeting, None
        ray, self.ray = self.ray, None
        try:
            if meeting is not None:
                meeting.end(exit_code, STOP_S)
        finally:
            if ray is not None:
                ray.stop()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(exit_code_of(error))

    def _pause(self, seconds: float) -> None:
        if self.meeting is None:
            time.sleep(seconds)
            return
        with self.meeting.changed:
            self.meeting.changed.wait(seconds)


def open_cluster(config: Config, environ: Mapping[str, str], tell: Tell) -> Nodes:
    """Bring the nodes together on node 0 and return them when all of them work."""
    trainer = config.trainer
    if address := _given_cluster(config, environ):
        return _existing(address, config, environ, tell)
    own_address(environ.get("NODE_ADDR"))
    secret = Secret(environ)
    door = listen(trainer.master_addr, trainer.master_port)
    host = socket.gethostname()
    meeting = Rendezvous(
        door,
        facts_here(config, environ, 0, host),
        fingerprint(config),
        run_key(config),
        slurm_hosts(environ),
        tell,
        secret,
    )
    try:
        return _gather(config, environ, meeting, secret, tell)
    except BaseException as error:
        meeting.end(exit_code_of(error), 5.0)
        raise


def join_cluster(config: Config, environ: Mapping[str, str], tell: Tell) -> int:
    """Give this node to node 0 until the run ends; returns node 0's exit code."""
    trainer = config.trainer
    _given_cluster(config, environ)
    assert trainer.node_rank and trainer.master_addr is not None

    def start_ray(address: str, token: str, own: str) -> RayProcess:
        options = ["--address", address, "--node-ip-address", own, *_resources(config, environ)]
        return RayProcess(options, {**environ, **ray_variables(token)}, "this node")

    own, secret = own_address(environ.get("NODE_ADDR")), Secret(environ)
    line = find_head(trainer.master_addr, trainer.master_port, own, trainer.node_timeout, tell)
    facts = facts_here(config, environ, trainer.node_rank, socket.gethostname())
    stay = Membership(line, facts, start_ray, trainer.max_restarts, tell, secret)
    return stay.run(run_key(config), fingerprint(config))


def _given_cluster(config: Config, environ: Mapping[str, str]) -> str:
    """Return RAY_ADDRESS; a ConfigError where this machine should also join as a node."""
    address, rank = environ.get("RAY_ADDRESS", "").strip(), config.trainer.node_rank
    if address and rank:
        raise ConfigError(
            f"RAY_ADDRESS {address} names a cluster that runs already, so ppo is started once, "
            f"not as node {rank}: leave out NODE_RANK, or RAY_ADDRESS."
        )
    return address


def _gather(
    config: Config, environ: Mapping[str, str], meeting: Rendezvous, secret: Secret, tell: Tell
) -> Nodes:
    deadline = time.monotonic() + config.trainer.node_timeout
    _await(meeting, environ, lambda: bool(meeting.members), deadline, tell)
    # The address by which the first node came in is one by which nodes reach us.
    own = next(iter(meeting.members.values())).line.here
    port = free_port(own, config.trainer.master_port + 1)
    address, seed = f"{own}:{port}", fresh()
    token = secret.token(seed, address)
    # Ray's port is tried before Ray is there, so that mistakes are told at once.
    with listen(own, port):
        meeting.offer(address, seed)
        _examine(meeting, environ, deadline, tell)
    ray = _head(config, {**environ, **ray_variables(token)}, own, port)
    names = {rank: meeting.label(rank) for rank in range(config.trainer.nnodes)}
    nodes = Nodes(
        address,
        names,
        ips={0: own, **{rank: node.line.there for rank, node in meeting.members.items()}},
        variables=ray_variables(token),
        ray=ray,
        meeting=meeting,
        timeout=config.trainer.node_timeout,
        tell=tell,
    )
    try:
        tell("starting Ray on node 0")
        ray.wait()
        meeting.start_all()
        _await(
            meeting,
            environ,
            lambda: nodes.lost() is None,
            deadline,
            tell,
            "starting Ray on the others",
        )
    except BaseException as error:
        nodes.close(exit_code_of(error))
        raise
    tell(f"{len(names)} of {len(names)} nodes work together")
    return nodes


def _examine(meeting: Rendezvous, environ: Mapping[str, str], deadline: float, tell: Tell) -> None:
    """Wait until all nodes are here and examined; raises every problem of every node."""
    grace = [deadline]

    def examined() -> bool:
        if len(meeting.in_phase("checked")) == len(meeting.others()):
            return True
        if len(grace) == 1 and meeting.problems():
            grace.append(min(deadline, time.monotonic() + GRACE_S))
        return time.monotonic() > grace[-1] and len(grace) > 1

    _await(meeting, environ, examined, deadline, tell, "comparing them")
    problems = meeting.problems()
    tell(describe(meeting.facts, meeting.label(0)))
    for rank in meeting.in_phase("checked"):
        tell(describe(meeting.members[rank].facts, meeting.label(rank)))
    if problems:
        # First who is missing: those that are refused go away.
        lacking = [f"{name} is not here yet." for name in meeting.missing()]
        meeting.refuse_all()
        raise ConfigError(problems + lacking)


def _await(
    meeting: Rendezvous,
    environ: Mapping[str, str],
    done: Callable[[], bool],
    deadline: float,
    tell: Tell,
    doing: str = "",
) -> None:
    """Wait until `done`, telling who is missing; a ConfigError with their names in the end."""
    said, last = "", 0.0
    while not done():
        missing, now = meeting.missing(), time.monotonic()
        total = meeting.facts.nnodes
        here = f"{total - len(missing)} of {total} nodes are here"
        state = f"{here}; " + (f"waiting for {', '.join(missing)}" if missing else doing)
        if now > deadline:
            slow = [
                f"{meeting.label(rank)} {meeting.members[rank].why}".strip()
                for rank in meeting.in_phase("here", "checked", "started")
            ]
            late = ", ".join(missing or slow) or "Ray on a node"
            hint = (
                " Under SLURM start it on every node: srun --ntasks-per-node=1 ./train.sh …"
                if missing and outside_step(environ)
                else " Is the same line started there, with its own NODE_RANK?"
            )
            raise ConfigError(f"{here}; did not come in time (trainer.node_timeout): {late}.{hint}")
        if state != said or now - last > SAY_S:
            tell(state)
            said, last = state, now
        with meeting.changed:
            meeting.changed.wait(min(0.5, max(0.01, deadline - now)))


def _existing(address: str, config: Config, environ: Mapping[str, str], tell: Tell) -> Nodes:
    found = re.fullmatch(r"\[?([^\[\]/]+)\]?:(\d{1,5})", address)
    if address != "auto" and found is None:
        raise ConfigError(
            f"RAY_ADDRESS '{address}' is not HOST:PORT of a Ray head (such as 10.0.0.1:6379); run "
            "ppo on a machine of that cluster."
        )
    if found is not None and not reaches(found.group(1), int(found.group(2))):
        raise ConfigError(f"nothing answers at RAY_ADDRESS {address}; is that cluster running?")
    if found is not None and keeps_silent(address, environ, config.trainer.node_timeout):
        raise ConfigError(
            f"what listens at RAY_ADDRESS {address} is no Ray head: it does not answer as one. "
            "Give the HOST:PORT that `ray start --head` printed."
        )
    tell(f"using the Ray cluster at {address}")
    return Nodes(address, {}, timeout=config.trainer.node_timeout, tell=tell)


def _head(config: Config, environ: Mapping[str, str], own: str, port: int) -> RayProcess:
    options = ["--head", "--port", str(port), "--node-ip-address", own]
    client = ["--ray-client-server-port", str(free_port(own))]
    quiet = ["--include-dashboard", "false"]
    options += [*client, *quiet, *_resources(config, environ)]
    return RayProcess(options, environ, f"node 0 ({socket.gethostname()})")


def _resources(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return what a node offers; without GPUs enough logical CPUs for every rank and sampler."""
    gpus = gpus_per_node(config, gpu_count(environ))
    ranks = (config.trainer.num_workers or 1) + (config.rollout.num_samplers or 1)
    cpus = max(os.cpu_count() or 1, 0 if gpus else ranks + 2)
    agent = ["--dashboard-agent-listen-port", "0"]
    return ["--num-cpus", str(cpus), "--num-gpus", str(gpus), *agent]


RETRY_S = 0.5
TICK_S = 0.2
HEAD_SILENCE_S = 30.0


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
