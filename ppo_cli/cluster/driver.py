"""The engine of a run over Ray. The process that talks to Ray, the driver, is a child of the run.

Ray ends a driver without a word, by `_exit(1)`: when shared memory does not answer (at any put,
get or release of an array, in `connection.cc`), when the raylet does not and our parent is
process 1 (`raylet_ipc_client.cc`), or when a thread still asks something as Ray shuts down
(`core_worker_process.cc`). A raylet that dies causes the first within milliseconds. No setting
turns that off. So the driver is a separate process (`driver_process.py`) that may end at any time.
This process then reports the cause and starts another driver."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ray import cloudpickle

from ppo_cli.algo.batch import AnnotatedBatch, Batch, merge_annotations
from ppo_cli.cluster.addresses import is_on_loopback
from ppo_cli.cluster.ray_process import LOCAL_ONLY, RayOptions, RayProcess, import_paths
from ppo_cli.cluster.serialise import dumps, lighten_prompt, prompts_by_uid, rejoin_prompt
from ppo_cli.cluster.worker_process import KILLED, read_tail
from ppo_cli.config.schema.run import Config, Transfer
from ppo_cli.engine.base import MiniBatch, Sampling, Sums
from ppo_cli.errors import PpoError, WorkerLost
from ppo_cli.planning.placement import Placement
from ppo_cli.records import Prompt, Rollout

STOP, DROP = "stop", "drop"  # messages without an answer
BEAT, BEAT_S = "beat", 2.0  # keeps the read timeout of the other side from expiring
GONE = "gone"
# From the end of the connection to that of the process.
LEAVES_S = 5.0
SILENT_S = 180.0  # it may take long to start on a busy machine


@dataclass(frozen=True)
class Answer:
    """The replies to one request: items, then its end."""

    number: int
    verb: str
    parts: SimpleQueue[tuple[str, bytes]] = field(default_factory=SimpleQueue)

    def take(self, timeout: float) -> tuple[str, Any]:
        """Return the next kind and value; raises queue.Empty when there is none in time."""
        kind, value = self.parts.get(timeout=timeout)
        return kind, pickle.loads(value) if value else None


def send(connection: Connection, number: int, kind: str, value: bytes) -> None:
    """Send a message. The value, which may be large, is sent without another pickling."""
    connection.send((number, kind))
    connection.send_bytes(value)


def receive(connection: Connection) -> tuple[int, str, bytes]:
    """Return the number of a request, what kind of message this is, and a pickled value."""
    number, kind = connection.recv()
    return number, kind, connection.recv_bytes()


def limit_silence(end: socket.socket, seconds: float) -> None:
    """Let a read fail with an OSError when nothing arrives for so long."""
    whole_seconds = int(seconds)
    limit = struct.pack("ll", whole_seconds, int((seconds - whole_seconds) * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


# The connection to the driver process; it does not know what the requests mean.
class Client:
    """Starts a process, sends it requests from any thread, and matches the replies to them.

    The last argument of the command is the file descriptor of its end of the connection. The
    process has a new session, so that Ctrl-C reaches only the run.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        # A socket pair, not pipes: it can be given a read timeout.
        self._socket, child_socket = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with child_socket, log.open("ab") as log_file:
            self._process = subprocess.Popen(
                [*command, str(child_socket.fileno())], pass_fds=[child_socket.fileno()],
                stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
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
        """Describe how the process ended, after a reply says that it is gone."""
        if self._silent:
            return f"said nothing for {SILENT_S:g} s"
        with suppress(subprocess.TimeoutExpired):
            if self._process.wait(LEAVES_S) == -signal.SIGKILL:
                return KILLED
        return "ended"

    def ask(self, verb: str, *args: Any) -> Answer:
        """Send a request."""
        arguments = dumps(args)
        # Numbers are given and messages sent under one lock, so that messages do not mix.
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
        """Send a message without an answer; it may concern an open request."""
        with self._lock:
            if not self._gone:
                number = answer.number if answer is not None else 0
                self._send(number, verb, pickle.dumps(value))

    def close(self, patience_s: float = LEAVES_S) -> None:
        """End the connection, and see to it that the process ends too. Safe to call twice."""
        # The process ends when it reads the end of the connection.
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
        """Deliver what the driver process sends, until it ends or is silent for too long.

        Then it kills the process, and every call that is still open receives GONE.
        """
        try:
            with suppress(EOFError, OSError):
                try:
                    while True:
                        self._deliver(*receive(self._connection))
                except BlockingIOError:  # the limit of a silence
                    self._silent = True
        finally:
            # It has ended, or hangs: killing it unblocks a thread that is sending with the lock.
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


# -P: a file in the current folder may be named like a module.
SERVICE = (sys.executable, "-P", "-m", "ppo_cli.cluster.driver_process")
TICK_S = 0.2
FAREWELL_S = 45.0
# Workers are lost before the supervisor of Ray knows which part of Ray failed.
CAUSE_S, CAUSE_OF_END_S = 0.5, 10.0


class DriverEngine:
    """Forwards the methods of `Engine` to the driver process, which has `ClusterEngine`."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        *,
        total_steps: int,
        placement: Placement,
        logs: Path,
        address: str | None = None,
        insists_on_transfer: bool = True,
        tell: Callable[[str], None] = lambda text: None,
        stop_requested: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._log = logs.absolute() / "ray.log"
        self._tell = tell
        self._stop_requested = stop_requested
        self._told_to_stop = False
        # The driver has deadlines for its calls, several for some verbs. This is its own.
        self._patience_s = 2 * config.trainer.node_timeout + 8 * config.trainer.worker_timeout
        self._closing = threading.Lock()
        self._closed = False
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="ppo-save")
        self._client: Client | None = None
        self._joins = False
        self._ray_process: RayProcess | None = None
        try:
            surroundings = os.environ | import_paths()
            if address is None:
                tell("Starting Ray")
                # As many logical CPUs as cores, so that as many workers start at the same time.
                options = RayOptions(os.cpu_count() or 1, placement.devices_per_node)
                surroundings |= LOCAL_ONLY
                self._ray_process = RayProcess(options, log=self._log, environ=surroundings)
            else:
                tell(f"Joining the Ray cluster at {address}")
                if is_on_loopback(address):
                    surroundings |= LOCAL_ONLY
            # It imports Ray while Ray starts.
            command = [*SERVICE, str(self._log)]
            self._client = Client(command, surroundings, self._log)
            if self._ray_process is not None:
                address = self._ray_process.await_address(
                    config.trainer.node_timeout, stop_requested
                )
            arguments = {
                "config": config, "tokenizer": cloudpickle.dumps(tokenizer), "logs": logs,
                "total_steps": total_steps, "placement": placement, "address": address,
                "insists_on_transfer": insists_on_transfer,
            }  # fmt: skip
            self._joins = True
            self.weight_transfer: Transfer = self._call("build", arguments, may_stop=True)
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, begun: Sequence[Rollout] = ()
    ) -> Iterator[Rollout]:
        """Yield rollouts of all samplers as they finish."""
        # Only what a sampler reads travels; the prompts are put back into the rollouts below.
        prompt_by_uid = prompts_by_uid(prompts, begun)
        light = {uid: lighten_prompt(prompt) for uid, prompt in prompt_by_uid.items()}
        new = [light[prompt.uid] for prompt in prompts]
        old = [replace(rollout, prompt=light[rollout.prompt.uid]) for rollout in begun]
        answer = self._ask("generate", new, sampling, old)
        kind = ""
        try:
            while True:
                kind, value = self._take(answer)
                if kind == "done":
                    return
                yield from (rejoin_prompt(item, prompt_by_uid) for item in value)
        finally:
            # The consumer stopped early: the driver need not sample the rest.
            if kind == "item" and self._client is not None:
                self._client.say(DROP, answer=answer)

    def annotate(self, batch: Batch) -> AnnotatedBatch:
        """Add old and reference log-probs, entropy and values."""
        return merge_annotations(batch, self._call("annotate", batch))

    def step(self, minibatch: MiniBatch) -> Sums:
        """Take one optimizer step on all ranks."""
        sums: Sums = self._call("step", minibatch)
        return sums

    def publish(self) -> None:
        """Raise the weight version and bring the new weights to all samplers."""
        self._call("publish")

    def save(self, directory: Path, *, last: bool = False) -> Future[None]:
        """Keep what is to be saved and return; the future is done when all ranks have written."""
        answer = self._ask("save", directory.absolute(), last)
        # The first part of the answer: the snapshot is taken, and training may go on.
        self._take(answer)
        return self._saver.submit(self._finish, answer)

    def load(self, directory: Path) -> None:
        """Take back all that was saved, and bring it to the samplers."""
        self._call("load", directory.absolute())

    def host(self, factory: Callable[[], Any], *, role: str, devices: Sequence[int] = ()) -> Hosted:
        """Host what a picklable factory makes in a separate process, on these devices."""
        if self._closed:
            raise WorkerLost(f"The {role} cannot start: its cluster has ended.")
        # Starting a worker and what it hosts takes long: a stop is heard meanwhile.
        number = self._call("host", factory, role, tuple(devices), may_stop=True)
        return Hosted(self, role, number)

    def close(self) -> None:
        """End all workers, and Ray if we started it. Safe to call twice, and from two threads."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._saver.shutdown(wait=False, cancel_futures=True)
            # In this order: the driver leaves Ray, its process ends, Ray ends.
            with ExitStack() as last:  # each step, even when a signal interrupts another
                if self._ray_process is not None:
                    last.callback(self._ray_process.close)
                if self._client is not None:
                    # A driver that has not joined Ray may still be importing; it can be killed.
                    last.callback(self._client.close, LEAVES_S if self._joins else 0)
                    if self._joins:
                        with suppress(PpoError):
                            self._part(self._client)

    @property
    def closed(self) -> bool:
        """Whether it takes no requests any more."""
        return self._closed

    def _part(self, client: Client) -> None:
        """Stop what the driver process builds, ask it to close, and wait FAREWELL_S at most."""
        client.say(STOP, "closing")  # if it still builds the engine
        answer = client.ask("close")
        deadline = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline and self._failure() is None:
            with suppress(Empty):
                answer.take(TICK_S)
                return

    def _call(self, verb: str, *args: Any, may_stop: bool = False) -> Any:
        return self._finish(self._ask(verb, *args), may_stop)

    def _ask(self, verb: str, *args: Any) -> Answer:
        if self._closed or self._client is None:
            raise WorkerLost("The cluster is closed.")
        return self._client.ask(verb, *args)

    def _finish(self, answer: Answer, may_stop: bool = False) -> Any:
        return self._take(answer, may_stop)[1]

    def _take(self, answer: Answer, may_stop: bool = False) -> tuple[str, Any]:
        """Wait for the next part of an answer; raises the driver's error, or that of Ray."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                kind, value = answer.take(TICK_S)
            except Empty:
                self._look_up(may_stop)
                if time.monotonic() > deadline:
                    raise WorkerLost(self._silent(answer.verb)) from None
                continue
            # A reply is a note for the user, an error, the driver's end, an item or the result.
            if kind == "tell":
                self._tell(value)
            elif kind == "error":
                raise self._explained(value)
            elif kind == GONE:
                raise WorkerLost(self._cause(CAUSE_OF_END_S) or self._ended(answer.verb))
            else:
                return kind, value

    def _look_up(self, may_stop: bool) -> None:
        if not self._closed and (failure := self._failure()):
            raise WorkerLost(failure)
        if may_stop and not self._told_to_stop and (reason := self._stop_requested()):
            self._told_to_stop = True
            assert self._client is not None
            self._client.say(STOP, reason)

    def _failure(self) -> str | None:
        return self._ray_process.failure() if self._ray_process is not None else None

    def _explained(self, error: BaseException) -> BaseException:
        """Replace the error of a lost worker when Ray itself was lost."""
        if isinstance(error, WorkerLost) and (cause := self._cause(CAUSE_S)):
            return WorkerLost(cause)
        return error

    def _cause(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while self._ray_process is not None and not self._closed and time.monotonic() < deadline:
            if failure := self._failure():
                return failure
            time.sleep(TICK_S / 4)
        return None

    def _silent(self, verb: str) -> str:
        return (
            f"The process that talks to Ray has not answered `{verb}` for {self._patience_s:g} s. "
            f"{read_tail(self._log, self._client.pid if self._client else 0)}"
        )

    def _ended(self, verb: str) -> str:
        if self._closed:
            return f"The cluster was closed during `{verb}`."
        assert self._client is not None
        ending, tail = self._client.ending(), read_tail(self._log, self._client.pid)
        return f"The process that talks to Ray {ending} during `{verb}`. {tail}"


class Hosted:
    """An object in a worker, called through the driver process. Usable from any thread."""

    def __init__(self, engine: DriverEngine, role: str, number: int) -> None:
        self._engine = engine
        self._role = role
        self._number = number
        self._ended = False

    @property
    def alive(self) -> bool:
        """Whether it can still be called: not lost, not closed, nor the cluster under it."""
        return not self._ended and not self._engine.closed

    def call(self, name: str, *args: Any) -> Any:
        """Call a method and wait for what it gives; raises what it raised.

        Raises WorkerLost when the worker died, hangs, or was closed, at any moment of the call.
        """
        if not self.alive:
            raise WorkerLost(f"The {self._role} has ended.")
        try:
            return self._engine._call("call", self._number, name, *args)
        except WorkerLost:
            self._ended = True
            raise
        except Exception as error:
            if self.alive:
                raise
            raise WorkerLost(f"The {self._role} was closed meanwhile.") from error

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._ended = True
        with suppress(WorkerLost):  # gone with the others
            self._engine._call("dismiss", self._number)
