"""Node 0's side of the meeting: who is here, who fits, who is gone.

One thread takes connections, one reads each node, one sends a beat to all; the state behind
`changed` is theirs together. A node is admitted by the run's key and a free rank, tells its
facts, is examined, started, and then watched until the run ends. Where there is a secret, it
comes before all of that."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ppo_cli.cluster.addresses import Broken, Line, Message, reaches, words
from ppo_cli.cluster.preflight import (
    NodeFacts,
    compare,
    different_keys,
    own_problems,
    read_facts,
)
from ppo_cli.errors import ConfigError

VARIABLE = "PPO_CLUSTER_SECRET"
# Whoever meets a node may try words against its proof, as many as it likes: no short ones.
SHORTEST = 16
ANSWER_S = 10.0


class Secret:
    """What is in PPO_CLUSTER_SECRET; false where that is not set."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        text = environ.get(VARIABLE, "").strip()
        if text and len(text) < SHORTEST:
            raise ConfigError(
                f"{VARIABLE} has {len(text)} characters and needs {SHORTEST}: make one with "
                "`openssl rand -hex 32`, and give it to all nodes."
            )
        self._key = text.encode(errors="surrogateescape")

    def __bool__(self) -> bool:
        return bool(self._key)

    def proof(self, *parts: str) -> str:
        """Return what only those can say of these parts who have the secret."""
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def proves(self, said: object, *parts: str) -> bool:
        """Whether this is the proof of these parts."""
        return hmac.compare_digest(self.proof(*parts).encode(), words(said).encode())

    def token(self, seed: str, address: str) -> str:
        """Return the token of the Ray at an address; without a secret it is the seed itself."""
        return self.proof("ray token", seed, address) if self else seed


def fresh() -> str:
    """Return something that was never said before."""
    return secrets.token_hex(32)


def examine_node(line: Line, secret: Secret, hello: Message) -> str | None:
    """On node 0: have a node prove the secret, and prove it in turn; returns why it may not in."""
    raw, theirs = hello.get("facts"), words(hello.get("nonce") or "")
    rank = raw.get("rank") if isinstance(raw, dict) else None
    who = f"node {rank}" if isinstance(rank, int) else "a node"
    if bool(theirs) != bool(secret):
        having = ("has no", "has one") if secret else ("has a", "has none")
        return f"{who} {having[0]} {VARIABLE}, node 0 {having[1]}: set the same on all nodes."
    if not secret:
        return None
    ours = fresh()
    parts = words(hello.get("run")), str(rank), theirs, ours
    line.send("challenge", nonce=ours)
    answer = line.read(ANSWER_S) or {}
    if not secret.proves(answer.get("proof"), "node", *parts):
        return f"{who} has another {VARIABLE} than node 0: set the same on all nodes."
    line.send("proof", proof=secret.proof("head", *parts))
    return None


def examine_head(line: Line, secret: Secret, run: str, rank: int, nonce: str) -> None:
    """On a node that said hello: prove the secret, and see that node 0 has it too."""
    if not secret:
        return
    challenge = _answer(line, "challenge", rank)
    parts = run, str(rank), nonce, words(challenge.get("nonce"))
    line.send("proof", proof=secret.proof("node", *parts))
    if not secret.proves(_answer(line, "proof", rank).get("proof"), "head", *parts):
        raise ConfigError(f"node {rank} has another {VARIABLE} than node 0 ({line.there}).")


def _answer(line: Line, kind: str, rank: int) -> Message:
    message = line.read(ANSWER_S)
    if message is None:
        raise Broken(f"has been silent for {ANSWER_S:g} s")
    if message["type"] == "refused":
        raise ConfigError(words(message.get("why"), 500))
    if message["type"] != kind:
        raise ConfigError(
            f"node {rank} has a {VARIABLE}, and what answers at {line.there} does not ask for it: "
            "set the same on all nodes."
        )
    return message


PROTOCOL = 1
HELLO_S = 10.0
BEAT_S = 1.0
SILENCE_S = 10.0
HERE = ("here", "checked", "started", "ready")  # a node's phases until it is gone


@dataclass
class Member:
    """A node that is or was here; `phase` is one of HERE, or gone."""

    facts: NodeFacts
    line: Line
    different: list[str]
    phase: str = "here"
    why: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        """Host and address, in words."""
        host, address = self.facts.host, self.line.there
        return host if host == address else f"{host}, {address}"


class Rendezvous:
    """The door of node 0, open from the start to the end of the run."""

    def __init__(
        self,
        door: socket.socket,
        facts: NodeFacts,
        settings: Mapping[str, str],
        key: str,
        hosts: list[str],
        tell: Callable[[str], None],
        secret: Secret | None = None,
    ) -> None:
        self.facts, self.members = facts, dict[int, Member]()
        self.changed = threading.Condition()
        self.address, self.seed, self.started = "", "", False
        self.stop_asked: str | None = None
        self._door, self._settings, self._key = door, settings, key
        self._hosts, self._tell = hosts, tell
        self._secret = secret or Secret({})
        self._closed = threading.Event()
        for task in (self._accept, self._beat):
            threading.Thread(target=task, daemon=True, name=f"nodes-{task.__name__}").start()

    def label(self, rank: int) -> str:
        """Return a node's name: `node 1 (host-b, 10.0.0.2)` as far as it is known."""
        if rank == self.facts.rank:
            return f"node {rank} ({self.facts.host})"
        member = self.members.get(rank)
        if member is not None:
            return f"node {rank} ({member.where})"
        known = len(self._hosts) == self.facts.nnodes
        return f"node {rank} ({self._hosts[rank]})" if known else f"node {rank}"

    def others(self) -> range:
        """Return the ranks beside this one."""
        return range(1, self.facts.nnodes)

    def in_phase(self, *phases: str) -> list[int]:
        """Return the ranks that are in one of these phases."""
        return [r for r in self.others() if r in self.members and self.members[r].phase in phases]

    def missing(self) -> list[str]:
        """Return the names of the nodes that are not here."""
        here = self.in_phase(*HERE)
        return [self.label(rank) for rank in self.others() if rank not in here]

    def offer(self, address: str, seed: str) -> None:
        """Ray runs here: every node tries to reach it, those that come later as well.

        `seed` is what a node makes Ray's token of, with the secret where there is one.
        """
        with self.changed:
            self.address, self.seed = address, seed
            waiting = [self.members[rank] for rank in self.in_phase("here")]
        for member in waiting:
            self._send(member, "check", address=address)

    def problems(self) -> list[str]:
        """Return all that keeps the nodes that are here from starting together."""
        found = own_problems(self.facts, self.label(self.facts.rank))
        for rank in sorted(self.members):
            found += self._problems_of(self.members[rank])
        return found

    def refuse_all(self) -> None:
        """Tell each node what is wrong with it, or that the run does not start."""
        rest = f"The run does not start; node 0 ({self.facts.host}) says why."
        for member in self.members.values():
            self._send(member, "stop", problems=self._problems_of(member) or [rest])

    def start_all(self) -> None:
        """Let every node start its Ray; later ones are started when they come and fit."""
        with self.changed:
            self.started = True
            checked = [self.members[rank] for rank in self.in_phase("checked")]
        for member in checked:
            self._start(member)

    def end(self, code: int, timeout: float) -> None:
        """Send the exit code, and wait a little until the nodes have cleaned up."""
        if self._closed.is_set():
            return
        for member in list(self.members.values()):
            self._send(member, "end", code=code)
        deadline = time.monotonic() + timeout
        with self.changed:
            while self.in_phase(*HERE):
                if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                    break
        self.close()

    def close(self) -> None:
        """Shut the door and hang up."""
        self._closed.set()
        # Closing alone would leave the port open as long as the other thread waits on it.
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for member in list(self.members.values()):
            member.line.close()

    def _accept(self) -> None:
        self._door.settimeout(0.5)
        while not self._closed.is_set():
            try:
                sock, _ = self._door.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()

    def _meet(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(Line(sock)) as line:
            self._greet(line)

    def _greet(self, line: Line) -> None:
        hello = line.read(HELLO_S)
        if hello is not None and hello["type"] == "hello":
            member = self._admit(hello, line)
            if isinstance(member, str):
                line.send("refused", why=member)
                self._tell(f"Refused a node at {line.there}: {member}")
            else:
                self._follow(member)

    def _admit(self, hello: Message, line: Line) -> Member | str:
        if hello.get("protocol") != PROTOCOL:
            return "it has another version of ppo-cli: install the same on all nodes."
        # Before anything is compared: what differs tells of the run.
        stranger = examine_node(line, self._secret, hello)
        if stranger:
            return stranger
        if hello.get("run") != self._key:
            return (
                f"the run of node 0 ({self.facts.host}) is another one: its output_dir, "
                "project_name or experiment_name differ. Give the same, or another MASTER_PORT."
            )
        facts, settings = read_facts(hello.get("facts")), hello.get("settings")
        if facts is None or not isinstance(settings, dict):
            return "its hello is malformed."
        job, ours = words(hello.get("job") or ""), os.environ.get("SLURM_JOB_ID", "")
        if job and ours and job != ours:
            return f"it is of the SLURM job {job}, node 0 of {ours}; give one another MASTER_PORT."
        with self.changed:
            refusal = self._rank_problem(facts, line)
            if refusal:
                return refusal
            member = Member(facts, line, different_keys(self._settings, settings))
            self.members[facts.rank] = member
            self.changed.notify_all()
        return member

    def _rank_problem(self, facts: NodeFacts, line: Line) -> str | None:
        rank, last = facts.rank, self.facts.nnodes - 1
        if rank > last:
            return f"NODE_RANK {rank} does not exist: node 0 has NNODES={last + 1}, so 0 to {last}."
        taken = rank == 0 or rank in self.in_phase(*HERE)
        if taken:
            host = self.facts.host if rank == 0 else self.members[rank].facts.host
            there = line.here if rank == 0 else self.members[rank].line.there
            return f"NODE_RANK {rank} is taken by {host} ({there}): each node needs its own."
        same = [r for r in self.in_phase(*HERE)
                if self.members[r].line.there == line.there]  # fmt: skip
        if facts.wanted_gpus and (same or line.there == line.here):
            other = same[0] if same else 0
            return (
                f"node {other} runs on {facts.host} ({line.there}) already: ppo is started once a "
                "node, and takes all its GPUs by N_GPUS."
            )
        return None

    def _follow(self, member: Member) -> None:
        """Read a node until it is gone; silence counts as gone."""
        try:
            with self.changed:
                address = self.address
            member.line.send("welcome", beat=BEAT_S)
            if address:
                member.line.send("check", address=address)
            while not self._closed.is_set():
                message = member.line.read(SILENCE_S)
                if message is None:
                    raise Broken(f"has been silent for {SILENCE_S:g} s")
                if self._hear(member, message):
                    return
        except Broken as error:
            self._enter(member, "gone", str(error))

    def _hear(self, member: Member, message: Message) -> bool:
        """Act on one message; True when the node says goodbye."""
        kind = message["type"]
        if kind == "checked":
            self._checked(member, message)
        elif kind == "ready":
            self._enter(member, "ready")
        elif kind == "failed":
            self._enter(member, "started", words(message.get("why"), 600))
        elif kind == "stop_asked":
            self.stop_asked = f"{self.label(member.facts.rank)} was asked to stop"
        elif kind in ("bye", "left"):
            self._enter(member, "gone", words(message.get("why") or "left"))
            return True
        return False

    def _checked(self, member: Member, message: Message) -> None:
        if member.phase != "here":
            return
        port, rank = message.get("listens"), member.facts.rank
        there, ray = member.line.there, self.address
        found = []
        if message.get("reaches") is not True:
            found.append(
                f"{self.label(rank)} cannot reach {ray}; open it, and the ports above 1024 "
                "between the nodes, in the firewall."
            )
        if not isinstance(port, int) or not 0 < port < 65536 or not reaches(there, port):
            found.append(
                f"node 0 ({self.facts.host}) cannot reach {self.label(rank)} on port "
                f"{words(port, 10)}; open the ports above 1024 between the nodes in the firewall."
            )
        member.problems = found
        self._enter(member, "checked")
        if not self.started:
            return
        problems = self._problems_of(member)
        if problems:
            for problem in problems:
                self._tell(problem)
            self._send(member, "stop", problems=problems)
        else:
            self._start(member)

    def _problems_of(self, member: Member) -> list[str]:
        who = self.label(member.facts.rank)
        fit = compare(self.facts, member.facts, member.different, who)
        return [*own_problems(member.facts, who), *fit, *member.problems]

    def _start(self, member: Member) -> None:
        self._enter(member, "started")
        self._send(member, "start", address=self.address, seed=self.seed)

    def _enter(self, member: Member, phase: str, why: str = "") -> None:
        with self.changed:
            member.phase, member.why = phase, why
            self.changed.notify_all()

    def _send(self, member: Member, kind: str, **fields: object) -> None:
        # A node that cannot be written to is found gone by its reader.
        with contextlib.suppress(Broken):
            member.line.send(kind, **fields)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            for member in list(self.members.values()):
                if member.phase != "gone":
                    self._send(member, "beat")
