"""Our end of the connection to the process that talks to Ray, which is started from here."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ray import cloudpickle

from ppo_cli.engine.cluster.logs import KILLED

STOP, DROP = "stop", "drop"  # messages that are no requests
BEAT, BEAT_S = "beat", 2.0  # a message that says only that somebody is there
GONE = "gone"
LEAVES_S = 5.0
SILENT_S = 180.0  # it may take long to start on a busy machine


@dataclass(frozen=True)
class Answer:
    """What comes back for one request: items, then the end of it."""

    number: int
    verb: str
    parts: SimpleQueue[tuple[str, bytes]] = field(default_factory=SimpleQueue)

    def take(self, timeout: float) -> tuple[str, Any]:
        """Return the next kind and value; raises queue.Empty when there is none in time."""
        kind, value = self.parts.get(timeout=timeout)
        return kind, pickle.loads(value) if value else None


def send(connection: Connection, number: int, kind: str, value: bytes) -> None:
    """Send a message; what may be large goes as it is."""
    connection.send((number, kind))
    connection.send_bytes(value)


def receive(connection: Connection) -> tuple[int, str, bytes]:
    """Return the number of a request, what kind of message this is, and a pickled value."""
    number, kind = connection.recv()
    return number, kind, connection.recv_bytes()


def limit_silence(end: socket.socket, seconds: float) -> None:
    """Let a read fail with an OSError when nothing comes for so long, in whatever it is about."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class Client:
    """Starts a process, sends it requests from any thread, and hands each what answers it.

    The command gets the file descriptor of its end of the connection as a last word. Its process
    has a session of its own: Ctrl-C is for us alone.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as said:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                start_new_session=True, env=dict(environ),
            )  # fmt: skip
        limit_silence(self._socket, SILENT_S)
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._lock = threading.Lock()
        self._open: dict[int, Answer] = {}
        self._count = 0
        self._gone = False
        self._silent = False
        self._reader = threading.Thread(target=self._listen, name="ppo-client", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process that answers."""
        return self._process.pid

    def ending(self) -> str:
        """Say how the process ended; for when an answer says that it is gone."""
        if self._silent:
            return f"said nothing for {SILENT_S:g} s"
        with suppress(subprocess.TimeoutExpired):
            if self._process.wait(LEAVES_S) == -signal.SIGKILL:
                return KILLED
        return "ended"

    def ask(self, verb: str, *args: Any) -> Answer:
        """Send a request."""
        arguments = cloudpickle.dumps(args)
        with self._lock:
            self._count += 1
            answer = Answer(self._count, verb)
            if self._gone:
                answer.parts.put((GONE, b""))
                return answer
            self._open[answer.number] = answer
            self._send(answer.number, verb, arguments)
        return answer

    def say(self, verb: str, value: Any = None, answer: Answer | None = None) -> None:
        """Send what needs no answer; it may be about one that is under way."""
        with self._lock:
            if not self._gone:
                number = answer.number if answer is not None else 0
                self._send(number, verb, pickle.dumps(value))

    def close(self, patience_s: float = LEAVES_S) -> None:
        """End the connection, and see to it that the process ends too. Safe to call twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:  # it is there, but does not listen
            self._process.kill()
            self._process.wait()
        self._reader.join(LEAVES_S)
        self._socket.close()

    def _send(self, number: int, verb: str, arguments: bytes) -> None:
        with suppress(OSError):  # it is gone, and the reader finds that out
            send(self._connection, number, verb, arguments)

    def _listen(self) -> None:
        try:
            with suppress(EOFError, OSError):
                try:
                    while True:
                        self._deliver(*receive(self._connection))
                except BlockingIOError:  # the limit of a silence
                    self._silent = True
        finally:
            # It has ended, or hangs: whoever is sending to it, with the lock, is set free.
            self._process.kill()
            with self._lock:
                self._gone = True
                for answer in self._open.values():
                    answer.parts.put((GONE, b""))
                self._open.clear()
                self._connection.close()

    def _deliver(self, number: int, kind: str, value: bytes) -> None:
        if kind == BEAT:
            return
        with self._lock:
            ends = kind in ("done", "error")
            answer = self._open.pop(number) if ends else self._open[number]
        answer.parts.put((kind, value))
